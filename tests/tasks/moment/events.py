"""The event of each video: a further column of the list, `moment`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.data.manifest.annotation import Annotation
from summit_train.data.manifest.tables import Table, read_tables
from summit_train.data.video.source import DecodeError


@dataclass(frozen=True, eq=False)
class Events(Annotation):
    """frames: int32 (N,), the frame of each clip's event."""

    task = "moment"
    title = "events"
    header = "path,label,moment"
    types = MappingProxyType({"moment": np.int32})

    frames: NDArray[np.int32]
    source: str = ""

    @classmethod
    def read(cls, source: Path, classes: tuple[str, ...] | None) -> tuple[Iterable[Table], Events] | None:
        tables = list(read_tables(source))
        if "moment" not in tables[0][1]:
            return None
        places = [(line, text) for lines, cells in tables for line, text in zip(lines, cells["moment"], strict=True)]
        for line, text in places:
            if not text.isdecimal():
                raise UserError(f"{source}:{line}: moment must be a whole number from 0 on, got {text!r}")
        return tables, cls(np.array([int(text) for _, text in places], np.int32), str(source))

    @classmethod
    def of_columns(cls, columns: Mapping[str, NDArray[Any]], num_clips: int, source: str) -> Events:
        return cls(columns["moment"], source)

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        return {"moment": self.frames}

    def only(self, clip: int) -> Events:
        return Events(self.frames[clip : clip + 1], self.source)

    def cells(self) -> dict[str, object]:
        return {"moment": int(self.frames[0])}

    def check(self, clip: int, path: str | Path, num_frames: int, width: int, height: int) -> None:
        if self.frames[clip] >= num_frames:
            raise DecodeError(path, f"its event is in frame {self.frames[clip]}, and it has {num_frames}")

    def targets(self, clip: int, frames: NDArray[np.int64], view: Any, size: tuple[int, int]) -> float:
        """The position of the event between the first frame of a clip, 0, and the last one, 1, in any view."""
        return float((self.frames[clip] - frames[0]) / max(1, frames[-1] - frames[0]))

    def stacked(self, targets: Sequence[float]) -> NDArray[np.float32]:
        return np.array(targets, np.float32)
