"""The sample that a clip becomes in its shard: the file's own bytes, or JPEG pictures of its frames."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
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
from summit_train.data.video.clips import list_pictures
from summit_train.data.video.decode import count_packets, read_from_start
from summit_train.data.video.pictures import PictureReader, probe_picture, restart_units
from summit_train.data.video.render import Renderer
from summit_train.data.video.source import NO_HURRY, Budget, DecodeError, Encoded, load_video, read_bytes

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
    video = load_video(path, sha256)
    if video.content is None:  # a large one
        video = Encoded(path, read_bytes(path))
    if packing.kind == "bytes":
        video.check()
        return lambda one: (one, [video.content or b""])
    budget, compress = Budget(path, NO_HURRY), _Compress(packing)
    # A codec may give more frames than packets.
    limit = 2 * count_packets(video, budget) + 1
    spans = [one.span for one in facts]
    wanted = {n for span in spans for n in range(span.start, min(span.end_in(limit), limit), packing.every)}
    # No frame has the number -1, so the video is decoded to its end.
    pictures, num_frames = read_from_start(video, frozenset(wanted | {-1}), compress, budget)

    def read(one: Facts) -> tuple[Facts, list[bytes]]:
        numbers = one.span.frames(path, num_frames)[:: packing.every]
        return compress.sized(one, num_frames), [pictures[number][0].tobytes() for number in numbers]

    return read


def _of_folder(path: str, packing: Packing) -> Read:
    """Take the pictures of a folder unchanged, except those that are larger than wanted or no JPEG."""
    paths = list_pictures(path)

    def read(one: Facts) -> tuple[Facts, list[bytes]]:
        chosen = [paths[number] for number in one.span.frames(path, len(paths))]
        if packing.kind == "bytes":
            return replace(one, num_frames=len(paths)), list(map(read_bytes, chosen))
        budget, compress = Budget(path, NO_HURRY), _Compress(packing)
        parts = [compress.picture(name, budget) for name in chosen[:: packing.every]]
        return compress.sized(one, len(paths)), parts

    return read


class _Compress:
    """Turns each frame into the bytes of a JPEG picture, uint8 (n,). size: width and height of an upright frame."""

    def __init__(self, packing: Packing) -> None:
        self.renderer = Renderer(self._whole_frame)
        self._packing = packing
        self.size: tuple[int, int] | None = None

    def _whole_frame(self, width: int, height: int) -> list[View]:
        """Return the upright frame scaled down to the short side of the packing; never up, as that adds nothing."""
        self.size = (width, height)
        scaled = scaled_size(width, height, min(self._packing.short_side, width, height))
        return [View(*scaled, 0, 0, *scaled)]

    def __call__(self, frame: Any) -> list[NDArray[np.uint8]]:
        (picture,) = self.renderer(frame)
        return [np.frombuffer(self.encoded(picture), np.uint8)]

    def encoded(self, picture: NDArray[np.uint8]) -> bytes:
        """Return RGB (height, width, 3) as a JPEG picture with restart markers, so that a reader can decode a part."""
        stream = io.BytesIO()
        units = restart_units(picture.shape[1])
        Image.fromarray(picture).save(stream, "JPEG", quality=self._packing.quality, restart_marker_blocks=units)
        return stream.getvalue()

    def picture(self, path: str, budget: Budget) -> bytes:
        """Return a picture file's bytes where they are a JPEG that is small enough, else compress it anew."""
        content = read_bytes(path)
        codec, width, height = probe_picture(path, content, budget)
        self.size = self.size or (width, height)
        if codec == "mjpeg" and min(width, height) <= self._packing.short_side:
            return content
        ((picture,),) = PictureReader(self.renderer, budget).read([(path, content)])
        return self.encoded(picture)

    def sized(self, facts: Facts, num_frames: int) -> Facts:
        """Return the facts with the number and the size of the frames."""
        assert self.size is not None, "a video without a frame is refused before"
        return replace(facts, num_frames=num_frames, width=self.size[0], height=self.size[1])
