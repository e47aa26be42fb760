"""Films: video files of which a clip is a small part. They are not held in memory.

The first clip of a film reads the whole file, for its SHA-256 and for the index of its packets. Later ones seek. The
indexes are also kept on disk, in $XDG_CACHE_HOME/summit_train/films [~/.cache].
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from summit_train.core.files import replacing
from summit_train.data.video.decode import demuxed, index_of, open_video
from summit_train.data.video.source import (
    CHANGED,
    MAX_HELD_BYTES,
    Budget,
    DecodeError,
    Encoded,
    Limits,
    PacketIndex,
    file_state,
    load_video,
)

_MIN_FRAMES = 1000  # of a film, unless it is too large to be held
_MAX_PACKETS = 1 << 20  # of the indexes that a process keeps: 30 MB
_MAX_BYTES = 512 << 20  # of the indexes on disk: of 200 hours


class Films:
    """What this process knows of the films that it reads."""

    def __init__(self) -> None:
        self._checked = dict[str, tuple[str, bytes]]()
        self._indexes = dict[str, tuple[str, PacketIndex]]()  # the last used last
        self._can_keep = True

    def __reduce__(self) -> tuple[type[Films], tuple[()]]:
        return Films, ()

    def load(self, path: str, sha256: bytes | None, num_frames: int | None, limits: Limits) -> Encoded:
        """Return a video, as `load_video` does; a film of `num_frames` with its index."""
        Encoded(path).check()
        try:
            found = os.stat(path)
            if found.st_size <= MAX_HELD_BYTES and (num_frames or 0) < _MIN_FRAMES:
                return load_video(path, sha256)
            film = Encoded(path, state=file_state(found))
            if sha256 is not None and self._checked.get(path) != (film.state, sha256):
                if film.sha256() != sha256.hex():
                    raise DecodeError(path, CHANGED)
                self._checked[path] = film.state, sha256
        except OSError as error:
            raise DecodeError(path, error.strerror or str(error)) from error
        return film if num_frames is None else replace(film, index=self._index(film, limits))

    def _index(self, film: Encoded, limits: Limits) -> PacketIndex:
        state, index = self._indexes.pop(film.name, (None, None))
        if index is None or state != film.state:
            path = cache_folder() / f"{hashlib.sha256(os.fsencode(os.path.abspath(film.name))).hexdigest()[:32]}.npz"
            index = _kept(path, film) or self._made(path, film, limits)
        self._indexes[film.name] = film.state, index
        while len(self._indexes) > 1 and sum(len(one.starts) for _, one in self._indexes.values()) > _MAX_PACKETS:
            self._indexes.pop(next(iter(self._indexes)))
        return index

    def _made(self, path: Path, film: Encoded, limits: Limits) -> PacketIndex:
        """Read the film once; keep its index on disk, or note once that this cannot be done."""
        try:
            budget = Budget(film.name, limits)
            with open_video(film, budget) as (container, stream):
                index = index_of(demuxed(container, stream, budget))
        except DecodeError:
            return index_of([])  # decoding from the start tells where it is damaged
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(path) as file:
                os.fchmod(file.fileno(), 0o600)
                np.savez(file, state=np.array(film.state), **index._asdict())
            _delete_oldest(path.parent)
        except OSError as error:
            if self._can_keep:
                _note("the indexes of films cannot be kept in %s (%s); set XDG_CACHE_HOME", path.parent, error.strerror)
            self._can_keep = False
        return index


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "summit_train" / "films"


def _kept(path: Path, film: Encoded) -> PacketIndex | None:
    """Return the index that is kept of a film; None if there is none, or it is damaged or of another state."""
    # A missing or damaged file: the film is read again.
    with suppress(OSError, ValueError, KeyError, EOFError, BadZipFile), np.load(path, allow_pickle=False) as arrays:
        if str(arrays["state"]) == film.state:
            return PacketIndex(*(arrays[name] for name in PacketIndex._fields))
        _note("%s has changed since its packets were indexed; it is read again", film.name)
    return None


def _delete_oldest(folder: Path) -> None:
    with suppress(FileNotFoundError):  # another process was faster
        kept = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in folder.glob("*.npz"))
        excess = sum(size for _, size, _ in kept) - _MAX_BYTES
        for _, size, path in kept:
            if excess > 0:
                path.unlink()
            excess -= size


def _note(text: str, *words: object) -> None:
    logging.getLogger(__name__).warning("summit-train: note: " + text, *words)
