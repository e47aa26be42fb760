"""An open clip: the number of its frames, their size, and their pixels in the chosen views.

Frame i is the i-th in presentation order, whatever a file says of times or counts. To read a clip, choose K times T of
`num_frames` frames, cut views for their `size`, and `read` both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias

import numpy as np
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from numpy.typing import NDArray

from summit_train.data.video.augment import View
from summit_train.data.video.decode import (
    NumberedFrame,
    check_whole,
    count_packets,
    every_frame,
    ffmpeg_errors,
    frames_by_jumps,
)
from summit_train.data.video.pictures import decode_picture, list_pictures
from summit_train.data.video.region import WHOLE_FRAME, Region
from summit_train.data.video.render import Frames, Renderer, upright_size
from summit_train.data.video.source import LIMITS, Budget, DecodeError, Encoded, Limits, read_bytes
from summit_train.data.video.span import Span

Numbers: TypeAlias = NDArray[np.int64]
# From numbers of pictures, which rise, to the name for messages and the bytes of each.
Fetch = Callable[[Sequence[int]], Iterator[tuple[str, bytes]]]

# A video that is read on decodes at most this many frames that are not needed before it gives way to a jump.
_MAX_SKIPPED_FRAMES = 1000


class ChooseAgain(Exception):
    """The container was wrong about the number or the size of the frames, and now the clip knows the right ones."""


class OpenClip:
    """A clip whose frames can be read, once or several times, until it is closed.

    frames: their numbers, int64 (K, T), in any order and with repeats. All methods raise DecodeError if the clip cannot
    be read, something that the frames need is damaged, or it takes more than its limits; `size` and `read` ChooseAgain.
    """

    def __enter__(self) -> OpenClip:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""

    @property
    def num_frames(self) -> int:
        """The number of frames, as far as is known: an entry of a list and a container's packets can be wrong."""
        raise NotImplementedError

    def size(self, frames: Numbers) -> tuple[int, int]:
        """Return the upright (width, height) in pixels of the first of these frames in the clip; views are cut for it.

        A `read` of the same frames does not decode it once more.
        """
        raise NotImplementedError

    def read(self, frames: Numbers, views: Sequence[View]) -> Frames:
        """Read K clips in C views: uint8 (K * C, T, height, width, channels), clip by clip.

        views: of frames of `size`; their crops have one size. A frame is decoded and scaled once.
        """
        raise NotImplementedError

    def stored(self, frames: Numbers) -> Numbers:
        """Return the numbers of what `read` gives: the frame at or before each, where only every n-th is stored."""
        return frames


class DecodedClip(OpenClip):
    """A clip whose frames are decoded one after the other."""

    is_grey = False

    def __init__(self, name: str, num_frames: int, limits: Limits) -> None:
        self._num_frames = num_frames
        self._budget = Budget(name, limits)
        # What `size` has begun, for a `read` of the same frames: their numbers, their size, and the frames.
        self._begun: tuple[list[int], tuple[int, int], Iterator[NumberedFrame]] | None = None

    @property
    def num_frames(self) -> int:
        return self._num_frames

    def close(self) -> None:
        self._begun = None

    def _decode(self, wanted: Sequence[int]) -> Iterator[NumberedFrame]:
        """Yield frames of these rising numbers; all of them once more where those before may be wrong."""
        raise NotImplementedError

    def size(self, frames: Numbers) -> tuple[int, int]:
        wanted = _once_each(frames, self.num_frames)
        self._begun = None
        decoded = self._decode(wanted)
        first = next(decoded)
        size = upright_size(first[1])
        self._begun = wanted, size, chain([first], decoded)
        return size

    def read(self, frames: Numbers, views: Sequence[View]) -> Frames:
        wanted = _once_each(frames, self.num_frames)
        size: tuple[int, int] | None = None
        if self._begun is not None and self._begun[0] == wanted:
            _, size, decoded = self._begun
        else:
            decoded = self._decode(wanted)
        self._begun = None
        render = Renderer(views, is_grey=self.is_grey)
        pictures = dict[int, list[Frames]]()
        with ffmpeg_errors(self._budget.name):
            for number, frame in decoded:
                if number == wanted[0] and size not in (None, upright_size(frame)):
                    raise ChooseAgain
                pictures[number] = render(frame)
        self._budget.restart()
        clips = [[pictures[number] for number in row] for row in frames.tolist()]
        return np.array([view for clip in clips for view in zip(*clip, strict=True)])


class VideoClip(DecodedClip):
    """All frames of a video.

    num_frames: from a list; with it frames are decoded from the nearest key frames if that is certain to give the
    right ones. is_checked: `data index` has counted them, see `frames_by_jumps`. Without a number the packets are
    counted and, where some can lack a frame, the frames. After the first read the next ones continue where the last one
    stopped, if they go forwards.
    """

    def __init__(
        self, video: Encoded, num_frames: int | None = None, limits: Limits = LIMITS, *, is_checked: bool = False
    ) -> None:
        super().__init__(video.name, num_frames or 0, limits)
        self._video = video
        self._is_checked = is_checked
        # The ways of jumping that are left, by whether they seek. Where a seek does not lead to the packets of the
        # index, the file is read up to them.
        self._jumps = [True, False] if num_frames and video.index else [False] if num_frames else []
        self._count_is_final = True
        self._playing: Iterator[VideoFrame] | None = None  # from the start, over several reads
        self._next = 0  # the number of its next frame
        self._was_read = False
        if not num_frames:
            self._num_frames, self._count_is_final = count_packets(video, self._budget)

    def close(self) -> None:
        super().close()
        self._playing = None

    def read(self, frames: Numbers, views: Sequence[View]) -> Frames:
        pixels = super().read(frames, views)
        self._video.check()
        self._was_read = True
        return pixels

    def frames(self, wanted: Sequence[int]) -> Iterator[NumberedFrame]:
        """Yield the frames of these rising numbers. Raises ChooseAgain also where those so far may be wrong."""
        last = -1
        for number, frame in self._decode(wanted):
            if number <= last:  # decoding has begun again
                raise ChooseAgain
            last = number
            yield number, frame
        self._video.check()

    def _decode(self, wanted: Sequence[int]) -> Iterator[NumberedFrame]:
        plays_on = self._was_read and 0 <= wanted[0] - self._next < _MAX_SKIPPED_FRAMES
        while self._jumps and not plays_on:
            try:
                yield from frames_by_jumps(
                    self._video,
                    wanted,
                    self.num_frames,
                    self._budget,
                    is_checked=self._is_checked,
                    seeks=self._jumps[0],
                )
                return
            except DecodeError:
                # Decoding from the start decides: it gives the frames, or the error at its right place.
                del self._jumps[0]
        yield from self._from_start(wanted)

    def _from_start(self, wanted: Sequence[int]) -> Iterator[NumberedFrame]:
        """Yield the wanted frames. Raises ChooseAgain if the video turns out to have another number of frames."""
        if self._playing is None or wanted[0] < self._next:
            self._playing = every_frame(self._video, self._budget)
            self._next = 0
        chosen = frozenset(wanted)
        for frame in self._playing:
            number = self._next
            self._next += 1
            if number in chosen:
                check_whole(self._video.name, number, frame)
                yield number, frame
            if self._count_is_final and number == wanted[-1]:
                return
        self._playing = None
        self._count_is_final = True
        if self._next == self.num_frames:
            return
        if self._was_read:  # what was shown before was chosen of another number of frames
            reason = f"is damaged: decoded from the start, it has {self._next} frames instead of {self.num_frames}"
            raise DecodeError(self._video.name, reason)
        self._num_frames = self._next
        raise ChooseAgain


class PictureClip(DecodedClip):
    """Frames that are stored as JPEG or PNG pictures of their own.

    name: of the whole, for messages. fetch: is called for the pictures of a read. is_grey: as those of optical flow.
    """

    def __init__(
        self, name: str, fetch: Fetch, num_frames: int, limits: Limits = LIMITS, *, is_grey: bool = False
    ) -> None:
        super().__init__(name, num_frames, limits)
        self.is_grey = is_grey
        self._fetch = fetch
        self._decoders = dict[bytes, VideoCodecContext]()

    def _decode(self, wanted: Sequence[int]) -> Iterator[NumberedFrame]:
        for number, (name, content) in zip(wanted, self._fetch(wanted), strict=True):
            _, frame = decode_picture(name, content, self._budget, self._decoders)
            yield number, frame


class ArrayClip(DecodedClip):
    """RGB frames in memory, uint8 (F, height, width, 3)."""

    def __init__(self, frames: Frames) -> None:
        super().__init__("", len(frames), LIMITS)
        self._frames = frames

    def _decode(self, wanted: Sequence[int]) -> Iterator[NumberedFrame]:
        for number in wanted:
            yield number, VideoFrame.from_ndarray(np.ascontiguousarray(self._frames[number]), "rgb24")


def open_folder(folder: str, num_frames: int | None, limits: Limits = LIMITS, *, is_flow: bool = False) -> PictureClip:
    """Return the clip of a folder's pictures. Raises DecodeError, also for a wrong `num_frames`.

    is_flow: its pictures of flow, grey, in the order of `list_pictures`; `num_frames` then counts fields.
    """
    if is_flow and os.path.isfile(folder):
        raise DecodeError(folder, "is a video, and data.modality is flow: make its flow with `summit-train data flow`")
    paths = list_pictures(folder, is_flow=is_flow)
    each, what = (2, "fields of flow") if is_flow else (1, "pictures")
    if num_frames not in (None, len(paths) // each):
        raise DecodeError(folder, f"holds {len(paths) // each} {what}, but the manifest says {num_frames}")

    def fetch(numbers: Sequence[int]) -> Iterator[tuple[str, bytes]]:
        return ((paths[number], read_bytes(paths[number])) for number in numbers)

    return PictureClip(folder, fetch, len(paths), limits, is_grey=is_flow)


@dataclass(frozen=True)
class DerivedClip(OpenClip):
    """A clip that is made of the frames of another one, which it closes."""

    video: OpenClip

    def close(self) -> None:
        self.video.close()

    @property
    def num_frames(self) -> int:
        return self.video.num_frames

    def _in_video(self, frames: Numbers) -> Numbers:
        """Return the numbers that these frames have in the other one."""
        return frames

    def size(self, frames: Numbers) -> tuple[int, int]:
        return self.video.size(self._in_video(frames))

    def read(self, frames: Numbers, views: Sequence[View]) -> Frames:
        return self.video.read(self._in_video(frames), views)


@dataclass(frozen=True)
class PartClip(DerivedClip):
    """A span of a video, and of its frames a region. name, place: of the video and of its line, for messages."""

    span: Span
    name: str
    region: Region = WHOLE_FRAME
    place: str = ""

    @property
    def num_frames(self) -> int:
        return len(self.span.frames(self.name, self.video.num_frames))

    def _in_video(self, frames: Numbers) -> Numbers:
        return self.span.start + frames

    def size(self, frames: Numbers) -> tuple[int, int]:
        size = super().size(frames)
        if self.region == WHOLE_FRAME:
            return size
        if (problem := self.region.problem(*size)) is not None:
            raise DecodeError(self.name, f"{problem} ({self.place})")
        return self.region.width, self.region.height

    def read(self, frames: Numbers, views: Sequence[View]) -> Frames:
        if self.region != WHOLE_FRAME:
            views = [replace(view, region=self.region) for view in views]
        return super().read(frames, views)


def _once_each(frames: Numbers, num_frames: int) -> list[int]:
    """Return the numbers of the frames, rising."""
    if not frames.size or frames.min() < 0 or frames.max() >= num_frames:
        raise ValueError(f"the frames chosen of {num_frames} do not lie among them: {frames.tolist()}")
    return sorted(set(frames.ravel().tolist()))
