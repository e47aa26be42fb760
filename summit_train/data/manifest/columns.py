"""The columns of a manifest as files that processes map: .npy files in a folder, and a record of what there is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from summit_train.core.files import read_file, regular, replacing, write_json
from summit_train.core.text import from_json
from summit_train.data.manifest.annotation import annotation_kinds
from summit_train.data.manifest.tables import DTYPES, OPTIONAL

_ABOUT = "columns.json"


def save_column(path: Path, column: NDArray[Any], dtype: DTypeLike) -> None:
    """Write a .npy file, whole or not at all."""
    with replacing(path) as file:
        np.save(file, column.astype(dtype, copy=False))


def load_column(path: Path, *dtypes: DTypeLike) -> NDArray[Any]:
    """Map a .npy file of one of these types. Raises OSError, and ValueError where it is damaged or of another type."""
    try:
        with open(path, "rb", opener=regular):
            column: NDArray[Any] = np.lib.format.open_memmap(path, mode="r").view(np.ndarray)
    except (ArithmeticError, EOFError, SyntaxError, TokenError, TypeError) as error:  # by a damaged header
        raise ValueError(f"{path}: its header is damaged: {error}") from error
    if column.ndim != 1 or column.dtype not in [np.dtype(dtype) for dtype in dtypes]:
        raise ValueError(f"{path}: must be a column of {np.dtype(dtypes[0])}, got {column.dtype} {column.shape}")
    return column


def read_columns(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Map the columns that `write_columns` wrote; return them, as `reading.Manifest` has them, and the record.

    Raises OSError, and ValueError, KeyError or TypeError where they are damaged.
    """
    about = from_json(read_file(folder / _ABOUT))
    names = [name for name in DTYPES if name not in OPTIONAL or about.get(name)]
    columns: dict[str, Any] = {name: load_column(folder / f"{name}.npy", DTYPES[name]) for name in names}
    of_clips = {name: column for name, column in columns.items() if name != "more_labels"}
    lengths = {len(column) for name, column in of_clips.items() if name != "digests" or len(column)}
    columns["offsets"] = load_column(folder / "offsets.npy", np.uint32, np.int64)
    columns["paths"] = load_column(folder / "paths.npy", np.uint8)
    if lengths != {len(columns["offsets"]) - 1} or columns["offsets"][-1] != len(columns["paths"]):
        raise ValueError(f"{folder}: its columns are not of one length")
    for name in OPTIONAL:
        columns.setdefault(name, np.zeros(0, DTYPES[name]))
    clips, labels = (columns["more_labels"][name] for name in ("clip", "label"))
    if np.any(np.diff(clips) < 0) or np.any((clips < 0) | (clips >= len(columns["labels"])) | (labels < 0)):
        raise ValueError(f"{folder}: some of its labels do not belong to a clip")
    columns["group_names"] = tuple(about.get("group_names", ()))
    if np.any(columns["groups"] >= len(columns["group_names"])):
        raise ValueError(f"{folder}: some of its groups have no name")
    for kind in annotation_kinds():
        if about.get(next(iter(kind.types))):
            own = {name: load_column(folder / f"{name}.npy", dtype) for name, dtype in kind.types.items()}
            columns["annotation"] = kind.of_columns(own, len(columns["labels"]), str(folder.parent))
    return columns, about


def write_columns(folder: Path, columns: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write the columns of a `reading.Manifest` into a folder, and a record, of what there is and of `about`."""
    wide = len(columns["paths"]) >= 1 << 32
    dtypes = DTYPES | {"paths": np.uint8, "offsets": np.int64 if wide else np.uint32}
    # The files of the others are missing.
    used: dict[str, Any] = {name: True for name in OPTIONAL if len(columns[name])}
    for name, dtype in dtypes.items():
        if name not in OPTIONAL or name in used:
            save_column(folder / f"{name}.npy", columns[name], dtype)
    if (annotation := columns.get("annotation")) is not None:
        for name, dtype in annotation.types.items():
            save_column(folder / f"{name}.npy", annotation.columns[name], dtype)
        used[next(iter(annotation.types))] = True
    used |= {"group_names": columns["group_names"]} if columns["group_names"] else {}
    write_json(folder / _ABOUT, {**about, **used})


class InFile(NamedTuple):
    """A column that a process maps again, in place of a copy of its numbers."""

    path: str
    dtype: np.dtype[Any]


def as_file(column: Any) -> Any:
    """Return where a mapped column is, if a process of this node is being started with it; anything else as it is."""
    file = getattr(column, "base", None)
    if get_spawning_popen() is None or not isinstance(file, np.memmap) or file.size != column.size:
        return column
    name = str(file.filename)
    return InFile(name, column.dtype) if os.path.exists(name) else column


def from_file(column: Any) -> Any:
    return load_column(Path(column.path), column.dtype) if isinstance(column, InFile) else column
