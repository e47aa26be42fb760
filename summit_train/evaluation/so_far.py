"""Keep the scores of the videos scored so far in a file, so that a stopped evaluation resumes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from summit_train.core.files import replacing
from summit_train.data.batches.loader import BadClip
from summit_train.evaluation.scores import PREDICTIONS


class SoFar:
    """The results of some videos, by their places in the manifest, and those among them that could not be read.

    path: the file that keeps them, or None to keep them in memory only. key: everything that the results depend on; a
    file with another key is ignored.
    """

    def __init__(self, path: Path | None = None, key: str = "") -> None:
        self.results: dict[int, NDArray[np.float64]] = {}
        self.bad: list[BadClip] = []
        self._path, self._key = path, key
        if path is not None and path.exists():
            self._load(path)

    def add(self, videos: Sequence[int], results: Sequence[NDArray[np.float64]], bad: Sequence[BadClip]) -> None:
        """Add the results of some more videos."""
        self.results |= zip(videos, results, strict=True)
        self.bad += bad

    def save(self) -> None:
        """Write the file, whole or not at all."""
        if self._path is not None and self.results:
            unreadable = json.dumps([asdict(clip) for clip in self.bad])
            videos, scores = np.array(list(self.results), np.int64), np.stack(list(self.results.values()))
            with replacing(self._path) as file:
                np.savez(file, key=np.array(self._key), video=videos, scores=scores, bad=np.array(unreadable))

    def _load(self, path: Path) -> None:
        try:
            with np.load(path) as file:
                if str(file["key"]) == self._key:
                    bad = [BadClip(**clip) for clip in json.loads(str(file["bad"]))]
                    self.add(file["video"].tolist(), list(file["scores"]), bad)
        except (BadZipFile, EOFError, KeyError, ValueError):
            return  # damaged: all videos are scored again


def so_far_path(run_path: Path, name: str) -> Path:
    """Return the file that keeps the scores of a checkpoint, given its name among the run's predictions."""
    return run_path / PREDICTIONS / f"{name}.partial"


def unused_so_far(run_path: Path, key: str) -> list[Path]:
    """Return the files that keep scores of a stopped evaluation which one with `key` cannot use."""
    return [path for path in sorted((run_path / PREDICTIONS).glob("*.partial")) if not _key_of(path).startswith(key)]


def _key_of(path: Path) -> str:
    try:
        with np.load(path) as file:
            return str(file["key"])
    except (BadZipFile, EOFError, KeyError, ValueError):
        return "damaged"


def forget_so_far(run_path: Path) -> None:
    """Delete the scores that were kept for a run's evaluations."""
    for path in (run_path / PREDICTIONS).glob("*.partial"):
        path.unlink(missing_ok=True)
