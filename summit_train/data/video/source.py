"""A video on disk or in memory, and what reading it may cost. Nothing decodes.

A damaged or malicious header can ask for anything. The limits are far above what a training video needs; only the
seconds depend on the machine.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from io import BytesIO, FileIO
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from summit_train.core.files import file_sha256, read_file
from summit_train.data.video.region import MAX_SIDE_RATIO
from summit_train.data.video.span import DecodeError as DecodeError

# The bytes of a larger video are not held in memory.
MAX_HELD_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
# As much counts of the time between two checks: a process that was stopped has let more pass.
_MOST_SECONDS_UNCHECKED = 10.0
# The reason of the error for a file that does not exist.
MISSING = os.strerror(errno.ENOENT)


@dataclass(frozen=True)
class Limits:
    """pixels: of a frame (8K has half as many); packets: of a video (46 hours at 25 a second); seconds: to read it.

    way_out: what the message about the seconds advises.
    """

    pixels: int = 1 << 26
    packets: int = 1 << 22
    seconds: float = 120.0
    way_out: str = ""


LIMITS = Limits()
RAISE_SECONDS = "; raise data.clip_seconds, and let `summit-train data index` write num_frames, by which it seeks"
# For decoding a long video in full.
NO_HURRY = Limits(seconds=3600.0)


@dataclass
class Budget:
    """The limits of one video while it is read. Its methods raise DecodeError if one is exceeded."""

    name: str
    limits: Limits
    _seconds: float = 0.0  # that it has taken so far
    _checked: float | None = None  # when that was counted last

    def restart(self) -> None:
        """Give the video its seconds again, from the next check on."""
        self._seconds = 0.0
        self._checked = None

    def size(self, width: int, height: int) -> None:
        """Check a frame's size as a header gives it."""
        is_long = max(width, height) > MAX_SIDE_RATIO * max(1, min(width, height))
        if width * height > self.limits.pixels or (is_long and width and height):
            raise DecodeError(self.name, f"a frame of {width} x {height} pixels is not read: its header is damaged?")

    def check(self, packet: int = 0) -> None:
        """Check the number of a packet, and the time."""
        if packet >= self.limits.packets:
            raise DecodeError(self.name, f"does not end after {self.limits.packets:,} packets")
        now = time.monotonic()
        if self._checked is not None:
            self._seconds += min(now - self._checked, _MOST_SECONDS_UNCHECKED)
        self._checked = now
        if self._seconds >= self.limits.seconds:
            raise DecodeError(self.name, f"takes longer than {self.limits.seconds:g} s to read{self.limits.way_out}")


@contextmanager
def file_errors(name: str) -> Iterator[None]:
    """Turn the OSErrors of the block into DecodeErrors of this file."""
    try:
        yield
    except OSError as error:
        raise DecodeError(name, error.strerror or str(error)) from error


class PacketIndex(NamedTuple):
    """Which frame is which packet; the first three are empty if the packets do not tell.

    times: of presentation, rising; frame i is shown at the i-th. places: of frame i's packet in decoding order. keys:
    the numbers of the key frames. starts, checksums: of each packet in decoding order, the time to seek to, and what it
    is recognised by.
    """

    times: NDArray[np.int64]
    places: NDArray[np.int32]
    keys: NDArray[np.int32]
    starts: NDArray[np.int64]
    checksums: NDArray[np.uint32]

    @property
    def is_in_decoding_order(self) -> bool:
        """True if the frames are shown in the order in which they are decoded."""
        return bool(np.all(np.diff(self.places) > 0))


class _InMemory(BytesIO):
    """Bytes with a name: FFmpeg looks at its extension where the bytes could be of several formats."""

    def __init__(self, video: Encoded) -> None:
        super().__init__(video.content or b"")
        self.name = video.name


class _Part(FileIO):
    """`length` bytes of the file at `path`, from `start` on, with another name."""

    def __init__(self, name: str, path: str, start: int, length: int) -> None:
        super().__init__(path)
        self.name = name
        self._start = start
        self._end = start + length
        self.seek(0)

    def read(self, size: int | None = None) -> bytes:
        left = max(0, self._end - super().tell())
        return super().read(left if size is None or size < 0 else min(size, left))

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: self._start, os.SEEK_CUR: super().tell(), os.SEEK_END: self._end}[whence]
        return super().seek(origin + place) - self._start

    def tell(self) -> int:
        return super().tell() - self._start


@dataclass(frozen=True)
class Encoded:
    """An encoded video: its name for messages and its bytes, or without bytes the file of that name.

    Bytes are decoded as the file would be: where they alone could be of several formats, the extension of `name` tells.
    state: what `check` returned of the file. index: of its packets. part: the file, and the place and the number of the
    video's bytes in it, where these are not the whole file of that name.
    """

    name: str
    content: bytes | None = None
    state: str | None = None
    index: PacketIndex | None = None
    part: tuple[str, int, int] | None = None

    def check(self) -> str:
        """Return the state of the file: its size, modification time and inode. Raises DecodeError if it is not `state`.

        Raises DecodeError also if there is nothing to decode: FFmpeg would wait forever on a FIFO.
        """
        try:
            status = os.stat(self.part[0] if self.part else self.name) if self.content is None else None
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            raise DecodeError(self.name, getattr(error, "strerror", None) or str(error)) from error
        if status and stat.S_ISDIR(status.st_mode):
            raise DecodeError(self.name, "is a directory, not a video file")
        if status and not stat.S_ISREG(status.st_mode):
            raise DecodeError(self.name, "is not a regular file")
        if not (status.st_size if status else self.content):
            raise DecodeError(self.name, "is empty")
        state = f"{status.st_size} {status.st_mtime_ns} {status.st_ino}" if status else ""
        if self.state not in (None, state):
            raise DecodeError(self.name, "has changed while it was read")
        return state

    @property
    def num_bytes(self) -> int:
        """The number of bytes in memory or of the part; 0 of a whole file."""
        return len(self.content or b"") if self.part is None else self.part[2]

    def opened(self) -> BytesIO | FileIO:
        """Return a file of the bytes and of that name. Raises OSError."""
        if self.content is not None:
            return _InMemory(self)
        return FileIO(self.name) if self.part is None else _Part(self.name, *self.part)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes in pieces. Raises DecodeError if the file has changed or cannot be read."""
        with file_errors(self.name), self.opened() as file:
            yield from iter(partial(file.read, _PIECE_BYTES), b"")
        self.check()

    def crc32(self, before: int = 0) -> int:
        """Return the checksum of the bytes after those of which it is `before`. Raises DecodeError as `pieces` does."""
        return reduce(lambda checksum, piece: zlib.crc32(piece, checksum), self.pieces(), before)

    def sha256(self) -> str:
        """Return the digest of the bytes in hexadecimal digits. Raises OSError, and DecodeError as `check` does."""
        digest = file_sha256(self.name) if self.content is None else hashlib.sha256(self.content).hexdigest()
        self.check()
        return digest

    def check_sha256(self, sha256: bytes) -> None:
        """Raise DecodeError if the bytes have another digest, and OSError."""
        if self.sha256() != sha256.hex():
            raise DecodeError(self.name, "has changed since it was indexed: its SHA-256 is not the manifest's")


@dataclass(frozen=True)
class VideoInfo:
    """The result of a full decode. width, height: of the upright picture. duration: seconds; None without times.

    can_jump: whether jumps to its key frames give the frames of the full decode. notes: what else a person should know.
    sha256: in hexadecimal digits.
    """

    num_frames: int
    fps: float | None
    width: int
    height: int
    duration: float | None
    codec: str
    can_jump: bool = field(default=True, kw_only=True)
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    sha256: str


def load_video(path: str, sha256: bytes | None) -> Encoded:
    """Read a file, or only name it if it is too large to hold. Raises DecodeError if its SHA-256 differs."""
    video = Encoded(path, state=Encoded(path).check())
    with file_errors(path):
        if os.path.getsize(path) <= MAX_HELD_BYTES:
            content = read_file(path)
            video.check()
            video = Encoded(path, content)
        if sha256 is not None:
            video.check_sha256(sha256)
    return video


def read_bytes(path: str) -> bytes:
    """Read a file whole. Raises DecodeError."""
    with file_errors(path):
        return read_file(path)
