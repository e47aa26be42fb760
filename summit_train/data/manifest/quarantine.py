"""Quarantine: the list of bad clips that `data scan` writes, and the clips of a manifest without them."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from summit_train.data.manifest.reading import Manifest
from summit_train.data.manifest.tables import ManifestError, open_text
from summit_train.data.video.source import DecodeError
from summit_train.files import write_text
from summit_train.spec import DataSpec

COLUMNS = ("path", "reason")
_AT_ONCE = 1 << 16


@dataclass(frozen=True, eq=False)
class Kept:
    """The clips of a manifest that are used: all `total` without the `excluded` ones, int64 (E,), rising."""

    total: int
    excluded: NDArray[np.int64]

    def __len__(self) -> int:
        return self.total - len(self.excluded)

    def ids(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the manifest's numbers of the clips at these places among the kept ones."""
        # e_j - j kept clips come before e_j, the j-th excluded one.
        kept_before = self.excluded - np.arange(len(self.excluded))
        found: NDArray[np.int64] = places + np.searchsorted(kept_before, places, side="right")
        return found

    def fingerprint(self) -> str | None:
        """Return 32 hexadecimal digits of the excluded clips, None where there is none."""
        digest = hashlib.blake2b(self.excluded.astype("<i8").tobytes(), digest_size=16, person=b"quarantine")
        return digest.hexdigest() if len(self.excluded) else None


def kept_clips(data: DataSpec, manifest: Manifest) -> Kept:
    """Return the clips of a manifest without those in data.quarantine.

    Raises ManifestError where the list cannot be read or names every clip.
    """
    excluded = np.zeros(0, np.int64)
    if data.quarantine is not None:
        bad = {path.encode("utf-8", "surrogateescape") for path, _ in read_quarantine(data.quarantine)}
        # A path may stand in the manifest twice, once in each direction.
        excluded = np.array([place for place, path in _all_paths(manifest) if path in bad], np.int64)
    if len(excluded) == len(manifest):
        raise ManifestError(f"{data.quarantine}: names every clip of {manifest.source}")
    return Kept(len(manifest), excluded)


def read_quarantine(path: str | Path) -> list[tuple[str, str]]:
    """Read (path as the manifest has it, reason) of each clip. Raises ManifestError."""
    try:
        with open_text(path) as file:
            rows = list(csv.reader(file))
    except (OSError, csv.Error) as error:
        raise ManifestError(f"{path}: the quarantine list cannot be read: {error}") from error
    if not rows or tuple(rows[0]) != COLUMNS:
        raise ManifestError(f"{path}:1: wanted the header {','.join(COLUMNS)}, as `data scan` writes it")
    for line, row in enumerate(rows[1:], 2):
        if len(row) != len(COLUMNS) and row:
            raise ManifestError(f"{path}:{line}: wanted a path and a reason, got {len(row)} fields")
    return [(row[0], row[1]) for row in rows[1:] if row]


def write_quarantine(path: str | Path, bad: Iterable[DecodeError]) -> None:
    """Write the list, with the errors' paths, whole or not at all."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *((error.path, error.reason) for error in bad)])
    write_text(path, text.getvalue())


def _all_paths(manifest: Manifest) -> Iterator[tuple[int, bytes]]:
    """Yield (place, path's bytes) of every clip, read in blocks: a call for each of millions takes long."""
    if manifest.folder:
        yield from ((n, manifest.path(n).encode("utf-8", "surrogateescape")) for n in range(len(manifest)))
        return
    for start in range(0, len(manifest), _AT_ONCE):
        edges = manifest.offsets[start : start + _AT_ONCE + 1].tolist()
        block = manifest.paths[edges[0] : edges[-1]]
        for n in range(len(edges) - 1):
            yield start + n, block[edges[n] - edges[0] : edges[n + 1] - edges[0]]
