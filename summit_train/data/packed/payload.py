"""The bytes of a clip as they are packed: the file's own, or JPEG pictures of its frames."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from summit_train.data.packed.format import Facts, Packing, ending_of
from summit_train.data.video.augment import View, scaled_size
from summit_train.data.video.clips import list_pictures
from summit_train.data.video.decode import count_packets, read_from_start
from summit_train.data.video.pictures import PictureReader, probe_picture, restart_units
from summit_train.data.video.render import Renderer
from summit_train.data.video.source import NO_HURRY, Budget, DecodeError, Encoded, load_video, read_bytes

PICTURES_ENDING = ".mjpeg"


@dataclass(frozen=True)
class Source:
    """A clip to be packed: its path, its facts, and its SHA-256 where that is known."""

    path: str
    facts: Facts
    sha256: bytes | None = None


@dataclass(frozen=True)
class Payload:
    """A clip's bytes as they are packed: `content`, or `pictures`, one for each packed frame in order."""

    facts: Facts
    ending: str
    content: bytes = b""
    pictures: tuple[bytes, ...] = ()


def make_payload(source: Source, packing: Packing) -> Payload:
    """Read a clip and convert it to what is packed. Raises DecodeError, naming the clip as its manifest does."""
    try:
        if os.path.isdir(source.path):
            return _of_pictures(source, packing)
        video = load_video(source.path, source.sha256)
        if video.content is None:  # a large one
            video = Encoded(video.name, read_bytes(video.name))
        return _of_video(video, source.facts, packing)
    except DecodeError as error:
        raise DecodeError(source.facts.path, error.reason) from error


def _of_video(video: Encoded, facts: Facts, packing: Packing) -> Payload:
    if packing.kind == "bytes":
        video.check()
        return Payload(facts, ending_of(facts.path), video.content or b"")
    budget, render = Budget(video.name, NO_HURRY), _Compress(packing)
    # No frame has the number -1, so the video is decoded to its end. A codec may give more frames than packets.
    wanted = frozenset(range(0, 2 * count_packets(video, budget) + 1, packing.every)) | {-1}
    pictures, num_frames = read_from_start(video, wanted, render, budget)
    return _compressed(facts, num_frames, render, [pictures[number][0].tobytes() for number in sorted(pictures)])


def _of_pictures(source: Source, packing: Packing) -> Payload:
    """Pack a folder of pictures: unchanged, except those that are larger than wanted or no JPEG."""
    paths = list_pictures(source.path)
    if packing.kind == "bytes":
        contents = tuple(map(read_bytes, paths))
        is_jpeg = all(content.startswith(b"\xff\xd8") for content in contents)
        facts = replace(source.facts, num_frames=len(paths))
        return Payload(facts, PICTURES_ENDING if is_jpeg else ".pictures", pictures=contents)
    budget, render = Budget(source.path, NO_HURRY), _Compress(packing)
    pictures = [_picture(path, packing, render, budget) for path in paths[:: packing.every]]
    return _compressed(source.facts, len(paths), render, pictures)


def _picture(path: str, packing: Packing, render: _Compress, budget: Budget) -> bytes:
    content = read_bytes(path)
    codec, width, height = probe_picture(path, content, budget)
    if codec == "mjpeg" and min(width, height) <= packing.short_side:
        render.size = render.size or (width, height)
        return content
    ((picture,),) = PictureReader(render.renderer, budget).read([(path, content)])
    return render.compressed(picture)


def _compressed(facts: Facts, num_frames: int, render: _Compress, pictures: list[bytes]) -> Payload:
    assert render.size is not None, "a video without a frame is refused before"
    width, height = render.size
    known = replace(facts, num_frames=num_frames, width=width, height=height)
    return Payload(known, PICTURES_ENDING, pictures=tuple(pictures))


class _Compress:
    """Turns each frame into the bytes of a JPEG picture, uint8 (n,)."""

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
        return [np.frombuffer(self.compressed(picture), np.uint8)]

    def compressed(self, picture: NDArray[np.uint8]) -> bytes:
        """Return RGB (height, width, 3) as a JPEG picture with restart markers, so that a reader can decode a part."""
        stream = io.BytesIO()
        units = restart_units(picture.shape[1])
        Image.fromarray(picture).save(stream, "JPEG", quality=self._packing.quality, restart_marker_blocks=units)
        return stream.getvalue()
