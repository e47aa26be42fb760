"""Decoding videos with PyAV: the wanted frames, or the facts of the whole file.

A video is a file, or the bytes of one in memory. Frame i is the i-th decoded frame in presentation order, whatever the
file says of times or counts. Sizes are upright: the display matrix's rotation is applied. The sample aspect ratio is
not, as in decord and the TSM code: a picture keeps its stored pixels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from io import BytesIO
from itertools import chain
from typing import Any, TypeAlias, cast

import av
import av.logging
from av.container import InputContainer
from av.packet import Packet as AnyPacket
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from summit_train.data.video.render import Frames, Renderer, turn_in
from summit_train.data.video.source import MAX_HELD_BYTES, NO_HURRY, Budget, DecodeError, Encoded, Limits, VideoInfo

Packet: TypeAlias = "AnyPacket[VideoStream]"
Render = Callable[[VideoFrame], list[Frames]]
Pictures = dict[int, list[Frames]]
Numbered = Iterator[tuple[int, VideoFrame]]

# FFmpeg would also open playlists that name other files, text and images as videos.
_FORMATS = (
    "3gp,asf,av1,avi,dv,flv,gif,h264,hevc,ivf,m4v,matroska,mjpeg,mov,mp4,mpeg,mpegts,mpegvideo,mxf,nut,"
    "obu,ogg,rm,swf,webm,wtv"
)
_OPEN: dict[str, Any] = {
    # Titles and authors may be in any encoding and are not needed.
    "metadata_errors": "ignore",
    "container_options": {"format_whitelist": _FORMATS, "protocol_whitelist": "file"},
}
# These decoders can skip frames that no other frame needs, without changing the others.
_SKIPPING_CODECS = frozenset({"h264", "hevc"})
# A jump must save at least this many frames to be worth the decoder's flush.
_MIN_SAVED_FRAMES = 4


class _InMemory(BytesIO):
    """Bytes with a name: FFmpeg looks at its extension where the bytes could be of several formats."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name


@contextmanager
def open_video(video: Encoded, budget: Budget) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a file or its bytes for decoding; errors of FFmpeg within the block become DecodeErrors."""
    video.check()
    # PyAV gets an opened file: it would take a name such as "a:b.mp4" for a protocol, and refuse one that is not UTF-8.
    content = video.content
    with (
        _decode_errors(video.name),
        open(video.name, "rb") if content is None else _InMemory(content, video.name) as source,
        open_source(video.name, source, budget) as opened,
    ):
        yield opened


@contextmanager
def open_source(name: str, source: Any, budget: Budget) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open an object with a `read` method for decoding, and close it; errors in the block become DecodeErrors."""
    with _decode_errors(name), _container(name, source, budget) as container:
        stream = _video_stream(name, container)
        budget.size(stream.width, stream.height)
        stream.codec_context.options = codec_options(budget)
        yield container, stream


@contextmanager
def _decode_errors(name: str) -> Iterator[None]:
    try:
        yield
    except av.FFmpegError as error:
        raise DecodeError(name, f"cannot be decoded: {error.strerror}") from error
    except MemoryError as error:
        raise DecodeError(name, "wants more memory than a video may have") from error
    except OSError as error:
        raise DecodeError(name, error.strerror or str(error)) from error


def codec_options(budget: Budget) -> dict[str, str]:
    """Return options with which a decoder refuses too large a frame before it allocates it."""
    return {"max_pixels": str(budget.limits.pixels)}


def _container(name: str, source: Any, budget: Budget) -> InputContainer:
    try:
        return cast(InputContainer, av.open(source, options=codec_options(budget), **_OPEN))
    except (av.InvalidDataError, av.ArgumentError) as error:
        raise DecodeError(name, "is no video of a kind that is read here, or its header is damaged") from error


def _video_stream(name: str, container: InputContainer) -> VideoStream:
    """Return the first video stream that is no cover picture, with one thread: loaders run many processes."""
    for stream in container.streams.video:
        if stream.disposition & Disposition.attached_pic:
            continue
        if stream.codec_context is None:
            raise DecodeError(name, "there is no decoder for its video codec")
        stream.codec_context.thread_count = 1
        return stream
    raise DecodeError(name, "has no video stream")


def demuxed(container: InputContainer, stream: VideoStream, budget: Budget) -> Iterator[Packet]:
    """Yield the video packets, without the empty ones by which PyAV marks the end."""
    for number, packet in enumerate(container.demux(stream)):
        budget.packet(number)
        if packet.size:
            yield packet


def count_packets(video: Encoded, budget: Budget) -> int:
    """Count the frames that the packets promise; at least 1, because only decoding can tell that there is none."""
    with open_video(video, budget) as (container, stream):
        return max(1, sum(not packet.is_discard for packet in demuxed(container, stream, budget)))


def read_from_start(video: Encoded, wanted: frozenset[int], render: Render, budget: Budget) -> tuple[Pictures, int]:
    """Decode from the start; return the wanted frames' pictures and the number of frames seen. Raises DecodeError."""
    with open_video(video, budget) as (container, stream):
        packets = chain(demuxed(container, stream, budget), [None])
        frames = (frame for packet in packets for frame in stream.decode(packet))
        pictures, num_seen = _pick(video.name, enumerate(frames), wanted, render)
    if not num_seen:
        raise DecodeError(video.name, "no frame can be decoded")
    return pictures, num_seen


def read_by_jumps(
    video: Encoded, wanted: frozenset[int], render: Renderer, num_frames: int, budget: Budget
) -> Pictures:
    """Decode from the nearest key frames; return the wanted pictures, or none where they might be wrong."""
    try:
        with open_video(video, budget) as (container, stream):
            first_size = (stream.width, stream.height)
            packets = _held(demuxed(container, stream, budget))
            # AVI stores no presentation times: with reordering FFmpeg's own guesses are wrong.
            if container.format.name == "avi" and stream.codec_context.has_b_frames:
                return {}
            facts = [(packet.pts, packet.is_keyframe, packet.is_discard) for packet in packets]
            numbered = _jumped(stream, packets, FrameIndex(facts, num_frames), wanted)
            pictures, _ = _pick(video.name, numbered, wanted, render)
    except (DecodeError, AmbiguousTimes):
        # Decoding from the start decides: it gives the frames, or the error at its right place.
        return {}
    # A video that changes its size is scaled by its first frame, which a jump does not see.
    return pictures if render.stored_size == first_size and len(pictures) == len(wanted) else {}


def _held(packets: Iterable[Packet]) -> list[Packet]:
    """Return the packets, or none where they are too many bytes: a header may name one place many times."""
    held, num_bytes = list[Packet](), 0
    for packet in packets:
        held.append(packet)
        num_bytes += packet.size
        if num_bytes > MAX_HELD_BYTES:
            return []
    return held


def _pick(
    name: str, numbered: Iterable[tuple[int, VideoFrame]], wanted: frozenset[int], render: Render
) -> tuple[Pictures, int]:
    """Render the wanted frames; return them and the number of frames up to the last of them, or to the file's end.

    Raises DecodeError where a wanted frame is damaged.
    """
    pictures, num_seen = Pictures(), 0
    for number, frame in numbered:
        num_seen = number + 1
        if number in wanted:
            if frame.is_corrupt:
                raise DecodeError(name, f"frame {number} is damaged")
            pictures[number] = render(frame)
            if len(pictures) == len(wanted):
                break
    return pictures, num_seen


class AmbiguousTimes(ValueError):
    """The packets' times do not tell which frame is which."""


class FrameIndex:
    """The place of each frame's packet in decoding order; frame i is the i-th in presentation order.

    packets: of each its presentation time, whether it is a key frame, and whether it is not to be shown. Raises
    AmbiguousTimes where there are not as many as frames, one has no time or another one's, or none is a key frame.
    """

    def __init__(self, packets: Sequence[tuple[int | None, bool, bool]], num_frames: int) -> None:
        places = [place for place, (_, _, is_discarded) in enumerate(packets) if not is_discarded]
        shown = sorted((time, place) for place in places if (time := packets[place][0]) is not None)
        self.number_of: dict[int | None, int] = {time: number for number, (time, _) in enumerate(shown)}
        self._shown = shown
        self._keys = [number for number, (_, place) in enumerate(shown) if packets[place][1]]
        if not (len(self.number_of) == len(places) == num_frames and self._keys):
            raise AmbiguousTimes(f"{len(self.number_of)} times of {len(places)} packets for {num_frames} frames")

    def spans(self, wanted: Iterable[int]) -> Iterator[tuple[int, int, set[int]]]:
        """Yield what is decoded without a jump: the first and the last packet, and the times of the wanted frames.

        They rise. A frame is decoded from the last key frame at or before it, or from the wanted frame before it where
        a jump would save too little. The first packet may be the file's.
        """
        start, numbers = 0, list[int]()
        for number in sorted(wanted):
            key = self._keys[max(0, bisect_right(self._keys, number) - 1)]
            decoded = numbers[-1] if numbers else -1
            if decoded + _MIN_SAVED_FRAMES < key <= number:
                if numbers:
                    yield self._span(start, numbers)
                start, numbers = self._shown[key][1], []
            numbers.append(number)
        yield self._span(start, numbers)

    def _span(self, start: int, numbers: Sequence[int]) -> tuple[int, int, set[int]]:
        times, places = zip(*(self._shown[number] for number in numbers), strict=True)
        # With B-frames a packet of an earlier frame can stand behind that of a later one.
        return start, max(places), set(times)


def _jumped(stream: VideoStream, packets: Sequence[Packet], index: FrameIndex, wanted: frozenset[int]) -> Numbered:
    """Yield the wanted frames (and others) with their numbers, decoded from the nearest key frames."""
    context = stream.codec_context
    if context.name == "mpeg4":
        # The first packet may name the encoder, whose rounding the decoder imitates.
        stream.decode(packets[0])
        context.flush_buffers()
    for first, last, times in index.spans(wanted):
        for packet in [*packets[first : last + 1], None]:
            if packet is not None and context.name in _SKIPPING_CODECS:
                context.skip_frame = "DEFAULT" if packet.pts in times else "NONREF"
            for frame in stream.decode(packet):
                # Frames that are not to be shown have no number.
                if (number := index.number_of.get(frame.pts)) is not None:
                    yield number, frame
        context.flush_buffers()


def probe(video: Encoded, limits: Limits = NO_HURRY) -> VideoInfo:
    """Decode every frame of a video and return its facts.

    Raises DecodeError for a file that is no video, and for a video that is damaged or cut short anywhere.
    """
    # The log starts before the opening, which reads a short file to its end.
    budget = Budget(video.name, limits)
    with error_log() as log, open_video(video, budget) as (container, stream):
        tally = Tally(stream.time_base)
        width, height = _tally_all(demuxed(container, stream, budget), stream, tally)
        if is_cut_short(container, stream):
            tally.damage.append("the file is cut short")
        tally.damage += damage_in(log, container)
        if tally.damage or not tally.num_frames:
            reason = tally.damage[0] if tally.damage else "no frame can be decoded"
            raise DecodeError(video.name, f"{reason} ({tally.num_frames} frames decoded)")
        fps = float(stream.average_rate or stream.guessed_rate or 0) or None
        return VideoInfo(tally.num_frames, fps, width, height, tally.duration, stream.codec_context.name)


def is_cut_short(container: InputContainer, stream: VideoStream) -> bool:
    """Return whether the file ends before a packet that its index names."""
    return any(entry.pos + entry.size > container.size for entry in stream.index_entries)


def damage_in(log: Iterable[tuple[int, str, str]], container: InputContainer) -> list[str]:
    """Return the messages of FFmpeg that tell of damage, with their speakers."""
    # Decoders' messages are often harmless; those of containers are not, nor of HEVC, which marks no frame.
    speakers = (container.format.name, "hevc")
    return [f"{speaker}: {line.strip()}" for _, speaker, line in log if speaker in speakers]


class Tally:
    """Collects the facts of a full decode, and the damage in the order in which it is found."""

    def __init__(self, time_base: Fraction | None) -> None:
        self._time_base = time_base
        self._times = list[int]()
        self._last_duration = 0
        self.num_frames = 0
        self.damage = list[str]()

    def add(self, time: int | None, duration: int, is_damaged: bool) -> None:
        """Add a decoded frame: its presentation time and duration in units of the time base."""
        if is_damaged:
            self.damage.append(f"frame {self.num_frames} is damaged")
        if time is not None:
            self._times.append(time)
            self._last_duration = duration
        self.num_frames += 1

    @property
    def duration(self) -> float | None:
        """Return seconds from the first frame's start to the last one's end (where unknown, a mean interval on)."""
        if not self._times or not self._time_base:
            return None
        span = max(self._times) - min(self._times)
        last = self._last_duration or Fraction(span, max(1, len(self._times) - 1))
        return float((span + last) * self._time_base) or None


@contextmanager
def error_log() -> Iterator[list[tuple[int, str, str]]]:
    """Collect FFmpeg's error messages (level, speaker, line); some damage shows nowhere else."""
    level, skip_repeated = av.logging.get_level(), av.logging.get_skip_repeated()
    av.logging.set_level(av.logging.ERROR)
    # Else a message that the file before had too is dropped.
    av.logging.set_skip_repeated(False)
    try:
        with av.logging.Capture() as lines:
            yield lines
    finally:
        av.logging.set_level(level)
        av.logging.set_skip_repeated(skip_repeated)


def _tally_all(packets: Iterable[Packet], stream: VideoStream, tally: Tally) -> tuple[int, int]:
    """Decode to the end, past errors; return the first frame's upright width and height."""
    size = (0, 0)
    for packet in chain(packets, [None]):
        if packet is not None and packet.is_corrupt:
            tally.damage.append(f"a packet after frame {tally.num_frames} is damaged or cut short")
        try:
            for frame in stream.decode(packet):
                if not tally.num_frames:
                    size = turn_in(frame).size(frame.width, frame.height)
                tally.add(frame.pts, frame.duration, frame.is_corrupt)
        except av.FFmpegError as error:
            tally.damage.append(f"decoding fails after frame {tally.num_frames}: {error.strerror}")
    return size
