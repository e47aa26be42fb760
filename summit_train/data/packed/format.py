"""The format of a packed set: tar shards, the index of clips and pictures, the manifest and the record `pack.json`.

A shard is a plain tar file with WebDataset's naming. A clip is a sample of three members with one key, its number in
nine digits: KEY.mp4 (the video's own extension; KEY.mjpeg for JPEG pictures, one after the other), KEY.cls (the label)
and KEY.json (the other facts). In a set of original bytes, of spans of one video that follow each other, the first has
the video, and the KEY.json of the others names that member (`content`). A shard holds no times and no owners, so
packing twice gives the same bytes.

The index has a row for each clip and a row for each picture: `np.load("packed/index/clips.npy", mmap_mode="r")`.
pack.json lists every file of the set with its SHA-256. A set without it is not finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from summit_train.core.errors import UserError
from summit_train.core.files import read_file
from summit_train.core.text import from_json
from summit_train.data.manifest.clip import Clip
from summit_train.data.manifest.reading import PACK_FILE, PACKED_MANIFEST, Manifest
from summit_train.data.manifest.tables import label_text
from summit_train.data.video.span import WHOLE

INDEX_FOLDER, CLIPS, PICTURES = "index", "clips.npy", "pictures.npy"
# The limit of ustar's size field.
MAX_MEMBER_BYTES = 8 << 30
# The index stores a picture's end within its clip in 32 bits.
MAX_PICTURES_BYTES = 1 << 32
# start, length: of the clip's bytes in its shard. first: the row of the clip's first picture. checksum: the CRC-32 of
# the clip's bytes; 0 of a clip of pictures, each of which has its own. facts_checksum: that of Facts.
CLIP_ROW = np.dtype(
    [
        ("shard", "<u4"), ("checksum", "<u4"), ("start", "<i8"), ("length", "<i8"), ("first", "<i8"),
        ("width", "<u4"), ("height", "<u4"), ("facts_checksum", "<u4"),
    ]
)  # fmt: skip
# Format 1 lacks the last. Its checksum is of the facts and then the bytes; of a clip of pictures, of its facts alone.
CLIP_ROW_1 = np.dtype([(name, CLIP_ROW[name]) for name in (CLIP_ROW.names or ())[:-1]])
# end: of the picture, counted from the clip's start.
PICTURE_ROW = np.dtype([("end", "<u4"), ("checksum", "<u4")])
# Where a sample's first member has its content, behind a header of one block; and the two blocks that end a tar file.
CONTENT_AT = _BLOCK = 512
SHARD_END = bytes(2 * _BLOCK)
FORMAT = 2  # 1: up to version 0.3.0
_MAX_BOUND = 1024
# A record may come from a stranger, and its files are opened and copied: no name may lead out of the set's folder.
_FILE_NAME = re.compile(rf"({PACKED_MANIFEST}|{INDEX_FOLDER})/[a-z_]+\.(npy|json)")


@dataclass(frozen=True)
class Facts:
    """The facts of a clip, without its bytes. All but the region enter the clip's checksums.

    label: as a manifest has it, `3;17` for several. num_frames: of the video, in a set of flow its fields, one less; -1
    where unknown. width, height: of the upright frame before packing, 0 in a set of the original bytes.
    """

    clip: Clip
    label: int | str
    num_frames: int
    width: int = 0
    height: int = 0

    def checksum(self) -> int:
        """Return the CRC-32 of the facts.

        It finds every burst of up to 32 changed bits, and any other change with probability 1 - 2^-32. Training checks
        it in every read; a cryptographic hash would take several times as long.
        """
        fields: list[object] = [self.label, self.num_frames, int(self.clip.is_reversed), self.width, self.height]
        if self.clip.span != WHOLE:
            fields += self.clip.span
        return zlib.crc32(os.fsencode(self.clip.path), zlib.crc32("".join(f"{field} " for field in fields).encode()))


def facts_of(manifest: Manifest, clip: int, width: int = 0, height: int = 0) -> Facts:
    """Return the facts of a manifest's clip. width, height: see Facts."""
    label = label_text(manifest.labels_of(clip))
    return Facts(manifest.clip(clip), label, int(manifest.frame_counts[clip]), width, height)


def picture_checksum(facts_checksum: int, number: int, payload: bytes) -> int:
    """Return the CRC-32 of a clip's facts, the picture's number and its bytes."""
    return zlib.crc32(payload, zlib.crc32(number.to_bytes(8, "little"), facts_checksum))


def shard_name(number: int) -> str:
    return f"{number:06}.tar"


def around_content(clip: int, ending: str, length: int, facts: Facts, **more: object) -> tuple[bytes, bytes]:
    """Return the bytes before the content of a sample, CONTENT_AT many, and those behind it.

    length: of the content, in bytes. more: further entries of KEY.json.
    """
    listed = facts.clip
    about = vars(facts) | {"path": listed.path, "reversed": listed.is_reversed} | more
    del about["clip"]
    if listed.span != WHOLE:
        about |= {"start_frame": listed.span.start, "end_frame": listed.span.end}
    behind = _padding(length)
    for name, text in ((".cls", str(facts.label)), (".json", json.dumps(about, sort_keys=True))):
        content = text.encode()
        behind += _header(f"{clip:09}{name}", len(content)) + content + _padding(len(content))
    return _header(f"{clip:09}{ending}", length), behind


def _header(name: str, length: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = length
    info.mode = 0o644
    return info.tobuf(tarfile.USTAR_FORMAT)


def _padding(length: int) -> bytes:
    return bytes(-length % _BLOCK)


def ending_of(path: str) -> str:
    """Return the extension of a video's member: the file's own where it is plain, else .video."""
    ending = os.path.splitext(path)[1].lower()
    is_plain = ending[1:].isascii() and ending[1:].isalnum() and len(ending) <= 16
    return ending if is_plain and ending not in (".cls", ".json") else ".video"


# The kinds of packing, and the options of each.
_SCALED = ("short_side", "every")
OPTIONS = {"bytes": (), "jpeg": (*_SCALED, "quality"), "video": (*_SCALED, "gop", "qscale")}


@dataclass(frozen=True)
class Packing:
    """How clips are packed. Raises UserError for a wrong value.

    kind: 'bytes' (the videos as they are), or every `every`-th frame, scaled down to `short_side` where it is larger:
    'jpeg' (each a JPEG of quality 1 to 95) or 'video' (an MPEG-4 video of the clip alone, with a key frame every `gop`
    frames, the quantiser scale `qscale`, and sides rounded down to even). modality: 'rgb' or 'flow', two grey pictures
    for each field, x and y. bound: the flow, in pixels, of the value 255. method, preset: of video.flow, to compute the
    flow of the frames; without a method the clips are folders of flow pictures, which are packed as they are. colour:
    of jpeg: 'full', or 'half' in older sets, whose frames lost colour resolution when they were scaled down. region:
    'columns' where each frame is the part that the list named, see data.region.
    """

    kind: str
    short_side: int = 256
    every: int = 1
    quality: int = 90
    modality: str = "rgb"
    bound: float | None = None
    method: str | None = None
    preset: str | None = None
    colour: str = "full"
    region: str | None = None
    gop: int = 8
    qscale: int = 3

    def __post_init__(self) -> None:
        valid = tuple(OPTIONS) if self.modality == "rgb" else ("bytes",) if self.method is None else ("jpeg",)
        if self.kind not in valid:
            raise UserError(f"kind must be {' or '.join(valid)}, got {self.kind!r}")
        if self.region not in ((None, "columns") if self.kind != "bytes" else (None,)):
            right = "region must be columns, and used with --kind jpeg or video"
            raise UserError(f"{right}, got {self.region!r} with {self.kind}")
        if self.modality == "flow" and not 0 < (self.bound or 0) <= _MAX_BOUND:
            raise UserError(f"bound must be more than 0 and at most {_MAX_BOUND} pixels, got {self.bound}")
        if self.colour not in ("full", "half"):
            raise UserError(f"colour must be full or half, got {self.colour!r}")
        for name, most in {"short_side": 8192, "every": 1 << 20, "quality": 95, "gop": 600, "qscale": 31}.items():
            if not 1 <= getattr(self, name) <= most:
                raise UserError(f"{name} must be 1 to {most}, got {getattr(self, name)}")

    @property
    def pixels(self) -> str:
        """Describe how the pixels were changed; "" for the unchanged bytes of videos."""
        if self.kind == "bytes":
            return ""
        made = f"{self.kind} short side {self.short_side}, every {self.every}, "
        made += f"gop {self.gop}, qscale {self.qscale}" if self.kind == "video" else f"quality {self.quality}"
        made += ", full colour" if self.kind == "jpeg" and self.colour == "full" else ""
        made += ", regions" if self.region else ""
        if self.modality == "rgb":
            return made
        return f"{made}, flow {self.method}{f' {self.preset}' if self.preset else ''}, bound {self.bound:g}"

    def entries(self) -> dict[str, Any]:
        """Return the fields for pack.json: no flow fields for RGB, no colour for bytes and older sets."""
        left_out: tuple[str, ...] = () if self.modality == "flow" else ("modality", "bound", "method", "preset")
        left_out += ("quality", "colour") if self.kind == "video" else ("gop", "qscale")
        if self.kind == "bytes" or self.colour == "half":
            left_out += ("colour",)
        left_out += ("region",) if self.region is None else ()
        return {name: value for name, value in asdict(self).items() if name not in left_out}


@dataclass(frozen=True)
class StoredFile:
    """One file of a set. name: below the set's folder. size: in bytes."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Pack:
    """The record of a packed set: all of its files but pack.json. fingerprint: of its manifest. format: 1 or 2."""

    packing: Packing
    clips: int
    clips_per_shard: int
    fingerprint: str
    shards: tuple[StoredFile, ...]
    files: tuple[StoredFile, ...]
    format: int = FORMAT

    @property
    def every_file(self) -> tuple[StoredFile, ...]:
        return (*self.shards, *self.files)

    def text(self) -> str:
        """Return pack.json: one line a file, and last the SHA-256 of all lines before it."""
        values = asdict(self) | {"packing": self.packing.entries()}
        lists = {name: values.pop(name) for name in ("shards", "files")}
        lines = [f" {json.dumps(name)}: {json.dumps(values[name])},\n" for name in sorted(values)]
        for name in sorted(lists):
            items = ",\n".join(f"  {json.dumps(item, sort_keys=True)}" for item in lists[name])
            lines.append(f" {json.dumps(name)}: [\n{items}\n ],\n")
        body = "{\n" + "".join(lines)
        return f'{body} "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def read_pack(folder: str | Path) -> Pack:
    """Read the record of a packed set. Raises UserError where it is missing, or one byte of it is not as written."""
    path = Path(folder) / PACK_FILE
    try:
        text = read_file(path).decode()
        values = from_json(text)
        if values["format"] not in (1, FORMAT):
            raise ValueError(f"format must be 1 or {FORMAT}, got {values['format']!r}")
        shards, files = (tuple(StoredFile(**item) for item in values[name]) for name in ("shards", "files"))
        for number, shard in enumerate(shards):
            if shard.name != shard_name(number):
                raise ValueError(f"the name of a shard must be {shard_name(number)}, got {shard.name!r}")
        for file in files:
            if not _FILE_NAME.fullmatch(file.name):
                raise ValueError(f"a file must be in {INDEX_FOLDER}/ or {PACKED_MANIFEST}/, got {file.name!r}")
        packing = Packing(**({"colour": "half"} if values["packing"]["kind"] == "jpeg" else {}) | values["packing"])
        counts = int(values["clips"]), int(values["clips_per_shard"])
        pack = Pack(packing, *counts, values["fingerprint"], shards, files, values["format"])
        if pack.text() != text:
            raise ValueError("its content does not match its checksum")
    except FileNotFoundError as error:
        raise UserError(f"{folder}: must be a finished packed set, but lacks {PACK_FILE}") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        raise UserError(f"{path}: is damaged: {error}") from error
    return pack
