"""Files that are written whole or not at all, and locks that end with the process that holds them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """A binary file that takes the place of `path`, flushed to the disk, when the block ends.

    An error in the block leaves `path` as it was. The folder is made where it is missing. Raises OSError where the
    disk does not take it.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The process number: two commands that write one file then do not write into each other's.
    temporary = target.with_name(f".{target.name[:200]}.{os.getpid()}.writing")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write a text file; what stands for a byte in a file's name that is no UTF-8 becomes that byte again."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", "surrogateescape"))


def write_json(path: str | Path, value: Any) -> None:
    """Write one JSON object."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def file_sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on this file for the block; waits for who has it. The folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def is_locked(path: Path) -> bool:
    """Another process holds the lock on this file. It is only asked, so nobody is kept out meanwhile."""
    if not path.exists():
        return False
    # struct flock of 64-bit Linux: type, whence, start, length (0: to the end), process, padded to its alignment.
    form, question = "hhqqi0q", (fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with open(path, "rb") as file:
        answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(form, *question))
    return bool(struct.unpack(form, answer)[0] != fcntl.F_UNLCK)
