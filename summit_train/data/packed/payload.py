"""The sample that a clip becomes in its shard: the file's own bytes, a video or pictures of its frames or of flow."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce
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
from summit_train.data.video.decode import NumberedFrame, count_packets, naming_errors
from summit_train.data.video.encode import Encoding, encoder, jpeg
from summit_train.data.video.flow import encode, flow_method, grey
from summit_train.data.video.pictures import decode_picture, holds_pictures, list_pictures
from summit_train.data.video.region import WHOLE_FRAME, Region
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
        """Return what is before and behind the content, in the sample of its own clip."""
        more = {"picture_ends": [end for end, _ in self.pictures]} if self.pictures else {}
        return around_content(clip, self.ending, self.length, self.facts, **more)

    def bytes_of(self, clip: int) -> Iterator[bytes]:
        """Yield the sample of its own clip in pieces. Raises DecodeError if it is of a file that has changed."""
        before, behind = self.around(clip)
        yield before
        for part in self.parts:
            yield from part.pieces()
        yield behind


def scratch_file(folder: Path, clip: int) -> Path:
    """Return the file with what is too much of a clip to be held; whoever has written the sample deletes it."""
    return folder / f".{clip:09}.writing"


def make_sample(store: FileStore, packing: Packing, folder: Path, clip: int) -> PackedSample:
    """Return what is packed of a clip. folder: of the scratch files. Raises DecodeError."""
    path = store.path(clip)
    facts = facts_of(store.manifest, clip)
    is_folder = holds_pictures(path)
    if packing.kind == "bytes" and not is_folder:
        return _file_as_it_is(path, store.manifest.sha256(clip), facts, packing)
    kept = _Kept(path, scratch_file(folder, clip))
    if is_folder:
        facts, parts = _of_folder(path, facts, packing, kept)
    else:
        facts, parts = _of_video(store, clip, facts, packing, kept)
    if not parts:
        raise DecodeError(path, "must have 2 frames or more, got 1: flow is the motion between frames")
    ends = list(accumulate(part.num_bytes for part in parts))
    is_video = packing.kind == "video"
    _check_length(path, ends[-1], MAX_MEMBER_BYTES if is_video else MAX_PICTURES_BYTES)
    if is_video:
        return PackedSample(facts, ".mp4", parts, reduce(lambda checksum, part: part.crc32(checksum), parts, 0))
    pictures = list[tuple[int, int]]()
    is_jpeg = True
    for number, part in enumerate(parts):
        content = b"".join(part.pieces())
        is_jpeg &= content.startswith(b"\xff\xd8")
        pictures.append((ends[number], picture_checksum(facts.checksum(), number, content)))
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


def _of_video(store: FileStore, clip: int, facts: Facts, packing: Packing, kept: _Kept) -> tuple[Facts, list[Encoded]]:
    """Decode a clip of a video; return its facts with the size and the number of frames, and the parts of its sample.

    Of a video whose number of frames is listed it is decoded from the nearest key frames, as in training.
    """
    path = kept.path
    limits = limits_of(packing)
    listed = store.manifest.num_frames(clip)
    video = store.films.load(path, store.manifest.sha256(clip), listed, limits)
    if listed is not None:
        index = video.index
        counted = count_packets(video, Budget(path, limits))[0] if index is None else len(index.times)
        listed = listed if counted == listed else None
    opened = VideoClip(video, listed, limits)
    with opened:
        while True:
            facts = replace(facts, num_frames=opened.num_frames)
            numbers = facts.clip.span.frames(path, facts.num_frames)[:: packing.every]
            with suppress(ChooseAgain):
                return _encoded(facts, packing, kept, opened.frames(numbers))


def limits_of(packing: Packing) -> Limits:
    """Return the limits of reading a video; flow may take any time."""
    return NO_HURRY if packing.method is None else replace(NO_HURRY, seconds=math.inf)


def _of_folder(path: str, facts: Facts, packing: Packing, kept: _Kept) -> tuple[Facts, list[Encoded]]:
    """Take the pictures of a folder unchanged, except those that are too large or not JPEG; or compute their flow."""
    span = facts.clip.span
    if packing.modality == "flow" and packing.method is None:
        paths = list_pictures(path, is_flow=True)
        facts = replace(facts, num_frames=len(paths) // 2)
        frames = span.frames(path, facts.num_frames + 1)
        return facts, [kept(read_bytes(picture)) for picture in paths[2 * frames.start : 2 * (frames.stop - 1)]]
    paths = list_pictures(path)
    facts = replace(facts, num_frames=len(paths))
    numbers = span.frames(path, len(paths))[:: packing.every]
    if packing.kind == "bytes":
        return facts, [kept(read_bytes(paths[number])) for number in numbers]
    if packing.kind == "jpeg" and packing.method is None and facts.clip.region == WHOLE_FRAME:
        return _jpegs(facts, packing, kept, [paths[number] for number in numbers])
    budget = Budget(path, limits_of(packing))
    decoded = ((number, decode_picture(paths[number], read_bytes(paths[number]), budget)[1]) for number in numbers)
    return _encoded(facts, packing, kept, decoded)


def _jpegs(facts: Facts, packing: Packing, kept: _Kept, paths: Sequence[str]) -> tuple[Facts, list[Encoded]]:
    """Return pictures as JPEG: the bytes of those that are it already, and small."""
    budget = Budget(kept.path, limits_of(packing))
    rendering = _Rendering(kept.path, facts.clip.region, packing)
    parts = []
    for path in paths:
        content = read_bytes(path)
        codec, frame = decode_picture(path, content, budget)
        rendering.begin(frame)
        is_kept = codec == "mjpeg" and min(upright_size(frame)) <= packing.short_side
        parts.append(kept(content if is_kept else jpeg(rendering(frame), packing.quality)))
    width, height = rendering.size
    return replace(facts, width=width, height=height), parts


def _encoded(
    facts: Facts, packing: Packing, kept: _Kept, frames: Iterable[NumberedFrame]
) -> tuple[Facts, list[Encoded]]:
    """Return a clip's facts and parts, of its frames in order. facts: with the number of frames of its video.

    Of n frames there are n JPEG pictures, one video, or the two grey JPEG pictures, x and y, of n - 1 fields of flow.
    """
    rendering = _Rendering(kept.path, facts.clip.region, packing)
    num_packed = facts.num_frames
    with naming_errors(kept.path):
        pictures = (rendering(frame) for _, frame in frames)
        if packing.kind == "video":
            parts = _video_of(pictures, packing, kept)
        elif packing.method is None:
            parts = [kept(jpeg(picture, packing.quality)) for picture in pictures]
        else:
            fields = _flow_of(pictures, kept.path, packing)
            parts = [kept(jpeg(code[..., axis], packing.quality)) for code in fields for axis in (0, 1)]
            num_packed -= 1
    width, height = rendering.size
    return replace(facts, num_frames=num_packed, width=width, height=height), parts


def _flow_of(pictures: Iterable[Frames], path: str, packing: Packing) -> Iterator[Frames]:
    """Yield the flow from each picture to the next, uint8 (height, width, 2)."""
    compute = flow_method(packing.method or "", packing.preset or "")
    for before, after in pairwise(map(grey, pictures)):
        try:
            yield encode(compute(before, after), packing.bound or 0)
        except UserError as error:
            raise DecodeError(path, str(error)) from error


def _video_of(pictures: Iterator[Frames], packing: Packing, kept: _Kept) -> list[Encoded]:
    """Return the parts of a video of these pictures."""
    encoding = Encoding("mpeg4", 6 * packing.qscale, packing.gop, b_frames=0)
    kept.scratch.parent.mkdir(parents=True, exist_ok=True)
    first = next(pictures)
    height, width, _ = first.shape
    with SpooledTemporaryFile(_MAX_OPEN_BYTES, dir=str(kept.scratch.parent)) as file:
        with encoder(file, (width, height), _FPS, encoding, "mp4") as write:
            for number, picture in enumerate(chain([first], pictures)):
                write(picture, number)
        file.seek(0)
        return list(map(kept, iter(partial(file.read, _PIECE_BYTES), b"")))


class _Kept:
    """Takes the parts of one clip's content; those after many bytes are written to the scratch file.

    path: of the clip's file, for messages.
    """

    def __init__(self, path: str, scratch: Path) -> None:
        self.path = path
        self.scratch = scratch
        self._num_held = 0

    def __call__(self, part: bytes) -> Encoded:
        self._num_held += len(part)
        if self._num_held <= _MAX_HELD_BYTES:
            return Encoded(self.path, part)
        self.scratch.parent.mkdir(parents=True, exist_ok=True)
        with open(self.scratch, "ab") as file:
            file.write(part)
            return Encoded(self.path, part=(str(self.scratch), file.tell() - len(part), len(part)))


class _Rendering:
    """Renders frames as RGB, their region alone, scaled down to the packing's short side, but never up.

    size: upright (width, height) of the first frame, or of its region, before it is scaled.
    """

    def __init__(self, path: str, region: Region, packing: Packing) -> None:
        self._path = path
        self._region = region
        self._packing = packing
        self._renderer: Renderer | None = None  # for the first frame's size
        self.size = (0, 0)

    def begin(self, frame: Any) -> Renderer:
        """Return what renders all frames: chosen for the size of the first."""
        if self._renderer is None:
            self._renderer = Renderer([self._view(*upright_size(frame))])
        return self._renderer

    def __call__(self, frame: Any) -> Frames:
        (picture,) = self.begin(frame)(frame)
        return picture

    def _view(self, width: int, height: int) -> View:
        region = None
        if self._region != WHOLE_FRAME:
            region = self._region
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
