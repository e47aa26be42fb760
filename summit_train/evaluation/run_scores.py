"""The scores of a run's validation set, as `summit-train eval` and the end of a training wrote them. Needs no torch."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from summit_train.core.errors import UserError
from summit_train.data.manifest import Manifest, ManifestError, read_manifest
from summit_train.data.manifest.clip import Clip, clip_of
from summit_train.data.video.span import Span
from summit_train.evaluation.scores import PREDICTIONS, Scores, prediction_names
from summit_train.spec import load_spec

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class RunScores:
    """The scores of one checkpoint of a run, sorted by video.

    name: of the run. path: of the npz. clips: the videos, each once. class_names: empty where the manifest has none.
    """

    name: str
    path: Path
    clips: tuple[Clip, ...]
    class_names: tuple[str, ...]
    scores: Scores


def read_runs(words: Sequence[str]) -> list[RunScores]:
    """Read runs as `read_run` does. Runs of one name are named as they were given."""
    runs = [read_run(word) for word in words]
    names = [run.name for run in runs]
    return [
        replace(run, name=word) if names.count(run.name) > 1 else run for run, word in zip(runs, words, strict=True)
    ]


def read_run(word: str) -> RunScores:
    """Read the newest checkpoint's scores of a run's directory, or a file of scores.

    The newest is the last one in eval.json, by its own weights. A file without the names of its videos takes them from
    the manifest in the run's spec. Raises UserError.
    """
    given = Path(word)
    if not given.exists():
        raise UserError(f"{word}: no such file or directory; a run's directory or an npz of predictions is wanted")
    if given.suffix in (".yaml", ".yml"):
        raise UserError(f"{word}: is a spec; the directory of its run must be given, {load_spec(word).run_path}")
    path = _newest(given) if given.is_dir() else given
    # Not resolved: the name of a link is the one that the user knows.
    file = Path(os.path.abspath(path))
    run = file.parent.parent
    columns = _columns(path)
    if "path" in columns:
        clips, class_names = _saved_clips(columns), tuple(columns["class_names"].tolist())
    else:
        manifest = _manifest(run, path, columns)
        clips, class_names = [clip_of(manifest, video) for video in columns["video"].tolist()], manifest.classes or ()
    name = run.name
    if not given.is_dir():
        name = f"{run.name}/{path.stem}" if file.parent.name == PREDICTIONS else path.stem
    order = sorted(range(len(clips)), key=clips.__getitem__)
    for place, following in pairwise(order):
        if clips[place] == clips[following]:
            raise UserError(f"{path}: has {clips[place]} twice; scores are matched by video, so each may be there once")
    scores = Scores(*(columns[name][order] for name in ("video", "label", "scores", "is_read")))
    # A logit of -inf is a fused probability of 0.
    broken = np.flatnonzero(scores.is_read & ~(scores.scores < np.inf).all(axis=1))
    if len(broken):
        raise UserError(f"{path}: the scores of {clips[order[broken[0]]]} are not finite; evaluate the run again")
    return RunScores(name, path, tuple(clips[place] for place in order), class_names, scores)


def _newest(run: Path) -> Path:
    """Return the npz of the checkpoint that eval.json has last. Raises UserError."""
    if not (run / "spec.yaml").is_file():
        raise UserError(f"{run}: is not the directory of a run: there is no spec.yaml in it")
    try:
        rows = json.loads((run / "eval.json").read_text(encoding="utf-8"))["checkpoints"]
        path = run / PREDICTIONS / f"{prediction_names([Path(row['path']) for row in rows])[-1]}.npz"
    except FileNotFoundError:
        raise UserError(_lacking(run, "has no predictions")) from None
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(_lacking(run, "its eval.json cannot be read")) from error
    if not path.is_file():
        raise UserError(_lacking(run, f"has no {PREDICTIONS}/{path.name}"))
    return path


def _lacking(run: Path, what: str) -> str:
    return f"{run}: {what}; run `summit-train eval {run}/spec.yaml`"


def _columns(path: Path) -> Columns:
    """Read the arrays of an npz. Raises UserError where they are no scores."""
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no npz")
        with np.load(path, allow_pickle=False) as file:
            columns = dict(file)
        _check(columns)
    except KeyError as error:
        raise UserError(f"{path}: {error} is not in it; an npz of a run's predictions is wanted") from error
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged, or no predictions ({error}); `summit-train eval` writes them") from error
    return columns


def _check(columns: Columns) -> None:
    """Raise KeyError or ValueError where the columns of scores are not all there, or do not fit together."""
    video, label, scores = columns["video"], columns["label"], columns["scores"]
    if scores.ndim != 2 or scores.dtype.kind != "f" or 0 in scores.shape:
        raise ValueError(f"scores of shape {scores.shape} and type {scores.dtype}")
    wanted: dict[str, tuple[np.ndarray, str]] = {"video": (video, "iu"), "label": (label, "iu")}
    # Older files lack this column: in them a video that could not be read has no score at all.
    wanted["is_read"] = (columns.setdefault("is_read", np.asarray(~np.isnan(scores).all(axis=1))), "b")
    if "path" in columns:
        kinds = {"path": "U", "start_frame": "iu", "end_frame": "iu", "reversed": "b"}
        wanted |= {name: (columns[name], kind) for name, kind in kinds.items()}
        if columns["class_names"].ndim != 1 or columns["class_names"].dtype.kind != "U":
            raise ValueError("class_names is no list of names")
    for name, (column, kinds_of_it) in wanted.items():
        if column.shape != scores.shape[:1] or column.dtype.kind not in kinds_of_it:
            raise ValueError(f"{name} of shape {column.shape} and type {column.dtype} for {len(scores)} videos")
    if label.min() < 0 or label.max() >= scores.shape[1]:
        raise ValueError(f"labels from {label.min()} to {label.max()} for {scores.shape[1]} classes")


def _saved_clips(columns: Columns) -> list[Clip]:
    cells: Any = (columns[name].tolist() for name in ("path", "start_frame", "end_frame", "reversed"))
    return [Clip(path, Span(start, end), is_reversed) for path, start, end, is_reversed in zip(*cells, strict=True)]


def _manifest(run: Path, path: Path, columns: Columns) -> Manifest:
    """Return the manifest that scores without the names of their videos were made from. Raises UserError."""
    nameless, advice = f"{path}: does not name its videos, and", f"run `summit-train eval {run}/spec.yaml`"
    if not (run / "spec.yaml").is_file():
        raise UserError(f"{nameless} is not in the directory of a run, whose spec.yaml has their manifest")
    try:
        manifest = read_manifest(load_spec(run / "spec.yaml").data.val)
    except ManifestError as error:
        raise UserError(f"{nameless} their manifest cannot be read ({error}); {advice}") from error
    videos = columns["video"]
    if videos.min() < 0 or videos.max() >= len(manifest) or (manifest.labels[videos] != columns["label"]).any():
        raise UserError(f"{nameless} {manifest.source} has others by now; {advice}")
    return manifest
