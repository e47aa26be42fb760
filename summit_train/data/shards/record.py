"""pack.json: what a packed set is made of, with the SHA-256 of each of its files. A set without it is not finished."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from summit_train.data.manifest import PACK_FILE, PACKED_MANIFEST
from summit_train.data.shards.layout import INDEX_FOLDER, shard_name
from summit_train.errors import UserError
from summit_train.files import write_text

_FORMAT = 1
_READ_BYTES = 1 << 20
# Names come from a file that anyone may have written, and are opened and copied: none leads out of the set's folder.
_FILE_NAME = re.compile(rf"({PACKED_MANIFEST}|{INDEX_FOLDER})/[a-z_]+\.(npy|json)")


class PackError(UserError, ValueError):
    """A packed set that cannot be made or used; the message says which, why, and what would be right."""


@dataclass(frozen=True)
class Packing:
    """How clips are packed.

    kind: 'bytes' (the videos as they are) or 'jpeg' (every `every`-th frame as a JPEG of quality 1 to 95, scaled down
    to `short_side` where it is larger).
    """

    kind: str
    short_side: int = 256
    every: int = 1
    quality: int = 90

    def __post_init__(self) -> None:
        if self.kind not in ("bytes", "jpeg"):
            raise PackError(f"kind {self.kind!r} is no choice; valid: bytes, jpeg")
        for name, low, high in (("short_side", 1, 8192), ("every", 1, 1 << 20), ("quality", 1, 95)):
            if not low <= getattr(self, name) <= high:
                raise PackError(f"{name} is {getattr(self, name)}: {low} to {high} is wanted")

    @property
    def pixels(self) -> str:
        """What was done to the pixels; nothing where the bytes are the videos' own."""
        if self.kind == "bytes":
            return ""
        return f"jpeg short side {self.short_side}, every {self.every}, quality {self.quality}"

    def num_packed(self, num_frames: int) -> int:
        """How many of a video's frames are packed: number 0, `every`, 2 * `every`, ..."""
        return -(-num_frames // self.every)


@dataclass(frozen=True)
class StoredFile:
    """One file of a set: its name below the set's folder, its size and SHA-256."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Pack:
    """A packed set: its kind, its clips, and all of its files but pack.json. fingerprint is its manifest's."""

    packing: Packing
    clips: int
    clips_per_shard: int
    fingerprint: str
    shards: tuple[StoredFile, ...]
    files: tuple[StoredFile, ...]

    @property
    def shard_bytes(self) -> int:
        """The sizes of all shards together."""
        return sum(shard.size for shard in self.shards)

    def text(self) -> str:
        """pack.json: one line a file, and last the SHA-256 of all lines before it."""
        values = asdict(self) | {"format": _FORMAT}
        values["packing"] = asdict(self.packing)
        lists = {name: values.pop(name) for name in ("shards", "files")}
        lines = [f" {json.dumps(name)}: {json.dumps(values[name])},\n" for name in sorted(values)]
        for name in sorted(lists):
            items = ",\n".join(f"  {json.dumps(item, sort_keys=True)}" for item in lists[name])
            lines.append(f" {json.dumps(name)}: [\n{items}\n ],\n")
        body = "{\n" + "".join(lines)
        return f'{body} "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'

    def write(self, folder: Path) -> None:
        """Write pack.json, whole or not at all."""
        write_text(folder / PACK_FILE, self.text())


def read_pack(folder: str | Path) -> Pack:
    """The record of a packed set. Raises PackError where there is none, or a single byte of it is not as written."""
    path = Path(folder) / PACK_FILE
    try:
        text = path.read_bytes().decode()
        pack = _from_values(json.loads(text))
    except FileNotFoundError as error:
        raise PackError(f"{folder}: is no packed set, or not a finished one: it has no {PACK_FILE}") from error
    except OSError as error:
        raise PackError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PackError(f"{path}: is damaged: {error}") from error
    if pack.text() != text:
        raise PackError(f"{path}: is damaged: it is not what its own checksum says")
    return pack


def _from_values(values: dict[str, Any]) -> Pack:
    if values["format"] != _FORMAT:
        raise ValueError(f"its format is {values['format']!r}, and {_FORMAT} is what this version reads")
    shards, files = (tuple(StoredFile(**item) for item in values[name]) for name in ("shards", "files"))
    for number, shard in enumerate(shards):
        if shard.name != shard_name(number):
            raise ValueError(f"a shard is named {shard.name!r}")
    for file in files:
        if not _FILE_NAME.fullmatch(file.name):
            raise ValueError(f"a file is named {file.name!r}")
    numbers = {name: int(values[name]) for name in ("clips", "clips_per_shard")}
    return Pack(Packing(**values["packing"]), **numbers, fingerprint=values["fingerprint"], shards=shards, files=files)


def file_sha256(path: Path) -> tuple[int, str]:
    """A file's size and SHA-256. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def stored_file(folder: Path, name: str) -> StoredFile:
    """What a set's record says of one of its files. Raises OSError."""
    size, digest = file_sha256(folder / name)
    return StoredFile(name, size, digest)
