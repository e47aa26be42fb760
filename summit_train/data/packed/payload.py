"""The sample that a clip becomes in its shard: the file's own bytes, a video or pictures of its frames or of flow."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, count
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.data.packed import format as packed
from summit_train.data.packed.format import Facts, Packing, encode_sample, ending_of, picture_checksum
from summit_train.data.video.augment import View, scaled_size
from summit_train.data.video.decode import check_whole, count_packets, every_frame, naming_errors
from summit_train.data.video.encode import Encoding, encoder, jpeg
from summit_train.data.video.flow import encode, flow_method, grey
from summit_train.data.video.pictures import decode_picture, holds_pictures, list_pictures
from summit_train.data.video.region import WHOLE_FRAME, Region
from summit_train.data.video.render import Frames, Renderer, upright_size
from summit_train.data.video.source import NO_HURRY, Budget, DecodeError, Encoded, load_video, read_bytes
from summit_train.data.video.span import Span

# From a clip's facts to those that are packed, and to its file or the bytes of its frames. Raises DecodeError.
Read = Callable[[Facts], tuple[Facts, Sequence[Any]]]
_MAX_HELD_BYTES = 64 << 20  # of the frames of one file; the others wait on disk
_MAX_OPEN_BYTES = 4 << 20  # of a video while it is encoded
_PIECE_BYTES = 1 << 20
_MAX_SIDE = 8190  # the largest even number of MPEG-4's 13 bits
_FPS = 25  # any will do: training does not use times


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


def make_samples(
    clips: Sequence[int],
    path: str,
    facts: Sequence[Facts],
    packing: Packing,
    sha256: bytes | None,
    region: Region,
    scratch: Path,
) -> list[PackedSample | DecodeError]:
    """Read a file once and convert it to what is packed of each clip that is a span of it, or return the clips' errors.

    Errors name the clips as the manifest does. Where files are packed as they are, the first clip holds the bytes.
    scratch: a file for pictures that are too many to be held; whoever has written the samples deletes it.
    """
    is_folder = holds_pictures(path)
    holder = None
    try:
        convert = _Converter(path, packing, region, _Kept(path, scratch))
        read = _of_folder(convert) if is_folder else _of_video(convert, facts, sha256)
        if not is_folder and packing.kind == "bytes":
            _, (video,) = read(facts[0])
            holder = clips[0], video.crc32()
    except DecodeError as error:
        return [DecodeError(one.path, error.reason) for one in facts]
    return [_sample(clip, one, read, holder, packing.kind) for clip, one in zip(clips, facts, strict=True)]


def _sample(
    clip: int, facts: Facts, read: Read, holder: tuple[int, int] | None, kind: str
) -> PackedSample | DecodeError:
    """Return a clip's sample. holder: the clip that has the file's bytes, and their CRC-32; None for its frames."""
    try:
        facts, parts = read(facts)
    except DecodeError as error:
        return DecodeError(facts.path, error.reason)
    if not parts:
        return DecodeError(facts.path, "has one frame: flow is the motion from a frame to the next")
    length = sum(map(packed.size_of, parts))
    checksum = 0
    more = dict[str, Any]()
    pictures = list[tuple[int, int]]()
    if kind == "video":
        ending = ".mp4"
        max_bytes = packed.MAX_MEMBER_BYTES
        for piece in chain.from_iterable(map(packed.pieces_of, parts)):
            checksum = zlib.crc32(piece, checksum)
    elif holder is None:
        ends = list(accumulate(map(packed.size_of, parts)))
        max_bytes = packed.MAX_PICTURES_BYTES
        is_jpeg = True
        for number, part in enumerate(parts):
            content = b"".join(packed.pieces_of(part))
            is_jpeg &= content.startswith(b"\xff\xd8")
            pictures.append((ends[number], picture_checksum(facts.checksum(), number, content)))
        ending = ".mjpeg" if is_jpeg else ".pictures"
        more = {"picture_ends": ends}
    else:
        ending = ending_of(facts.path)
        max_bytes = packed.MAX_MEMBER_BYTES
        checksum = holder[1]
    if length >= max_bytes:
        return DecodeError(facts.path, f"is too large to be packed: {length:,} bytes; list spans of it")
    if holder is None or holder[0] == clip:
        return PackedSample(facts, encode_sample(clip, ending, parts, facts, more), length, checksum, pictures)
    encoded = encode_sample(clip, "", None, facts, {"content": f"{holder[0]:09}{ending}"})
    return PackedSample(facts, encoded, length, checksum, pictures, is_shared=True)


def _of_video(convert: _Converter, facts: Sequence[Facts], sha256: bytes | None) -> Read:
    """Load a video and, unless its bytes are packed unchanged, decode it once for all of its spans."""
    path, packing = convert.path, convert.packing
    if packing.modality == "flow" and packing.method is None:
        raise DecodeError(path, "is a video: `data flow` computes its flow; --bound is for folders that hold flow")
    video = load_video(path, sha256)
    if packing.kind == "bytes":
        whole = video if video.content else replace(video, part=(path, 0, os.path.getsize(path)))
        return lambda one: (one, [whole])
    # A codec may give more frames than packets.
    limit = 2 * count_packets(video, convert.budget)[0] + 1
    spans = {one.span for one in facts}
    ends = {span: min(span.end if span.end >= 0 else limit, limit) for span in spans}
    clips = {span: range(span.start, end, packing.every) for span, end in ends.items()}
    wanted = frozenset(chain.from_iterable(clips.values()))
    convert.begin(clips)
    pictures = dict[int, list[Any]]()
    num_frames = 0
    with naming_errors(path):
        for number, frame in enumerate(every_frame(video, convert.budget)):
            num_frames = number + 1
            if number in wanted:
                check_whole(path, number, frame)
                pictures[number] = convert(frame)
    video.check()

    def read(one: Facts) -> tuple[Facts, Sequence[Any]]:
        frames = one.span.frames(path, num_frames)
        # The first frame of a clip only begins its first field of flow.
        numbers = frames[:: packing.every] if packing.method is None else frames[1:]
        return convert.packed(one, num_frames, [part for number in numbers for part in pictures[number]])

    return read


def _of_folder(one_clip: _Converter) -> Read:
    """Take the pictures of a folder unchanged, except those that are too large or not JPEG; or compute their flow."""
    path, packing = one_clip.path, one_clip.packing
    is_flow = packing.modality == "flow" and packing.method is None
    paths = list_pictures(path, is_flow=is_flow)

    def read(one: Facts) -> tuple[Facts, Sequence[Any]]:
        if is_flow:
            fields = len(paths) // 2
            frames = one.span.frames(path, fields + 1)
            chosen = paths[2 * frames.start : 2 * (frames.stop - 1)]
            return replace(one, num_frames=fields), [one_clip.kept(read_bytes(picture)) for picture in chosen]
        frames = one.span.frames(path, len(paths))
        if packing.kind == "bytes":
            return replace(one, num_frames=len(paths)), [one_clip.kept(read_bytes(paths[n])) for n in frames]
        convert, numbers = _Converter(path, packing, one_clip.region, one_clip.kept), frames[:: packing.every]
        convert.begin({one.span: numbers})
        parts = [convert.kept(part) for number in numbers for part in convert.picture(paths[number])]
        return convert.packed(one, len(paths), parts)

    return read


class _Kept:
    """Takes the packed parts of one file; returns each or, after many bytes, its place in the scratch file."""

    def __init__(self, path: str, scratch: Path) -> None:
        self.path, self.scratch, self._num_held = path, scratch, 0

    def __call__(self, part: bytes) -> Any:
        self._num_held += len(part)
        if self._num_held <= _MAX_HELD_BYTES:
            return part
        self.scratch.parent.mkdir(parents=True, exist_ok=True)
        with open(self.scratch, "ab") as file:
            file.write(part)
            return Encoded(self.path, part=(str(self.scratch), file.tell() - len(part), len(part)))


class _Converter:
    """Turns the frames of a video, one after the other, into what is packed of it.

    Each frame becomes a JPEG picture, or a frame of the clips' videos. Where flow is computed, each frame
    but the first becomes the flow from the one before it: two grey JPEG pictures, x and y. Between spans that are apart
    this also computes a field that no clip takes. budget: that of one video, without a limit of time for flow. region:
    of the frame, which is packed alone.
    """

    def __init__(self, path: str, packing: Packing, region: Region, kept: _Kept) -> None:
        self.path, self.packing, self.region, self.kept = path, packing, region, kept
        self._videos: _Videos | None = None
        self.budget, self._compute = Budget(path, NO_HURRY), None
        if packing.method is not None:
            self.budget = Budget(path, replace(NO_HURRY, seconds=math.inf))
            self._compute = flow_method(packing.method, packing.preset or "")
        self._before: NDArray[np.uint8] | None = None
        self._size: tuple[int, int] | None = None  # of an upright frame
        self._renderer: Renderer | None = None  # for the first frame's size

    def begin(self, clips: Mapping[Span, range]) -> None:
        """Take all frames of these clips from now on."""
        self._videos = _Videos(self, clips) if self.packing.kind == "video" else None

    def __call__(self, frame: Any) -> list[Any]:
        return list(map(self.kept, self._encoded(self._rendered(frame))))

    def picture(self, path: str) -> list[bytes]:
        """Return what is packed of the next frame, a picture file: its own bytes if they are a JPEG that is small."""
        content = read_bytes(path)
        codec, frame = decode_picture(path, content, self.budget)
        if self._compute is None and self.region == WHOLE_FRAME and self._videos is None:
            size = upright_size(frame)
            self._size = self._size or size
            if codec == "mjpeg" and min(size) <= self.packing.short_side:
                return [content]
        return self._encoded(self._rendered(frame))

    def _rendered(self, frame: Any) -> Frames:
        if self._renderer is None:
            self._renderer = Renderer([self._view(*upright_size(frame))])
        (picture,) = self._renderer(frame)
        return picture

    def _view(self, width: int, height: int) -> View:
        """Scale a frame of this size, or its region, down to the packing's short side, but never up."""
        region = None
        if self.region != WHOLE_FRAME:
            if (problem := self.region.problem(width, height)) is not None:
                raise DecodeError(self.path, f"{problem} (data.region)")
            region, width, height = self.region, self.region.width, self.region.height
        self._size = (width, height)
        scaled = scaled_size(width, height, min(self.packing.short_side, width, height))
        if self.packing.kind == "video":  # with colour at half the resolution
            scaled = (max(2, scaled[0] // 2 * 2), max(2, scaled[1] // 2 * 2))
            if max(scaled) > _MAX_SIDE:
                limit = f"a side of an MPEG-4 video must be at most {_MAX_SIDE:,} pixels"
                raise DecodeError(self.path, f"{limit}, got {scaled[0]} x {scaled[1]}")
        return View(*scaled, 0, 0, *scaled, region=region)

    def _encoded(self, picture: NDArray[np.uint8]) -> list[bytes]:
        """Return what is packed of the next frame, RGB (height, width, 3)."""
        if self._videos is not None:
            self._videos.add(picture)
            return []
        pictures = [picture]
        if self._compute is not None:
            before, self._before = self._before, grey(picture)
            if before is None:
                return []
            try:
                code = encode(self._compute(before, self._before), self.packing.bound or 0)
            except UserError as error:
                raise DecodeError(self.path, str(error)) from error
            pictures = [code[..., 0], code[..., 1]]
        return [jpeg(one, self.packing.quality) for one in pictures]

    def packed(self, facts: Facts, num_frames: int, parts: Sequence[Any]) -> tuple[Facts, Sequence[Any]]:
        """Return a clip's facts with the frames' size and the number of frames or fields, and its video or `parts`."""
        assert self._size is not None, "a video without a frame is refused before"
        width, height = self._size
        facts = replace(facts, num_frames=num_frames - (self._compute is not None), width=width, height=height)
        return facts, parts if self._videos is None else self._videos.of(facts.span)


class _Videos:
    """Encodes clips of one file as videos, while all their frames arrive once and in order.

    clips: the numbers of each one's frames; frame i of its video is the i-th of them. Clips that share frames are
    encoded at the same time, each with a few MB.
    """

    def __init__(self, convert: _Converter, clips: Mapping[Span, range]) -> None:
        self._convert, self._made = convert, dict[Span, list[Any]]()
        self._coming = sorted(clips.items(), key=lambda clip: clip[1].start, reverse=True)
        self._numbers = iter(sorted(set(chain.from_iterable(clips.values()))))
        self._open = dict[Span, tuple[range, Generator[list[Any], Frames | None, None]]]()

    def add(self, picture: Frames) -> None:
        number = next(self._numbers)
        while self._coming and self._coming[-1][1].start == number:
            span, frames = self._coming.pop()
            self._open[span] = frames, self._video((picture.shape[1], picture.shape[0]))
            next(self._open[span][1])
        for span, (frames, video) in list(self._open.items()):
            if number in frames:
                video.send(picture)
            if number == frames[-1]:
                self.of(span)

    def of(self, span: Span) -> list[Any]:
        """Return the parts of a clip's video, after all of its frames."""
        if span in self._open:
            _, video = self._open.pop(span)
            self._made[span] = video.send(None)
        return self._made[span]

    def _video(self, size: tuple[int, int]) -> Generator[list[Any], Frames | None, None]:
        """Receive the frames of a video, then None; yield its parts after None, before that empty lists."""
        packing, kept = self._convert.packing, self._convert.kept
        encoding = Encoding("mpeg4", 6 * packing.qscale, packing.gop, b_frames=0)
        kept.scratch.parent.mkdir(parents=True, exist_ok=True)
        with SpooledTemporaryFile(_MAX_OPEN_BYTES, dir=str(kept.scratch.parent)) as file:
            with encoder(file, size, _FPS, encoding, "mp4") as write:
                for number in count():
                    if (picture := (yield [])) is None:
                        break
                    write(picture, number)
            file.seek(0)
            yield list(map(kept, iter(partial(file.read, _PIECE_BYTES), b"")))
