"""Write files whole or not at all, hash them, and hold locks that end with the process."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from summit_train.core.errors import UserError

# A write to a full disk raises one of these, without the file's name.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


_SECONDS_TO_WRITE = 3600.0  # at most, for a file


def cache_folder() -> Path:
    """Return the user's folder of what can be made again. Raises OSError where the user has no home folder."""
    folder = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if folder.startswith("~"):
        raise OSError(None, "the user has no home folder; set XDG_CACHE_HOME to a folder for caches", folder)
    return Path(folder, "summit_train")


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add the file's name to the OSError of a full disk in the block."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _NO_ROOM:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def regular(path: str, flags: int) -> int:
    """Open a regular file, for `open(..., opener=regular)`: a FIFO or a device could be read for ever."""
    file = os.open(path, flags | os.O_NONBLOCK)  # without which opening a FIFO waits
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):
        os.close(file)
        why = os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "is not a regular file"
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, why, path)
    return file


def read_file(path: str | Path) -> bytes:
    """Return the content of a regular file. Raises OSError, with the name of the file."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


@contextmanager
def replacing(path: str | Path, *, new: bool = False) -> Iterator[IO[bytes]]:
    """Yield a binary file that replaces `path`, flushed to the disk, when the block ends.

    An error in the block leaves `path` as it was. A missing folder is made. Raises OSError, with the name of the file,
    if the disk is full. new: raise FileExistsError where `path` is there by then, in place of replacing it.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Process and host keep two commands that write one file apart.
    temporary = target.with_name(f".{target.name[:160]}.{os.getpid()}@{os.uname().nodename}.writing")
    try:
        with naming(target), open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if new:
            os.link(temporary, target)
            temporary.unlink()
        else:
            os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed in `replacing` have left below a folder.

    That is, of this host what belongs to no process, and of others, whose processes are not known, what is an hour old.
    """
    for path in folder.rglob(".*.writing"):
        process, _, host = path.name.removesuffix(".writing").rpartition("@")
        with suppress(FileNotFoundError):  # its process has been faster
            is_old = time.time() - path.stat().st_mtime > _SECONDS_TO_WRITE
            if is_old if host != os.uname().nodename else not os.path.exists(f"/proc/{process.rpartition('.')[2]}"):
                path.unlink()


def write_text(path: str | Path, text: str) -> None:
    """Write a text file. A surrogate, as Python uses for a file name's byte outside UTF-8, becomes that byte again."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", "surrogateescape"))


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def file_sha256(path: str | Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", opener=regular) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def take_lock(file: IO[Any], *, wait: bool = True) -> None:
    """Lock an open file until it is closed. Raises BlockingIOError, UserError where its file system has no locks."""
    with _naming_lack_of_locks(file):
        fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


@contextmanager
def _naming_lack_of_locks(file: IO[Any]) -> Iterator[None]:
    """Raise UserError where the block asks for a lock and the file's file system has none."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        wrong = f"{file.name}: its file system gives no POSIX locks ({error.strerror})"
        right = "choose a folder on another one, or have it mounted with locks (Lustre: -o flock)"
        raise UserError(f"{wrong}, by which one run at a time uses a folder; {right}") from error


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock on this file, made with its folder, for the block. wait: until it is free, or BlockingIOError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        take_lock(file, wait=wait)
        yield


def is_locked(path: Path) -> bool:
    """True if another process holds the lock on this file, without taking it."""
    if not path.exists():
        return False
    # struct flock of 64-bit Linux: type, whence, start, length (0: to the end), process, padded to its alignment.
    form = "hhqqi0q"
    question = (fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with open(path, "rb") as file, _naming_lack_of_locks(file):
        answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(form, *question))
    return bool(struct.unpack(form, answer)[0] != fcntl.F_UNLCK)


def check_output(option: str, given: str | Path, file: str | Path, *sources: str | Path) -> None:
    """Raise UserError where `file`, which the option's value asks for, cannot be written; its folder is made.

    sources: what the command reads, which must be other files, by whatever name or link.
    """
    target = Path(file)
    for source in sources:
        if target.is_file() and os.path.exists(source) and target.samefile(source):
            raise UserError(f"{option} must be another file than {source}, which it would replace")
    try:
        if target.exists() and not target.is_file():
            raise UserError(f"{option} {given}: cannot be written: is not a regular file")
        target.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        number = errno.ENOTDIR if isinstance(error, FileExistsError) else error.errno or 0
        raise UserError(f"{option} {given}: cannot be written: {os.strerror(number)}") from error


FIGURE_FORMATS = (".png", ".svg", ".pdf")


def figure_path(text: str) -> Path:
    """Return the path of a figure. Raises UserError for a suffix that is not a figure format."""
    if Path(text).suffix not in FIGURE_FORMATS:
        raise UserError(f"--out {text}: the name of a figure ends in {', '.join(FIGURE_FORMATS)}")
    return Path(text)
