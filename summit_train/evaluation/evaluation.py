"""The accuracy of a run's checkpoints: the mean and the deviation over them, with the views of the spec."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from summit_train.core.comm import World
from summit_train.core.files import read_file, write_json
from summit_train.core.result import TextTable
from summit_train.core.run_folder import digest_path
from summit_train.core.saved import bound_of, give_weights, load_checkpoint, unmapped
from summit_train.core.text import counted, percent
from summit_train.core.watch import StopRequest, Watchdog, leave_if_asked
from summit_train.data.dataset import Dataset
from summit_train.data.manifest.reading import check_same_classes
from summit_train.evaluation.confusion import class_rows
from summit_train.evaluation.measures import Measures, interval, left_out, measures_of, say_certainty, say_left_out
from summit_train.evaluation.precise_bn import recompute_from_training
from summit_train.evaluation.scores import PREDICTIONS, Scored, prediction_names
from summit_train.evaluation.scoring import PartialScores, Scorer, VideoScorer
from summit_train.models import VideoNetwork
from summit_train.models.by_name import freeze_by_name
from summit_train.models.foreign import check_sources
from summit_train.plan import Plan
from summit_train.spec import Spec

RESULT_FILE = "eval.json"
EVALS = "evals"  # folder of a run: a folder for each result by other keys or of other checkpoints
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Evaluation:
    """Scores checkpoints, and writes their scores and the result, eval.json, into `folder`.

    folder: the run's own for the result by its own spec, otherwise one in its `evals`. training: the plan and the data
    set of precise BN's batches; None where evaluate.precise_bn is 0. overrides: the keys of the spec that differ from
    the run's own. resume_key: everything besides a checkpoint that its scores depend on; one with the same key reuses
    the scores of a stopped one. None: nothing is kept. goodput: rank 0's values of the training for the result.
    """

    scorer: VideoScorer[Scored]
    watchdog: Watchdog
    folder: Path
    measures: Measures
    training: tuple[Plan, Dataset] | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    resume_key: str | None = None
    goodput: Mapping[str, Any] = field(default_factory=dict)

    def score_checkpoints(self, model: VideoNetwork, paths: Sequence[Path]) -> dict[str, Any] | None:
        """Score the checkpoints with the spec's views; return the result on rank 0, None elsewhere. Collective.

        Source: the paper, section 4.1: mean and standard deviation over the last checkpoints. It does not say which
        deviation; here n - 1, as over seeds and folds. The averages of the weights that the checkpoints hold are
        scored, too ("ema").
        """
        spec = self.scorer.spec
        world = self.scorer.world
        rows: list[dict[str, Any]] = []
        averages: list[dict[str, Any]] = []  # of the same checkpoints' averaged weights
        num_videos = 0
        missing = list[str]()
        of_last: Scored | None = None  # the last checkpoint's
        names = self.scorer.dataset.manifest.class_names
        for path, name in zip(paths, prediction_names(paths), strict=True):
            last, average, step = read_weights(self.scorer, model, path)
            if self.training is not None:  # which normalisations were trained decides which statistics are recomputed
                freeze_by_name(model, max(0, step - 1) // self.training[0].steps_per_epoch)
            for weights, results, suffix in ((last, rows, ""), (average, averages, "_ema")):
                if weights is None:
                    continue
                world.together(partial(give_weights, model, path, weights))
                scores, values = self._score(model, path, f"{name}{suffix}")
                if scores is not None:
                    bad = {"bad_videos": scores.num_bad} if scores.num_bad else {}
                    results.append({"path": str(path), "step": step} | values | bad)
                    num_videos = len(scores.videos)
                    missing = left_out(scores, names)
                    of_last = of_last if suffix else scores
        if world.rank != 0:
            return None
        result = summarise(rows, spec, num_videos) | {"overrides": dict(self.overrides)} | dict(self.goodput)
        if self.training is not None:
            result["precise_bn"] = spec.evaluate.precise_bn
        if missing:
            result["classes_left_out"] = missing
        if of_last is not None and (classes := self.measures.classes(of_last, names)):
            result["classes"] = classes
        if averages:
            result["ema"] = summarise(averages, spec, num_videos)
        write_json(self.folder / RESULT_FILE, result)
        return result

    def _score(self, model: VideoNetwork, path: Path, name: str) -> tuple[Scored | None, dict[str, Any]]:
        scorer = self.scorer
        dataset = scorer.dataset
        folder = self.folder / PREDICTIONS
        known = PartialScores()
        if self.resume_key is not None and scorer.world.rank == 0:
            key = f"{self.resume_key} {read_file(digest_path(path)).decode()}"
            known = PartialScores(folder / f"{name}.partial", key)
        is_scored = scorer.world.broadcast(len(known.results) == len(dataset))
        leave_if_asked(scorer.world, scorer.stop)
        if self.training is not None and not is_scored:
            recompute_from_training(model, scorer, *self.training, self.watchdog)

        def progress(done: int, total: int) -> None:
            self.watchdog.at(f"evaluating video {done} of {total} with {path}", waits=done == total)

        scores = scorer.score(model, progress, source=str(path), earlier=known)
        if scores is not None:
            clips = [dataset.manifest.clip(video) for video in scores.videos.tolist()]
            scores.save(folder / f"{name}.npz", clips, dataset.manifest.classes or ())

        def values() -> dict[str, Any]:
            if scores is None:  # not rank 0
                return {}
            return self.measures.values(scores) | self.measures.macro(scores)

        return scores, scorer.world.together(values)


def build_scorer(
    spec: Spec, dataset: Dataset, world: World, device: torch.device, stop: StopRequest
) -> VideoScorer[Scored]:
    """Build the scorer of the spec's task for a data set."""
    if spec.task == "detection":
        from summit_train.tasks.detection.scoring import DetectionScorer

        return DetectionScorer(spec, dataset, world, device, stop)
    return Scorer(spec, dataset, world, device, stop)


def read_weights(scorer: VideoScorer[Scored], model: VideoNetwork, path: Path) -> tuple[Tensors, Tensors | None, int]:
    """Return the weights of a checkpoint, their average if it holds one, and its step. Rank 0 reads. Collective.

    Raises UserError if its class names differ from those of the data set.
    """
    manifest = scorer.dataset.manifest

    def read() -> tuple[Tensors, Tensors | None, int]:
        state = load_checkpoint(path, bound_of(model))
        check_sources(path, state, model.sources)
        if isinstance(names := state.get("classes"), list):
            check_same_classes(path, map(str, names), manifest.source, manifest.classes)
        average = unmapped(state["ema"]["model"]) if "ema" in state else None
        return unmapped(state["model"]), average, state["step"]

    return scorer.world.from_first(read)


def summarise(rows: Sequence[dict[str, Any]], spec: Spec, num_videos: int) -> dict[str, Any]:
    """Return the content of eval.json: mean and standard deviation (n - 1) over the checkpoints' measures, in percent.

    The mean is as the paper computes it. Last and best of the main measure are those of one checkpoint. None: the
    videos say nothing about a measure, or the deviation of one checkpoint. top1_interval: of the mean, over the videos.
    """
    measures = measures_of(spec.loss.base, own=spec.evaluate.own_names)
    result: dict[str, Any] = {}
    for key in (measure.key for measure in measures.every):
        values = [row[key] for row in rows]
        numbers = [value for value in values if value is not None]
        is_known = bool(numbers) and numbers == values
        result[f"{key}_mean"] = statistics.fmean(numbers) if is_known else None
        result[f"{key}_std"] = statistics.stdev(numbers) if is_known and len(numbers) > 1 else None
        if key == measures.main.key:
            result[f"{key}_last"] = values[-1]
            result[f"{key}_best"] = max(numbers, default=None)
    if measures.main.key == "top1" and result["top1_mean"] is not None:
        result["top1_interval"] = interval(result["top1_mean"], num_videos)
    for key in ("top1_macro", "top1_macro_f1"):
        if macros := [row[key] for row in rows if key in row]:
            result[f"{key}_mean"] = statistics.fmean(macros)
    return result | {
        "videos": num_videos,
        "mode": spec.evaluate.mode,
        "clips": spec.evaluate.clips if spec.evaluate.mode == "clips" else None,
        "crops": spec.evaluate.crops,
        "checkpoints": list(rows),
    }


def accuracy_text(result: dict[str, Any], measures: Measures) -> list[str | TextTable]:
    """Return the content of eval.json for people, a line each, and the table of the classes."""
    lines = _mean_text(result, measures)
    if "ema" in result:
        lines += [f"average of the weights: {line}" for line in _mean_text(result["ema"], measures)]
    rows = class_rows(result.get("classes", ()))
    known = [one for one in result.get("classes", ()) if one["videos"]]
    lowest = f", the {len(rows)} of the lowest recall" if len(known) > len(rows) else ""
    table = TextTable([(f"class{lowest}", "videos", "precision", "F1", "recall"), *rows])
    return [*lines, *_videos_text(result), *([table] if rows else [])]


def _mean_text(result: dict[str, Any], measures: Measures) -> list[str]:
    """Return the mean over the checkpoints, and of several the last and the best, a line each."""
    rows = result["checkpoints"]
    main = measures.main
    if len(rows) == 1:
        return [f"{measures.text(result)}: 1 checkpoint"]
    what = "mean" if result[f"{main.key}_std"] is None else "mean and standard deviation (n - 1)"
    best = max(rows, key=lambda row: -math.inf if row[main.key] is None else row[main.key])
    return [
        f"{measures.text(result)}: {what} over {len(rows)} checkpoints",
        f"{main.name} {percent(result[f'{main.key}_last'])}: last checkpoint",
        f"{main.name} {percent(best[main.key])}: best checkpoint, step {best['step']}",
    ]


def _videos_text(result: dict[str, Any]) -> list[str]:
    """Return which videos the scores are of, in which views, and what they leave out, a line each."""
    clips = "all frames streamed" if result["mode"] == "stream" else counted(result["clips"], "clip")
    crops = "the full frame" if result["crops"] == "full" else counted(result["crops"], "crop")
    lines = [f"{counted(result['videos'], 'video')}, {clips} x {crops}"]
    lines += say_certainty(result.get("top1_interval"), result.get("top1_macro_mean"), result.get("top1_macro_f1_mean"))
    if bad := max((checkpoint.get("bad_videos", 0) for checkpoint in result["checkpoints"]), default=0):
        lines.append(f"{counted(bad, 'unreadable video')}, counted as wrong")
    if "precise_bn" in result:
        lines.append(f"BN's statistics of {counted(result['precise_bn'], 'training step')}")
    return [*lines, *filter(None, [say_left_out(result.get("classes_left_out", ()))])]
