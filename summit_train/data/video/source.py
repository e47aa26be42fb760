"""A video as it lies on the disk or in memory, and the error for one that cannot be read. Nothing here decodes."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from summit_train.errors import UserError
from summit_train.files import file_sha256

# The bytes of a larger video are not held in memory: it is decoded from its start, packet by packet.
MAX_HELD_BYTES = 64 << 20
# The reason of the error for a file that does not exist.
MISSING = os.strerror(errno.ENOENT)


class DecodeError(UserError):
    """A video that cannot be read; `path` and `reason` say which and why."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(f"{os.fspath(path)}: {reason}")
        self.path = os.fspath(path)
        self.reason = reason

    def __reduce__(self) -> tuple[type[DecodeError], tuple[str, str]]:
        # The default would call DecodeError(message) when a worker process sends the error home.
        return (type(self), (self.path, self.reason))


@dataclass(frozen=True)
class Encoded:
    """An encoded video: its name for messages and its bytes, or without bytes the file of that name.

    Bytes are decoded as the file would be: where they alone could be of several formats, the extension of `name` tells.
    """

    name: str
    content: bytes | None = None

    def check(self) -> None:
        """Raise DecodeError where there is nothing to decode."""
        if self.content is None:
            check_regular_file(self.name)
        elif not self.content:
            raise DecodeError(self.name, "is empty")


@dataclass(frozen=True)
class VideoInfo:
    """The result of a full decode.

    width, height: of the upright picture, in pixels. duration: of the decoded frames in seconds, None where they carry
    no times. rotation: the display matrix's, in degrees counterclockwise.
    """

    num_frames: int
    fps: float | None
    width: int
    height: int
    duration: float | None
    codec: str
    rotation: int


def check_regular_file(path: str) -> None:
    """Raise DecodeError for anything but a regular file with content: FFmpeg would wait for ever on a FIFO."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise DecodeError(path, error.strerror or str(error)) from error
    except ValueError as error:  # a zero byte in the name
        raise DecodeError(path, str(error)) from error
    if stat.S_ISDIR(status.st_mode):
        raise DecodeError(path, "is a directory, not a video file")
    if not stat.S_ISREG(status.st_mode):
        raise DecodeError(path, "is not a regular file")
    if status.st_size == 0:
        raise DecodeError(path, "is empty")


def load_video(path: str, sha256: bytes | None) -> Encoded:
    """Read a file, or only name it where it is too large to hold. Raises DecodeError where its SHA-256 is another."""
    check_regular_file(path)
    try:
        content = Path(path).read_bytes() if os.path.getsize(path) <= MAX_HELD_BYTES else None
        if sha256 is not None:
            found = file_sha256(path) if content is None else hashlib.sha256(content).hexdigest()
            if found != sha256.hex():
                raise DecodeError(path, "has changed since it was indexed: its SHA-256 is not the manifest's")
    except OSError as error:
        raise DecodeError(path, error.strerror or str(error)) from error
    return Encoded(path, content)


def read_bytes(path: str) -> bytes:
    """Return a file's bytes. Raises DecodeError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DecodeError(path, error.strerror or str(error)) from error
