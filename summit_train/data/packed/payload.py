"""The sample that a clip becomes in its shard: the file's own bytes, a video or pictures of its frames or of flow."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import accumulate, chain, pairwise
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

from summit_train.core.errors import UserError
from summit_train.data.manifest.files import FileStore
from summit_train.data.packed.format import (
    MAX_MEMBER_BYTES,
    MAX_PICTURES_BYTES,
    Facts,
    Packing,
    around_content,
    ending_of,
    facts_of,
    picture_checksum,
)
from summit_train.data.video.augment import View, scaled_size
from summit_train.data.video.clips import ChooseAgain, VideoClip
from summit_train.data.video.decode import count_packets, ffmpeg_errors
from summit_train.data.video.encode import Encoding, encoder, jpeg
from summit_train.data.video.flow import encode, flow_method, grey
from summit_train.data.video.pictures import decode_picture, holds_pictures, list_pictures
from summit_train.data.video.region import WHOLE_FRAME
from summit_train.data.video.render import Frames, Renderer, upright_size
from summit_train.data.video.source import NO_HURRY, Budget, DecodeError, Encoded, Limits, load_video, read_bytes

_MAX_HELD_BYTES = 64 << 20  # of the frames of one clip; the others wait on disk
_MAX_OPEN_BYTES = 4 << 20  # of a video while it is encoded
_PIECE_BYTES = 1 << 20
_MAX_SIDE = 8190  # the largest even number of MPEG-4's 13 bits
_FPS = 25  # any will do: training does not use times
_FLOW_OF_VIDEO = "must be a folder of flow pictures, got a video; try `summit-train data flow`, which computes its flow"


@dataclass(frozen=True)
class PackedSample:
    """A clip as it is packed: its content in parts, and what the index says of it.

    ending: of the content's name. checksum: of its bytes, see CLIP_ROW. pictures: (end, checksum) of each.
    """

    facts: Facts
    ending: str
    parts: list[Encoded]
    checksum: int = 0
    pictures: list[tuple[int, int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def around(self, clip: int) -> tuple[bytes, bytes]:
        """Return the bytes before and behind the content in the sample of `clip`."""
        more = {"picture_ends": [end for end, _ in self.pictures]} if self.pictures else {}
        return around_content(clip, self.ending, self.length, self.facts, **more)

    def bytes_of(self, clip: int) -> Iterator[bytes]:
        """Yield the sample of `clip` in pieces. Raises DecodeError if the file has changed."""
        before, behind = self.around(clip)
        yield before
        for part in self.parts:
            yield from part.pieces()
        yield behind


def scratch_file(folder: Path, clip: int) -> Path:
    """Return the file for content of a clip that is too large for memory; the writer of the shard deletes it."""
    return folder / f".{clip:09}.writing"


def make_sample(store: FileStore, packing: Packing, folder: Path, clip: int) -> PackedSample:
    """Encode a clip as it is packed. folder: of the scratch files. Raises DecodeError."""
    path = store.path(clip)
    facts = facts_of(store.manifest, clip)
    is_folder = holds_pictures(path)
    if packing.kind == "bytes" and not is_folder:
        return _file_as_it_is(path, store.manifest.sha256(clip), facts, packing)
    content = _Content(path, facts, packing, scratch_file(folder, clip))
    if is_folder:
        content.add_folder()
    else:
        content.add_frames_of_video(store, clip)
    parts = content.parts
    if not parts:
        raise DecodeError(path, "must have 2 frames or more, got 1: flow is the motion between frames")
    facts = content.facts()
    ends = list(accumulate(part.num_bytes for part in parts))
    is_video = packing.kind == "video"
    _check_length(path, ends[-1], MAX_MEMBER_BYTES if is_video else MAX_PICTURES_BYTES)
    if is_video:
        return PackedSample(facts, ".mp4", parts, reduce(lambda checksum, part: part.crc32(checksum), parts, 0))
    pictures = list[tuple[int, int]]()
    is_jpeg = True
    for number, part in enumerate(parts):
        picture = b"".join(part.pieces())
        is_jpeg &= picture.startswith(b"\xff\xd8")
        pictures.append((ends[number], picture_checksum(facts.checksum(), number, picture)))
    return PackedSample(facts, ".mjpeg" if is_jpeg else ".pictures", parts, 0, pictures)


def _file_as_it_is(path: str, sha256: bytes | None, facts: Facts, packing: Packing) -> PackedSample:
    if packing.modality == "flow":
        raise DecodeError(path, _FLOW_OF_VIDEO)
    video = load_video(path, sha256)
    if not video.content:
        video = replace(video, part=(path, 0, os.path.getsize(path)))
    _check_length(path, video.num_bytes, MAX_MEMBER_BYTES)
    return PackedSample(facts, ending_of(facts.clip.path), [video], video.crc32())


def _check_length(path: str, length: int, limit: int) -> None:
    if length >= limit:
        raise DecodeError(path, f"must be packed in less than {limit:,} bytes, got {length:,}; try spans of it")


def limits_of(packing: Packing) -> Limits:
    """Return the limits of reading a video; flow may take any time."""
    return NO_HURRY if packing.method is None else replace(NO_HURRY, seconds=math.inf)


class _Content:
    """The content of one clip while it is made.

    parts: what there is of it; beyond many bytes in the scratch file. num_frames: of the video, or its fields of flow.
    size: upright (width, height) of the first frame, or of its region, before it is scaled; 0 if none is decoded.
    """

    def __init__(self, path: str, facts: Facts, packing: Packing, scratch: Path) -> None:
        self.parts = list[Encoded]()
        self.num_frames = facts.num_frames
        self.size = (0, 0)
        self._path = path
        self._facts = facts
        self._clip = facts.clip
        self._packing = packing
        self._scratch = scratch
        self._num_held = 0
        self._renderer: Renderer | None = None

    def facts(self) -> Facts:
        width, height = self.size
        return replace(self._facts, num_frames=self.num_frames, width=width, height=height)

    def add_frames_of_video(self, store: FileStore, clip: int) -> None:
        """Decode a clip of a video; if its number of frames is listed, from the nearest key frames, as in training."""
        limits = limits_of(self._packing)
        listed = store.manifest.num_frames(clip)
        sha256 = store.manifest.sha256(clip)
        video = store.films.load(self._path, sha256, listed, limits)
        if listed is not None:
            index = video.index
            counted = count_packets(video, Budget(self._path, limits))[0] if index is None else len(index.times)
            listed = listed if counted == listed else None
        opened = VideoClip(video, listed, limits, is_checked=sha256 is not None)
        with opened:
            while True:
                self.num_frames = opened.num_frames
                numbers = self._clip.span.frames(self._path, opened.num_frames)[:: self._packing.every]
                with suppress(ChooseAgain):
                    self._encode(frame for _, frame in opened.frames(numbers))
                    return

    def add_folder(self) -> None:
        """Take the pictures of a folder unchanged, except those that are too large or not JPEG; or compute flow."""
        packing = self._packing
        span = self._clip.span
        if packing.modality == "flow" and packing.method is None:
            paths = list_pictures(self._path, is_flow=True)
            self.num_frames = len(paths) // 2
            frames = span.frames(self._path, self.num_frames + 1)
            for path in paths[2 * frames.start : 2 * (frames.stop - 1)]:
                self._add(read_bytes(path))
            return
        paths = list_pictures(self._path)
        self.num_frames = len(paths)
        paths = [paths[number] for number in span.frames(self._path, len(paths))[:: packing.every]]
        budget = Budget(self._path, limits_of(packing))
        if packing.kind == "bytes":
            for path in paths:
                self._add(read_bytes(path))
        elif packing.kind == "jpeg" and packing.method is None and self._clip.region == WHOLE_FRAME:
            for path in paths:
                content = read_bytes(path)
                codec, frame = decode_picture(path, content, budget)
                self._renderer_of(frame)  # also notes the size
                is_kept = codec == "mjpeg" and min(upright_size(frame)) <= packing.short_side
                self._add(content if is_kept else jpeg(self._render(frame), packing.quality))
        else:
            self._encode(decode_picture(path, read_bytes(path), budget)[1] for path in paths)

    def _encode(self, frames: Iterable[Any]) -> None:
        """Add n frames in order: n JPEG pictures, a video, or the grey JPEG pictures x, y of n - 1 fields of flow."""
        quality = self._packing.quality
        # A second time after ChooseAgain.
        self.parts.clear()
        self._num_held = 0
        self._renderer = None
        with ffmpeg_errors(self._path):
            pictures = map(self._render, frames)
            if self._packing.kind == "video":
                self._add_video(pictures)
            elif self._packing.method is None:
                for picture in pictures:
                    self._add(jpeg(picture, quality))
            else:
                for code in self._flow(pictures):
                    self._add(jpeg(code[..., 0], quality))
                    self._add(jpeg(code[..., 1], quality))
                self.num_frames -= 1

    def _flow(self, pictures: Iterable[Frames]) -> Iterator[Frames]:
        """Yield the flow from each picture to the next, uint8 (height, width, 2)."""
        compute = flow_method(self._packing.method or "", self._packing.preset or "")
        for before, after in pairwise(map(grey, pictures)):
            try:
                yield encode(compute(before, after), self._packing.bound or 0)
            except UserError as error:
                raise DecodeError(self._path, str(error)) from error

    def _add_video(self, pictures: Iterator[Frames]) -> None:
        encoding = Encoding("mpeg4", 6 * self._packing.qscale, self._packing.gop, b_frames=0)
        self._scratch.parent.mkdir(parents=True, exist_ok=True)
        first = next(pictures)
        height, width, _ = first.shape
        with SpooledTemporaryFile(_MAX_OPEN_BYTES, dir=str(self._scratch.parent)) as file:
            with encoder(file, (width, height), _FPS, encoding, "mp4") as write:
                for number, picture in enumerate(chain([first], pictures)):
                    write(picture, number)
            file.seek(0)
            while piece := file.read(_PIECE_BYTES):
                self._add(piece)

    def _add(self, part: bytes) -> None:
        self._num_held += len(part)
        if self._num_held <= _MAX_HELD_BYTES:
            self.parts.append(Encoded(self._path, part))
            return
        self._scratch.parent.mkdir(parents=True, exist_ok=True)
        with open(self._scratch, "ab") as file:
            file.write(part)
            place = (str(self._scratch), file.tell() - len(part), len(part))
        self.parts.append(Encoded(self._path, part=place))

    def _render(self, frame: Any) -> Frames:
        """Return a frame as RGB, its region alone, scaled down to the packing's short side, but never up."""
        (picture,) = self._renderer_of(frame)(frame)
        return picture

    def _renderer_of(self, frame: Any) -> Renderer:
        """Return the renderer of all frames, chosen for the size of the first."""
        if self._renderer is None:
            self._renderer = Renderer([self._view(*upright_size(frame))])
        return self._renderer

    def _view(self, width: int, height: int) -> View:
        region = None
        if self._clip.region != WHOLE_FRAME:
            region = self._clip.region
            if (problem := region.problem(width, height)) is not None:
                raise DecodeError(self._path, f"{problem} (data.region)")
            width, height = region.width, region.height
        self.size = (width, height)
        scaled = scaled_size(width, height, min(self._packing.short_side, width, height))
        if self._packing.kind == "video":  # with colour at half the resolution
            scaled = (max(2, scaled[0] // 2 * 2), max(2, scaled[1] // 2 * 2))
            if max(scaled) > _MAX_SIDE:
                limit = f"a side of an MPEG-4 video must be at most {_MAX_SIDE:,} pixels"
                raise DecodeError(self._path, f"{limit}, got {scaled[0]} x {scaled[1]}")
        return View(*scaled, 0, 0, *scaled, region=region)
