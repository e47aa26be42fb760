"""What a shard is, byte by byte: a plain tar file that follows WebDataset's naming.

A clip is a sample of three members with one key, its number in nine digits: KEY.mp4 (or as the video's name ends;
KEY.mjpeg where it was packed as JPEG pictures, one after the other), KEY.cls (the label) and KEY.json (the rest). All
is a function of the clips: no times, no owners, so packing twice gives the same bytes.
"""

from __future__ import annotations

import json
import os
import tarfile
import zlib
from dataclasses import asdict, dataclass
from typing import Any

INDEX_FOLDER = "index"
# What ustar's size field can hold, as the readers of everywhere understand it.
MAX_MEMBER_BYTES = 8 << 30
# Where a picture ends in its clip is stored in 32 bits.
MAX_PICTURES_BYTES = 1 << 32
_BLOCK = 512
_END = 2 * _BLOCK


@dataclass(frozen=True)
class Facts:
    """What is known of a clip beside its bytes. All of it enters its checksums.

    num_frames: of the video, -1 where nobody counted; width, height: of the upright frame before it was packed, 0 in a
    set of the original bytes.
    """

    path: str
    label: int
    num_frames: int
    reversed: bool
    width: int = 0
    height: int = 0

    def checksum(self) -> int:
        """CRC-32 of the facts, which the checksums of the clip's bytes begin with."""
        fields = (self.label, self.num_frames, int(self.reversed), self.width, self.height)
        return zlib.crc32(os.fsencode(self.path), zlib.crc32("{} {} {} {} {} ".format(*fields).encode()))


def clip_checksum(facts: Facts, payload: bytes) -> int:
    """CRC-32 of a clip's facts and bytes: it finds every change of up to 32 bits in a row, and any with 1 - 2^-32.

    Taken in every read in training, where a cryptographic hash would take several times as long.
    """
    return zlib.crc32(payload, facts.checksum())


def picture_checksum(facts_checksum: int, number: int, payload: bytes) -> int:
    """The same for picture `number` of a clip."""
    return zlib.crc32(payload, zlib.crc32(number.to_bytes(8, "little"), facts_checksum))


def shard_name(number: int) -> str:
    """The file name of a shard."""
    return f"{number:06}.tar"


def sample(clip: int, ending: str, payload: bytes, facts: Facts, more: dict[str, Any]) -> tuple[bytes, int]:
    """A clip's bytes in its shard, and where in them the payload begins."""
    key = f"{clip:09}"
    about = json.dumps(asdict(facts) | more, sort_keys=True).encode()
    label = str(facts.label).encode()
    parts = [_member(f"{key}{ending}", payload), _member(f"{key}.cls", label), _member(f"{key}.json", about)]
    return b"".join(parts), _BLOCK


def _member(name: str, content: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o644
    return info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % _BLOCK)


def shard_end() -> bytes:
    """What ends a tar file."""
    return bytes(_END)


def ending_of(path: str) -> str:
    """The ending that a video's member has: the file's own, so that readers know its kind, made safe."""
    ending = os.path.splitext(path)[1].lower()
    is_plain = ending[1:].isascii() and ending[1:].isalnum() and len(ending) <= 16
    return ending if is_plain and ending not in (".cls", ".json") else ".video"
