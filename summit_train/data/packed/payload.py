"""The sample that a clip becomes in its shard: the file's own bytes, a video or pictures of its frames or of flow."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

from summit_train.core.errors import UserError
from summit_train.data.packed import format as packed
from summit_train.data.packed.format import Facts, Packing, encode_sample, ending_of, picture_checksum
from summit_train.data.video.augment import View, scaled_size
from summit_train.data.video.clips import ChooseAgain, VideoClip
from summit_train.data.video.decode import NumberedFrame, count_packets, naming_errors
from summit_train.data.video.encode import Encoding, encoder, jpeg
from summit_train.data.video.films import Films
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
_FLOW_OF_VIDEO = "is a video: `data flow` computes its flow; --bound is for folders that hold flow"


@dataclass(frozen=True)
class PackedSample:
    """A clip as it is packed: its parts (bytes or Encoded), and what the index says of its content.

    checksum: of its bytes, see CLIP_ROW. pictures: (end, checksum) of each. is_shared: the content is that of the
    sample before.
    """

    facts: Facts
    encoded: list[Any]
    length: int
    checksum: int
    pictures: list[tuple[int, int]]
    is_shared: bool = False


@dataclass(frozen=True)
class Source:
    """The file or folder of some clips. sha256: that it must have, None: any.

    films: those of the process. scratch: a file for pictures that are too many to be held; whoever has written the
    samples deletes it.
    """

    path: str
    sha256: bytes | None
    films: Films
    scratch: Path


def make_samples(
    source: Source, clips: Sequence[int], facts: Sequence[Facts], packing: Packing
) -> Iterator[PackedSample | DecodeError]:
    """Yield what is packed of these clips of a file, or why nothing can be; errors name clips as the manifest does.

    Where a video is packed as it is, the first of the clips holds its bytes.
    """
    try:
        is_folder = holds_pictures(source.path)
        if packing.kind == "bytes" and not is_folder:
            yield from _bytes_of_video(source, clips, facts, packing)
        else:
            for clip, one in zip(clips, facts, strict=True):
                yield _of_frames(source, clip, one, packing, is_folder=is_folder)
    except DecodeError as error:
        yield from (DecodeError(one.clip.path, error.reason) for one in facts)


def _bytes_of_video(
    source: Source, clips: Sequence[int], facts: Sequence[Facts], packing: Packing
) -> Iterator[PackedSample | DecodeError]:
    if packing.modality == "flow":
        raise DecodeError(source.path, _FLOW_OF_VIDEO)
    video = load_video(source.path, source.sha256)
    if not video.content:
        video = replace(video, part=(source.path, 0, os.path.getsize(source.path)))
    length = packed.size_of(video)
    checksum = video.crc32()
    if length >= packed.MAX_MEMBER_BYTES:
        raise _too_large(source.path, length)
    ending = ending_of(facts[0].clip.path)
    for clip, one in zip(clips, facts, strict=True):
        if clip == clips[0]:
            encoded = encode_sample(clip, ending, [video], one, {})
        else:
            encoded = encode_sample(clip, "", None, one, {"content": f"{clips[0]:09}{ending}"})
        yield PackedSample(one, encoded, length, checksum, [], is_shared=clip != clips[0])


def _of_frames(
    source: Source, clip: int, facts: Facts, packing: Packing, *, is_folder: bool
) -> PackedSample | DecodeError:
    """Return the sample of a clip whose frames are packed each for itself, or as a video of the clip alone."""
    kept = _Kept(source)
    try:
        if is_folder:
            facts, parts = _of_folder(source, facts, packing, kept)
        else:
            facts, parts = _of_video(source, facts, packing, kept)
    except DecodeError as error:
        return DecodeError(facts.clip.path, error.reason)
    if not parts:
        return DecodeError(facts.clip.path, "has one frame: flow is the motion from a frame to the next")
    ends = list(accumulate(map(packed.size_of, parts)))
    is_video = packing.kind == "video"
    if ends[-1] >= (packed.MAX_MEMBER_BYTES if is_video else packed.MAX_PICTURES_BYTES):
        return _too_large(facts.clip.path, ends[-1])
    if is_video:
        checksum = 0
        for piece in chain.from_iterable(map(packed.pieces_of, parts)):
            checksum = zlib.crc32(piece, checksum)
        return PackedSample(facts, encode_sample(clip, ".mp4", parts, facts, {}), ends[-1], checksum, [])
    pictures = list[tuple[int, int]]()
    is_jpeg = True
    for number, part in enumerate(parts):
        content = b"".join(packed.pieces_of(part))
        is_jpeg &= content.startswith(b"\xff\xd8")
        pictures.append((ends[number], picture_checksum(facts.checksum(), number, content)))
    ending = ".mjpeg" if is_jpeg else ".pictures"
    return PackedSample(facts, encode_sample(clip, ending, parts, facts, {"picture_ends": ends}), ends[-1], 0, pictures)


def _too_large(path: str, length: int) -> DecodeError:
    return DecodeError(path, f"is too large to be packed: {length:,} bytes; list spans of it")


def _of_video(source: Source, facts: Facts, packing: Packing, kept: _Kept) -> tuple[Facts, list[Any]]:
    """Decode a clip of a video; return its facts with the size and the number of frames, and the parts of its sample.

    Of a video whose number of frames is listed it is decoded from the nearest key frames, as in training.
    """
    path = source.path
    limits = limits_of(packing)
    listed = facts.num_frames if facts.num_frames > 0 else None
    video = source.films.load(path, source.sha256, listed, limits)
    if listed is not None:
        index = video.index
        counted = count_packets(video, Budget(path, limits))[0] if index is None else len(index.times)
        listed = listed if counted == listed else None
    opened = VideoClip(video, listed, limits, is_checked=source.sha256 is not None)
    with opened:
        while True:
            num_frames = opened.num_frames
            numbers = facts.clip.span.frames(path, num_frames)[:: packing.every]
            with suppress(ChooseAgain):
                return _encoded(source, facts, packing, kept, num_frames, opened.frames(numbers))


def limits_of(packing: Packing) -> Limits:
    """Return the limits of reading a video; flow may take any time."""
    return NO_HURRY if packing.method is None else replace(NO_HURRY, seconds=math.inf)


def _of_folder(source: Source, facts: Facts, packing: Packing, kept: _Kept) -> tuple[Facts, list[Any]]:
    """Take the pictures of a folder unchanged, except those that are too large or not JPEG; or compute their flow."""
    path = source.path
    is_flow = packing.modality == "flow" and packing.method is None
    paths = list_pictures(path, is_flow=is_flow)
    if is_flow:
        fields = len(paths) // 2
        frames = facts.clip.span.frames(path, fields + 1)
        chosen = paths[2 * frames.start : 2 * (frames.stop - 1)]
        return replace(facts, num_frames=fields), [kept(read_bytes(picture)) for picture in chosen]
    numbers = facts.clip.span.frames(path, len(paths))[:: packing.every]
    if packing.kind == "bytes":
        return replace(facts, num_frames=len(paths)), [kept(read_bytes(paths[number])) for number in numbers]
    chosen = [paths[number] for number in numbers]
    if packing.kind == "jpeg" and packing.method is None and facts.clip.region == WHOLE_FRAME:
        return _jpegs(source, replace(facts, num_frames=len(paths)), packing, kept, chosen)
    budget = Budget(path, limits_of(packing))
    decoded = ((number, decode_picture(paths[number], read_bytes(paths[number]), budget)[1]) for number in numbers)
    return _encoded(source, facts, packing, kept, len(paths), decoded)


def _jpegs(
    source: Source, facts: Facts, packing: Packing, kept: _Kept, paths: Sequence[str]
) -> tuple[Facts, list[Any]]:
    """Return pictures as JPEG: the bytes of those that are it already, and small."""
    budget = Budget(source.path, limits_of(packing))
    rendering = _Rendering(source.path, facts.clip.region, packing)
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
    source: Source,
    facts: Facts,
    packing: Packing,
    kept: _Kept,
    num_frames: int,
    frames: Iterable[NumberedFrame],
) -> tuple[Facts, list[Any]]:
    """Return a clip's facts and parts, of its frames in order. num_frames: of its video.

    Of n frames there are n JPEG pictures, one video, or the two grey JPEG pictures, x and y, of n - 1 fields of flow.
    """
    rendering = _Rendering(source.path, facts.clip.region, packing)
    with naming_errors(source.path):
        pictures = (rendering(frame) for _, frame in frames)
        if packing.kind == "video":
            parts = _video_of(pictures, packing, kept)
        elif packing.method is None:
            parts = [kept(jpeg(picture, packing.quality)) for picture in pictures]
        else:
            fields = _flow_of(pictures, source.path, packing)
            parts = [kept(jpeg(code[..., axis], packing.quality)) for code in fields for axis in (0, 1)]
    width, height = rendering.size
    num_packed = num_frames - (packing.method is not None)
    return replace(facts, num_frames=num_packed, width=width, height=height), parts


def _flow_of(pictures: Iterable[Frames], path: str, packing: Packing) -> Iterator[Frames]:
    """Yield the flow from each picture to the next, uint8 (height, width, 2)."""
    compute = flow_method(packing.method or "", packing.preset or "")
    for before, after in pairwise(map(grey, pictures)):
        try:
            yield encode(compute(before, after), packing.bound or 0)
        except UserError as error:
            raise DecodeError(path, str(error)) from error


def _video_of(pictures: Iterator[Frames], packing: Packing, kept: _Kept) -> list[Any]:
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
    """Takes the packed parts of one clip; returns each or, after many bytes, its place in the scratch file."""

    def __init__(self, source: Source) -> None:
        self.scratch = source.scratch
        self._path = source.path
        self._num_held = 0

    def __call__(self, part: bytes) -> Any:
        self._num_held += len(part)
        if self._num_held <= _MAX_HELD_BYTES:
            return part
        self.scratch.parent.mkdir(parents=True, exist_ok=True)
        with open(self.scratch, "ab") as file:
            file.write(part)
            return Encoded(self._path, part=(str(self.scratch), file.tell() - len(part), len(part)))


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
