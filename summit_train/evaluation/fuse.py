"""The scores of several networks on one validation set, added: two streams, or an ensemble of 8 and 16 frames.

Needs no torch. Scores are the logits of a video, averaged over its views. As in TSM's `test_models.py` each network's
are multiplied by its weight and added, after a softmax or as they are; the sum is divided by the sum of the weights
(there by the number of networks), which changes no order of classes. TSN's `eval_scores.py` adds logits.
"""

from __future__ import annotations

import math
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
from summit_train.core.files import read_file, regular
from summit_train.core.text import from_json
from summit_train.data.manifest.clip import Clip
from summit_train.data.manifest.reading import check_same_classes
from summit_train.data.video.region import Region
from summit_train.data.video.span import Span
from summit_train.evaluation.measures import measures_of
from summit_train.evaluation.scores import PREDICTIONS, Scores, prediction_names, probabilities
from summit_train.spec import load_spec

# The columns of a file of scores that have an entry for each video, and their numpy kinds.
_COLUMNS = {
    "video": "iu", "label": "iub", "is_read": "b", "path": "U", "start_frame": "iu", "end_frame": "iu", "reversed": "b",
    **dict.fromkeys(Region._fields, "iu"),
}  # fmt: skip


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
    """Read two or more runs of the same videos, classes and labels; all get the classes' names, if one has them."""
    runs = [read_run(word) for word in words]
    if len(runs) < 2:
        raise UserError(f"{len(runs)} run: fuse needs two or more")
    for number, run in enumerate(runs):
        if any(run.path.samefile(other.path) for other in runs[:number]):
            raise UserError(f"{run.path}: is given twice; must be the scores of two or more runs")
    for run in runs:
        for clip, following in pairwise(run.clips):
            if clip == following:
                raise UserError(f"{run.path}: has {clip} twice; scores are matched by video, so each may be there once")
    first = next((run for run in runs if run.class_names), runs[0])
    for run in runs:
        check_match(first, run)
    names = [run.name for run in runs]
    unique = [word if names.count(name) > 1 else name for name, word in zip(names, words, strict=True)]
    return [replace(run, name=name, class_names=first.class_names) for run, name in zip(runs, unique, strict=True)]


def read_run(word: str) -> RunScores:
    """Read the scores of the checkpoint that a run's eval.json has last, or a file of scores. Raises UserError."""
    given = Path(word)
    if not given.exists():
        raise UserError(f"{word}: no such file or directory; must be a run folder or an npz of predictions")
    if given.suffix in (".yaml", ".yml"):
        raise UserError(f"{word}: is a spec; its run folder must be given, {load_spec(word).run_path}")
    path = _newest(given) if given.is_dir() else given
    columns = _columns(path)
    cells = (columns[name].tolist() for name in ("path", "start_frame", "end_frame", "reversed", *Region._fields))
    clips = [
        Clip(video, Span(start, end), is_reversed, Region(*region))
        for video, start, end, is_reversed, *region in zip(*cells, strict=True)
    ]
    order = sorted(range(len(clips)), key=clips.__getitem__)
    scores = Scores(*(columns[name][order] for name in ("video", "label", "scores", "is_read")))
    # A logit of -inf is a fused probability of 0.
    broken = np.flatnonzero(scores.is_read & ~(scores.scores < np.inf).all(axis=1))
    if len(broken):
        raise UserError(f"{path}: the scores of {clips[order[broken[0]]]} are not finite; evaluate the run again")
    file = Path(os.path.abspath(path))  # not resolved: the name of a link is the one that the user knows
    name = file.parent.parent.name
    if not given.is_dir():
        name = f"{name}/{path.stem}" if file.parent.name == PREDICTIONS else path.stem
    return RunScores(name, path, tuple(clips[index] for index in order), tuple(columns["class_names"].tolist()), scores)


def _newest(run: Path) -> Path:
    """Return the npz of the checkpoint that the eval.json of a run, or of one of its `evals`, has last."""
    if not any((run / name).is_file() for name in ("spec.yaml", "eval.json")):
        raise UserError(f"{run}: is not a run folder: no spec.yaml found in it")
    try:
        rows = from_json(read_file(run / "eval.json"))["checkpoints"]
        path = run / PREDICTIONS / f"{prediction_names([Path(row['path']) for row in rows])[-1]}.npz"
        problem = "" if path.is_file() else f"has no {PREDICTIONS}/{path.name}"
    except FileNotFoundError:
        problem = "has no predictions"
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        problem = "its eval.json cannot be read"
    if problem:
        raise UserError(f"{run}: {problem}; run `summit-train eval {run}/spec.yaml`")
    return path


def _columns(path: Path) -> dict[str, np.ndarray]:
    """Read a file of scores. Raises UserError where its columns are not all there, or do not fit together."""
    try:
        with open(path, "rb", opener=regular) as content:
            if not zipfile.is_zipfile(content):
                raise ValueError("not an npz")
            with np.load(content, allow_pickle=False) as file:
                columns = dict(file)
        if "scores" not in columns:
            raise UserError(f"{path}: has no scores of classes; fuse combines the scores of classifiers")
        columns = dict.fromkeys(Region._fields, np.zeros_like(columns["video"])) | columns  # older files lack regions
        scores = columns["scores"]
        label = columns["label"]
        names = columns["class_names"]
        if scores.ndim != 2 or scores.dtype.kind != "f" or 0 in scores.shape:
            raise ValueError(f"scores of shape {scores.shape} and type {scores.dtype}")
        if names.ndim != 1 or names.dtype.kind != "U":
            raise ValueError("class_names is not a list of names")
        for name, kinds in _COLUMNS.items():
            column = columns[name]
            # Labels of several classes: whether each is one of the video's.
            shape = scores.shape if name == "label" and column.dtype.kind == "b" else scores.shape[:1]
            if column.shape != shape or column.dtype.kind not in kinds:
                raise ValueError(f"{name} of shape {column.shape} and type {column.dtype} for {len(scores)} videos")
        if label.ndim == 1 and (label.min() < 0 or label.max() >= scores.shape[1]):
            raise ValueError(f"labels from {label.min()} to {label.max()} for {scores.shape[1]} classes")
    except KeyError as error:
        raise UserError(f"{path}: has no column {error}; `summit-train eval` writes the predictions again") from error
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged, or not predictions ({error}); `summit-train eval` writes them") from error
    return columns


def check_classes(first: RunScores, second: RunScores) -> None:
    """Raise UserError where two runs differ in the number of classes, or in their names or order."""
    sizes = [run.scores.scores.shape[1] for run in (first, second)]
    if sizes[0] != sizes[1]:
        raise UserError(f"{first.path} has {sizes[0]} classes and {second.path} has {sizes[1]}; must be the same")
    check_same_classes(first.path, first.class_names, second.path, second.class_names)


def check_match(first: RunScores, second: RunScores) -> None:
    check_classes(first, second)
    if first.clips != second.clips:
        both = set(first.clips) & set(second.clips)
        has, lacks = (first, second) if len(first.clips) > len(both) else (second, first)
        missing = next(clip for clip in has.clips if clip not in both)
        wrong = "are not of the same videos, by path, span, direction and region in their manifests"
        counts = f"of {len(first.clips):,} and {len(second.clips):,} videos {len(both):,} match"
        example = f"{lacks.name} lacks {missing}, and has {lacks.clips[0]}"
        raise UserError(f"{first.path} and {second.path} {wrong}: {counts}; {example}")
    if first.scores.kind != second.scores.kind:
        raise UserError(f"{first.path} is of loss.kind {first.scores.kind} and {second.path} of {second.scores.kind}")
    differs = np.flatnonzero((first.scores.hot != second.scores.hot).any(1))
    if len(differs):
        classes = (np.flatnonzero(run.scores.hot[differs[0]]).tolist() for run in (first, second))
        labels = [", ".join(map(str, numbers)) or "none" for numbers in classes]
        wrong = f"is class {labels[0]} in {first.path} and {labels[1]} in {second.path}"
        many = f"{len(differs):,} of {len(first.clips):,} videos differ"
        raise UserError(f"{first.clips[int(differs[0])]}: {wrong} ({many}); must be runs of one manifest")


def parse_weights(text: str | None, num_runs: int) -> tuple[float, ...]:
    """Read '1,1.5'; None: equal weights. Raises UserError unless there is one for each run, none below 0, not all 0."""
    if text is None:
        return (1.0,) * num_runs
    try:
        weights = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise UserError(f"--weights must be numbers with commas, such as 1,1.5, got {text}") from None
    if len(weights) != num_runs:
        raise UserError(f"--weights must be one for each of the {num_runs} runs in their order, got {text}")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise UserError(f"--weights must be finite, 0 or more, and one above 0, got {text}")
    return weights


def fuse(runs: Sequence[RunScores], weights: Sequence[float], *, softmax: bool) -> Scores:
    """Return sum_i w_i s_i / sum_i w_i of each video. A run of weight 0 adds nothing, not even its bad videos.

    s_i: the probabilities (of loss.kind binary those of each class alone), or without `softmax` the logits.
    """
    added = np.zeros(runs[0].scores.scores.shape)
    is_read = np.ones(len(runs[0].clips), np.bool_)
    for run, weight in zip(runs, weights, strict=True):
        if weight:
            logits = run.scores.scores.astype(np.float64)
            added += weight * (probabilities(logits, run.scores.kind) if softmax else logits)
            is_read &= run.scores.is_read
    return replace(runs[0].scores, scores=added / sum(weights), is_read=is_read)


def fused_values(runs: Sequence[RunScores], weights: Sequence[float], fused: Scores) -> dict[str, Any]:
    """Return the measures of fused scores and of each run, in percent, and by how much each class gains, in points.

    best: the run of the highest main measure, the first of equal ones; gains are those over it.
    """
    measures = measures_of(fused.kind)
    names = runs[0].class_names
    main = measures.main
    best = max(runs, key=lambda run: main.of(run.scores))
    counts = fused.hot.sum(0).tolist()
    by_fused, by_best = (main.of_class(scores).tolist() for scores in (fused, best.scores))
    return measures.values(fused) | {
        "videos": len(fused.videos),
        "bad_videos": fused.num_bad,
        "matched_by": "path, span, direction and region",
        "best": best.name,
        "gain": main.of(fused) - main.of(best.scores),
        "runs": [
            {"name": run.name, "predictions": str(run.path), "weight": weight}
            | measures.values(run.scores)
            | {"bad_videos": run.scores.num_bad}
            for run, weight in zip(runs, weights, strict=True)
        ],
        "classes": [
            {"label": label, "name": names[label] if label < len(names) else str(label), "videos": int(count)}
            | {main.class_key: after, f"best_{main.class_key}": before, "gain": after - before}
            for label, (count, after, before) in enumerate(zip(counts, by_fused, by_best, strict=True))
            if count
        ],
    }
