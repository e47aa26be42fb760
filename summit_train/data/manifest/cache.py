"""Folders with data derived from a file: built by one process, then opened by all.

A folder's name holds the key of its source, and the folder appears under that name only when it is complete. It lies
beside the file; where that cannot be written, in the user's cache folder ($XDG_CACHE_HOME or ~/.cache), or else in the
node's temporary folder.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from summit_train.data.manifest.columns import sync_folder, total_bytes

Build = Callable[[Path], None]

# A builder on another node that writes nothing for so long counts as dead; NFS shows sizes up to a minute late.
_SILENT_SECONDS = 120.0
_POLL_SECONDS = (0.1, 2.0)
_OLD_SECONDS = 30 * 86400.0
_SAMPLES = 16
_SAMPLE_BYTES = 4096
_NO_PLACE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR})


def file_key(path: str | Path, *more: str) -> str:
    """Return 32 hexadecimal digits of the file (size, modification time, samples of the bytes) and of `more`."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        digest.update(f"{status.st_size} {status.st_mtime_ns} {len(more)}".encode())
        for sample in range(_SAMPLES):
            file.seek(max(0, status.st_size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    for text in more:
        digest.update(hashlib.blake2b(text.encode("utf-8", "surrogateescape")).digest())
    return digest.hexdigest()


def cached_folder(source: Path, key: str, build: Build) -> Path | None:
    """Return the folder that `build` fills for this file and key; None where no place can be written.

    Of many processes that ask at once, one builds and the others wait. `build` gets an empty folder; its errors are
    passed on.
    """
    places = [folder / f".{name}.{key}" for folder, name in _places(source)]
    for final in places:
        if final.is_dir():
            return final
    return next((final for final in places if _built(final, build)), None)


def _places(source: Path) -> list[tuple[Path, str]]:
    """Return the folders to look in, in order, and the source's name there."""
    elsewhere = f"{hashlib.blake2b(os.fsencode(source.resolve()), digest_size=8).hexdigest()}.{source.name[:100]}"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    temporary = Path(tempfile.gettempdir()) / f"summit_train-{os.getuid()}"
    found = [(source.parent, source.name[:150])]
    found += [(Path(cache) / "summit_train", elsewhere)] if os.path.isabs(cache) else []
    found += [(temporary, elsewhere)] if _is_private(temporary) else []
    return found


def _is_private(folder: Path) -> bool:
    """Make a folder that only this user can write to; False where another user made one of that name in /tmp."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _built(final: Path, build: Build) -> bool:
    """Build, or wait for the process that builds; False where the place cannot be written."""
    building = final.with_name(f"{final.name}.building")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        while not final.is_dir():
            if _begin(building):
                _build(final, building, build)
            elif not _wait(final, building):
                _discard(building)
    except FileNotFoundError:
        # Another process took this one for dead and removed its folder.
        return _built(final, build)
    except OSError as error:
        if error.errno not in _NO_PLACE:
            raise
        return False
    return True


def _begin(building: Path) -> bool:
    """Take the right to build; False where another process has it. mkdir is exclusive on every file system."""
    try:
        building.mkdir()
    except FileExistsError:
        return False
    (building / "builder").write_text(f"{socket.gethostname()} {os.getpid()}", encoding="utf-8")
    return True


def _build(final: Path, building: Path, build: Build) -> None:
    try:
        build(building)
        (building / "builder").unlink()
        sync_folder(building)
        building.rename(final)
        sync_folder(final.parent)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    for old in glob.glob(f"{glob.escape(str(final.with_suffix('')))}.{'[0-9a-f]' * 32}"):
        # Of an older version of the file. A running job may still open it, so it stays for a while.
        if time.time() - os.stat(old).st_mtime > _OLD_SECONDS:
            shutil.rmtree(old, ignore_errors=True)


def _wait(final: Path, building: Path) -> bool:
    """Wait until the builder has ended; False where it died."""
    seen, since, pause = -1, time.monotonic(), _POLL_SECONDS[0]
    while building.is_dir() and not final.is_dir():
        size = total_bytes(building.glob("*"))
        if size != seen:
            seen, since = size, time.monotonic()
        if time.monotonic() - since > _SILENT_SECONDS or _is_dead(building):
            return False
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS[1])
    return True


def _is_dead(building: Path) -> bool:
    """Return whether the builder is a process of this host that has ended."""
    try:
        host, process = (building / "builder").read_text(encoding="utf-8").split()
        if host != socket.gethostname():
            return False
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):  # not written yet, just finished, or another user's process
        return False
    return False


def _discard(building: Path) -> None:
    """Remove a dead builder's folder; of several processes that try, one succeeds."""
    left = building.with_name(f"{building.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        building.rename(left)
    except FileNotFoundError:
        return
    shutil.rmtree(left, ignore_errors=True)
