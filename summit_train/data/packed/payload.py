"""The sample that a clip becomes in its shard: the file's own bytes, or pictures of its frames or of their flow."""

from __future__ import annotations

import io
import math
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from summit_train.data.packed.format import (
    MAX_MEMBER_BYTES,
    MAX_PICTURES_BYTES,
    Facts,
    Packing,
    encode_sample,
    ending_of,
    picture_checksum,
)
from summit_train.data.video.augment import View, scaled_size
from summit_train.data.video.clips import list_flow_pictures, list_pictures
from summit_train.data.video.decode import count_packets, read_from_start
from summit_train.data.video.flow import FlowError, encode, flow_method, grey
from summit_train.data.video.pictures import PictureReader, probe_picture, restart_units
from summit_train.data.video.render import Renderer
from summit_train.data.video.source import NO_HURRY, Budget, DecodeError, Encoded, Limits, load_video, read_bytes

# From a clip's facts to those that are packed and the bytes of its file or of its pictures. Raises DecodeError.
Read = Callable[[Facts], tuple[Facts, list[bytes]]]


@dataclass(frozen=True)
class Sample:
    """A clip as it is packed: its bytes in the shard, and what the index says of the `length` ones of its content.

    checksum: see CLIP_ROW. pictures: (end, checksum) of each. is_shared: the content is that of the sample before.
    """

    facts: Facts
    encoded: bytes
    length: int
    checksum: int
    pictures: list[tuple[int, int]]
    is_shared: bool = False


def make_samples(
    clips: Sequence[int], path: str, facts: Sequence[Facts], sha256: bytes | None, packing: Packing
) -> list[Sample | DecodeError]:
    """Read a file once and convert it to what is packed of each clip that is a span of it, or return the clips' errors.

    Errors name the clips as the manifest does. Where files are packed as they are, the first clip holds the bytes.
    """
    is_folder = os.path.isdir(path)
    holder = None if is_folder or packing.kind == "jpeg" else clips[0]
    try:
        read = _of_folder(path, packing) if is_folder else _of_video(path, facts, sha256, packing)
    except DecodeError as error:
        return [DecodeError(one.path, error.reason) for one in facts]
    return [_sample(clip, one, read, holder) for clip, one in zip(clips, facts, strict=True)]


def _sample(clip: int, facts: Facts, read: Read, holder: int | None) -> Sample | DecodeError:
    """Return a clip's sample. holder: the clip that has the file's bytes, None for pictures."""
    try:
        facts, parts = read(facts)
    except DecodeError as error:
        return DecodeError(facts.path, error.reason)
    if not parts:
        return DecodeError(facts.path, "has one frame: flow is the motion from a frame to the next")
    length, base, more = sum(map(len, parts)), facts.checksum(), dict[str, Any]()
    if holder is None:
        ending = ".mjpeg" if all(part.startswith(b"\xff\xd8") for part in parts) else ".pictures"
        ends, max_bytes, checksum = list(accumulate(map(len, parts))), MAX_PICTURES_BYTES, base
        more = {"picture_ends": ends}
    else:
        ending, ends, max_bytes, checksum = ending_of(facts.path), [], MAX_MEMBER_BYTES, zlib.crc32(parts[0], base)
    if length >= max_bytes:
        return DecodeError(facts.path, f"is too large to be packed: {length:,} bytes")
    pictures = [(end, picture_checksum(base, number, parts[number])) for number, end in enumerate(ends)]
    if holder in (None, clip):
        return Sample(facts, encode_sample(clip, ending, parts, facts, more), length, checksum, pictures)
    encoded = encode_sample(clip, "", None, facts, {"content": f"{holder:09}{ending}"})
    return Sample(facts, encoded, length, checksum, pictures, is_shared=True)


def _of_video(path: str, facts: Sequence[Facts], sha256: bytes | None, packing: Packing) -> Read:
    """Load a video, and for pictures decode it once for all of its spans."""
    if packing.modality == "flow" and packing.method is None:
        raise DecodeError(path, "is a video: `data flow` computes its flow; --bound is for folders that hold flow")
    video = load_video(path, sha256)
    if video.content is None:  # a large one
        video = Encoded(path, read_bytes(path))
    if packing.kind == "bytes":
        video.check()
        return lambda one: (one, [video.content or b""])
    budget, convert = Budget(path, _limits(packing)), _converter(path, packing)
    # A codec may give more frames than packets.
    limit = 2 * count_packets(video, budget) + 1
    spans = [one.span for one in facts]
    wanted = {n for span in spans for n in range(span.start, min(span.end_in(limit), limit), packing.every)}
    # No frame has the number -1, so the video is decoded to its end.
    pictures, num_frames = read_from_start(video, frozenset(wanted | {-1}), convert, budget)

    def read(one: Facts) -> tuple[Facts, list[bytes]]:
        numbers = convert.taken(one.span.frames(path, num_frames))
        return convert.sized(one, num_frames), [part.tobytes() for number in numbers for part in pictures[number]]

    return read


def _of_folder(path: str, packing: Packing) -> Read:
    """Take the pictures of a folder unchanged, except those that are larger than wanted or no JPEG; or their flow."""
    if packing.modality == "flow" and packing.method is None:
        return _of_flow_folder(path)
    paths = list_pictures(path)

    def read(one: Facts) -> tuple[Facts, list[bytes]]:
        frames = one.span.frames(path, len(paths))
        if packing.kind == "bytes":
            return replace(one, num_frames=len(paths)), [read_bytes(paths[number]) for number in frames]
        budget, convert = Budget(path, _limits(packing)), _converter(path, packing)
        parts = [convert.picture(paths[number], budget) for number in frames[:: packing.every]]
        return convert.sized(one, len(paths)), list(chain.from_iterable(parts))

    return read


def _of_flow_folder(path: str) -> Read:
    """Take a folder's pictures of flow unchanged."""
    paths = list_flow_pictures(path)
    num_fields = len(paths) // 2

    def read(one: Facts) -> tuple[Facts, list[bytes]]:
        frames = one.span.frames(path, num_fields + 1)
        chosen = paths[2 * frames.start : 2 * (frames.stop - 1)]
        return replace(one, num_frames=num_fields), list(map(read_bytes, chosen))

    return read


def _limits(packing: Packing) -> Limits:
    """Return the limits of one video: computing flow takes as long as it takes."""
    return NO_HURRY if packing.method is None else replace(NO_HURRY, seconds=math.inf)


def _converter(path: str, packing: Packing) -> _Converter:
    return _Compress(packing) if packing.method is None else _ComputeFlow(path, packing)


class _Converter:
    """Turns the frames of a video, one after the other, into the pictures that are packed of it.

    size: width and height of an upright frame.
    """

    def __init__(self, packing: Packing) -> None:
        self.renderer = Renderer(self._whole_frame)
        self.size: tuple[int, int] | None = None
        self._packing = packing

    def _whole_frame(self, width: int, height: int) -> list[View]:
        """Return the upright frame scaled down to the short side of the packing; never up, as that adds nothing."""
        self.size = (width, height)
        scaled = scaled_size(width, height, min(self._packing.short_side, width, height))
        return [View(*scaled, 0, 0, *scaled)]

    def __call__(self, frame: Any) -> list[NDArray[np.uint8]]:
        (picture,) = self.renderer(frame)
        return [np.frombuffer(part, np.uint8) for part in self.encoded(picture)]

    def encoded(self, picture: NDArray[np.uint8]) -> list[bytes]:
        """Return what is packed of the next frame, RGB (height, width, 3)."""
        raise NotImplementedError

    def picture(self, path: str, budget: Budget) -> list[bytes]:
        """Return what is packed of the next frame, a picture file."""
        ((picture,),) = PictureReader(self.renderer, budget).read([(path, read_bytes(path))])
        return self.encoded(picture)

    def taken(self, frames: range) -> range:
        """Return the frames of a clip whose pictures are packed."""
        return frames[:: self._packing.every]

    def sized(self, facts: Facts, num_frames: int) -> Facts:
        """Return the facts with the number and the size of the frames."""
        assert self.size is not None, "a video without a frame is refused before"
        return replace(facts, num_frames=num_frames, width=self.size[0], height=self.size[1])


class _Compress(_Converter):
    """Turns each frame into a JPEG picture."""

    def encoded(self, picture: NDArray[np.uint8]) -> list[bytes]:
        """Return the picture with restart markers, so that a reader can decode a part."""
        return [_jpeg(picture, self._packing.quality, restart_marker_blocks=restart_units(picture.shape[1]))]

    def picture(self, path: str, budget: Budget) -> list[bytes]:
        """Return a picture file's bytes where they are a JPEG that is small enough, else compress it anew."""
        content = read_bytes(path)
        codec, width, height = probe_picture(path, content, budget)
        self.size = self.size or (width, height)
        if codec == "mjpeg" and min(width, height) <= self._packing.short_side:
            return [content]
        return super().picture(path, budget)


class _ComputeFlow(_Converter):
    """Turns each frame but the first into the flow from the one before it: two grey JPEG pictures, x and y.

    It holds one frame. Between spans that are apart it also computes a field, which no clip takes.
    """

    def __init__(self, path: str, packing: Packing) -> None:
        super().__init__(packing)
        assert packing.method is not None and packing.bound is not None
        self._compute, self._bound = flow_method(packing.method, packing.preset or ""), packing.bound
        self._path = path
        self._before: NDArray[np.uint8] | None = None

    def encoded(self, picture: NDArray[np.uint8]) -> list[bytes]:
        """Return the flow to this frame; nothing of the first."""
        before, self._before = self._before, grey(picture)
        if before is None:
            return []
        try:
            code = encode(self._compute(before, self._before), self._bound)
        except FlowError as error:
            raise DecodeError(self._path, str(error)) from error
        return [_jpeg(code[..., component], self._packing.quality) for component in range(2)]

    def taken(self, frames: range) -> range:
        """Return all frames but the first, which begins the first field."""
        return frames[1:]

    def sized(self, facts: Facts, num_frames: int) -> Facts:
        """Return the facts with the number of fields and the size of the frames."""
        return super().sized(facts, num_frames - 1)


def _jpeg(picture: NDArray[np.uint8], quality: int, **options: Any) -> bytes:
    """Compress RGB (height, width, 3) or grey (height, width)."""
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "JPEG", quality=quality, **options)
    return stream.getvalue()
