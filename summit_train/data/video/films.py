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

from summit_train.core.files import cache_folder, replacing
from summit_train.core.text import printable
from summit_train.data.video.decode import checksum, demuxed, index_of, open_video, packet_row
from summit_train.data.video.source import (
    MAX_HELD_BYTES,
    Budget,
    DecodeError,
    Encoded,
    Limits,
    PacketIndex,
    file_errors,
    load_video,
)

_MIN_FRAMES = 1000  # of a film, unless it is too large to be held
_MAX_INDEXES = 16  # that a process keeps: 2 MB for an hour
_MAX_BYTES = 512 << 20  # of the indexes on disk
_DTYPES = (np.int64, np.int32, np.int32, np.int64, np.uint32)  # of the arrays of an index
_LOG = logging.getLogger(__name__)


def is_film(num_bytes: int, num_frames: int | None) -> bool:
    """Tell videos that are too long or large to be held in memory."""
    return num_bytes > MAX_HELD_BYTES or (num_frames or 0) >= _MIN_FRAMES


class Films:
    """The films that this process reads: those whose SHA-256 was checked, and their indexes."""

    def __init__(self) -> None:
        self._checked = set[tuple[Encoded, bytes]]()
        self._indexes = dict[Encoded, tuple[str | None, PacketIndex]]()  # without their state; the last used last
        self._can_keep = True

    def load(self, path: str, sha256: bytes | None, num_frames: int | None, limits: Limits) -> Encoded:
        """Return a video, as `load_video` does; a film of `num_frames` with its index."""
        film = Encoded(path, state=Encoded(path).check())
        with file_errors(path):
            if not is_film(os.path.getsize(path), num_frames):
                return load_video(path, sha256)
            if sha256 is not None and (film, sha256) not in self._checked:
                film.check_sha256(sha256)
                self._checked.add((film, sha256))
        return film if num_frames is None else self.indexed(film, limits)

    def indexed(self, film: Encoded, limits: Limits) -> Encoded:
        """Return a film, whose `state` is known, with its index."""
        key = replace(film, state=None)
        state, index = self._indexes.pop(key, (None, None))
        if index is not None and state != film.state:
            _LOG.warning("summit-train: note: %s has changed; indexing its packets again", printable(film.name))
        if index is None or state != film.state:
            index = self._kept(film) or self._made(film, limits)
        self._indexes[key] = film.state, index
        if len(self._indexes) > _MAX_INDEXES:
            self._indexes.pop(next(iter(self._indexes)))
        return replace(film, index=index)

    def _kept(self, film: Encoded) -> PacketIndex | None:
        """Return the index on disk; None if there is none of this copy and state of the film, or it is damaged."""
        bad = (OSError, ValueError, KeyError, EOFError, BadZipFile, ArithmeticError, SyntaxError, TypeError)
        with suppress(*bad, RuntimeError), np.load(_index_file(film), allow_pickle=False) as arrays:
            index = PacketIndex(*(arrays[name] for name in PacketIndex._fields))
            is_whole = [(array.ndim, array.dtype) for array in index] == [(1, np.dtype(kind)) for kind in _DTYPES]
            if is_whole and len(index.times) == len(index.places) and len(index.starts) == len(index.checksums):
                return index
        return None

    def _made(self, film: Encoded, limits: Limits) -> PacketIndex:
        """Read the film once; keep its index on disk, or note once that this cannot be done."""
        budget = Budget(film.name, limits)
        try:
            with open_video(film, budget) as (container, stream):
                packets = demuxed(container, stream, budget)
                index = index_of(packet_row(packet, checksum(packet)) for packet in packets)
        except DecodeError:
            return index_of([])  # decoding from the start tells what is wrong
        try:
            path = _index_file(film)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(path) as file:
                os.fchmod(file.fileno(), 0o600)
                np.savez(file, **index._asdict())
            _delete_oldest(path.parent)
        except OSError as error:
            if self._can_keep:
                text = "summit-train: note: the indexes of films cannot be kept: %s (%s); set XDG_CACHE_HOME"
                _LOG.warning(text, printable(str(error.filename)), error.strerror)
            self._can_keep = False
        return index


def _index_file(film: Encoded) -> Path:
    name = hashlib.sha256(os.fsencode(f"{os.path.abspath(film.name)}\0{film.state}{film.part or ''}")).hexdigest()[:32]
    return cache_folder() / "films" / f"{name}.npz"


def _delete_oldest(folder: Path) -> None:
    with suppress(FileNotFoundError):  # another process was faster
        kept = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in folder.glob("*.npz"))
        excess = sum(size for _, size, _ in kept) - _MAX_BYTES
        for _, size, path in kept:
            if excess > 0:
                path.unlink()
            excess -= size
