"""The sample that a clip becomes in its shard: the file's own bytes, or JPEG pictures of its frames."""

from __future__ import annotations

import io
import os
import zlib
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


@dataclass(frozen=True)
class Sample:
    """A clip as it is packed: its bytes in the shard, and what the index says of the `length` ones of its content.

    checksum: see CLIP_ROW. pictures: (end, checksum) of each.
    """

    facts: Facts
    encoded: bytes
    length: int
    checksum: int
    pictures: list[tuple[int, int]]


def make_sample(clip: int, path: str, facts: Facts, sha256: bytes | None, packing: Packing) -> Sample | DecodeError:
    """Read a clip and convert it to what is packed, or return its error, which names it as the manifest does."""
    is_folder = os.path.isdir(path)
    try:
        facts, parts = _of_folder(path, facts, packing) if is_folder else _of_video(path, facts, sha256, packing)
    except DecodeError as error:
        return DecodeError(facts.path, error.reason)
    length, base = sum(map(len, parts)), facts.checksum()
    if is_folder or packing.kind == "jpeg":
        ending = ".mjpeg" if all(part.startswith(b"\xff\xd8") for part in parts) else ".pictures"
        ends, max_bytes, checksum = list(accumulate(map(len, parts))), MAX_PICTURES_BYTES, base
    else:
        ending, ends, max_bytes, checksum = ending_of(facts.path), [], MAX_MEMBER_BYTES, zlib.crc32(parts[0], base)
    if length >= max_bytes:
        return DecodeError(facts.path, f"is too large to be packed: {length:,} bytes")
    encoded = encode_sample(clip, ending, parts, facts, {"picture_ends": ends} if ends else {})
    pictures = [(end, picture_checksum(base, number, parts[number])) for number, end in enumerate(ends)]
    return Sample(facts, encoded, length, checksum, pictures)


def _of_video(path: str, facts: Facts, sha256: bytes | None, packing: Packing) -> tuple[Facts, list[bytes]]:
    video = load_video(path, sha256)
    if video.content is None:  # a large one
        video = Encoded(path, read_bytes(path))
    if packing.kind == "bytes":
        video.check()
        return facts, [video.content or b""]
    budget, compress = Budget(path, NO_HURRY), _Compress(packing)
    # No frame has the number -1, so the video is decoded to its end. A codec may give more frames than packets.
    wanted = frozenset(range(0, 2 * count_packets(video, budget) + 1, packing.every)) | {-1}
    pictures, num_frames = read_from_start(video, wanted, compress, budget)
    return compress.sized(facts, num_frames), [pictures[number][0].tobytes() for number in sorted(pictures)]


def _of_folder(path: str, facts: Facts, packing: Packing) -> tuple[Facts, list[bytes]]:
    """Take the pictures of a folder unchanged, except those that are larger than wanted or no JPEG."""
    paths = list_pictures(path)
    if packing.kind == "bytes":
        return replace(facts, num_frames=len(paths)), list(map(read_bytes, paths))
    budget, compress = Budget(path, NO_HURRY), _Compress(packing)
    parts = []
    for name in paths[:: packing.every]:
        content = read_bytes(name)
        codec, width, height = probe_picture(name, content, budget)
        compress.size = compress.size or (width, height)
        if codec != "mjpeg" or min(width, height) > packing.short_side:
            ((picture,),) = PictureReader(compress.renderer, budget).read([(name, content)])
            content = compress.encoded(picture)
        parts.append(content)
    return compress.sized(facts, len(paths)), parts


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

    def sized(self, facts: Facts, num_frames: int) -> Facts:
        """Return the facts with the number and the size of the frames."""
        assert self.size is not None, "a video without a frame is refused before"
        return replace(facts, num_frames=num_frames, width=self.size[0], height=self.size[1])
