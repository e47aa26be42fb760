"""Planning jumps to key frames: the packets to decode for the wanted frames, and the numbers of decoded frames."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from av.video.frame import VideoFrame

from summit_train.data.video.source import DecodeError

# A jump must save at least this many frames to be worth the decoder's flush.
MIN_SAVED_FRAMES = 4

Picture = TypeVar("Picture")


@dataclass(frozen=True)
class Span:
    """Packets `first` to `last` (in decoding order, both included) are decoded for the frames at `times`."""

    first: int
    last: int
    times: frozenset[int]


def pick(
    name: str,
    numbered: Iterable[tuple[int, VideoFrame]],
    wanted: frozenset[int],
    render: Callable[[VideoFrame], Picture],
) -> tuple[dict[int, Picture], int]:
    """Render the wanted frames; return them and the number of frames up to the last of them, or to the file's end.

    name: of the video. Raises DecodeError where a wanted frame is damaged.
    """
    pictures: dict[int, Picture] = {}
    num_seen = 0
    for number, frame in numbered:
        num_seen = number + 1
        if number in wanted:
            if frame.is_corrupt:
                raise DecodeError(name, f"frame {number} is damaged")
            pictures[number] = render(frame)
            if len(pictures) == len(wanted):
                break
    return pictures, num_seen


class FrameIndex:
    """The place of each frame's packet in decoding order; frame i is the i-th in presentation order.

    times: each packet's presentation time, in decoding order. keys: whether it is a key frame. discarded: whether it is
    not to be shown. Raises ValueError where the times are ambiguous: not as many packets as frames, a packet without a
    time or with another one's, no key frame.
    """

    def __init__(
        self, times: Sequence[int | None], keys: Sequence[bool], discarded: Sequence[bool], num_frames: int
    ) -> None:
        timed = ((time, place) for place, time in enumerate(times) if time is not None)
        shown = sorted((time, place) for time, place in timed if not discarded[place])
        if not len(shown) == len(discarded) - sum(discarded) == num_frames:
            raise ValueError(f"{len(shown)} packets with a time for {num_frames} frames")
        self.number_of = {time: number for number, (time, _) in enumerate(shown)}
        if len(self.number_of) != num_frames:
            raise ValueError("two packets with one time")
        self._times = [time for time, _ in shown]
        self._places = [place for _, place in shown]
        self._keys = [number for number, place in enumerate(self._places) if keys[place]]
        if not self._keys:
            raise ValueError("no key frame")

    def spans(self, wanted: Iterable[int]) -> Iterator[Span]:
        """Yield the spans that are decoded without a jump, in rising order of their frames.

        A frame is decoded from the last key frame at or before it, or from the wanted frame before it where a jump
        would save too little. The first span may begin at the file's first packet.
        """
        start, numbers = 0, list[int]()
        for number in sorted(wanted):
            key = self._keys[max(0, bisect_right(self._keys, number) - 1)]
            decoded = numbers[-1] if numbers else -1
            if decoded + MIN_SAVED_FRAMES < key <= number:
                if numbers:
                    yield self._span(start, numbers)
                start, numbers = self._places[key], []
            numbers.append(number)
        yield self._span(start, numbers)

    def numbered(self, frames: Iterable[VideoFrame]) -> Iterator[tuple[int, VideoFrame]]:
        """Yield decoded frames with their numbers, without those that are not to be shown."""
        for frame in frames:
            number = None if frame.pts is None else self.number_of.get(frame.pts)
            if number is not None:
                yield number, frame

    def _span(self, start: int, numbers: Sequence[int]) -> Span:
        # With B-frames a packet of an earlier frame can stand behind that of a later one.
        last = max(self._places[number] for number in numbers)
        return Span(start, last, frozenset(self._times[number] for number in numbers))
