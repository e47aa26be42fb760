"""Score every video once, whatever the number of ranks, by the average of its views' logits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from summit_train.comm import World
from summit_train.data.batches.loader import BadClip, open_store, test_batches
from summit_train.data.manifest import Manifest
from summit_train.data.manifest.quarantine import Kept, kept_clips
from summit_train.files import replacing, write_json
from summit_train.models import VideoNetwork
from summit_train.spec import Spec
from summit_train.text import has_top5
from summit_train.training.bad_clips import check_test
from summit_train.training.checkpoint import load_checkpoint
from summit_train.training.step import Normalise, mixed_precision, parameter_type

# Bounds the memory of 30 views of 256^2 without splitting a common case.
_VIEWS_AT_ONCE = 16

Progress = Callable[[int, int], None]  # (videos done, videos of this rank)


@dataclass(frozen=True)
class Scores:
    """The averaged logits of a manifest's videos, in its order.

    videos (V,): their places in the manifest; labels (V,); scores (V, classes). A video that could not be read has NaN
    scores and counts as wrong.
    """

    videos: np.ndarray
    labels: np.ndarray
    scores: np.ndarray

    @property
    def num_bad(self) -> int:
        """Return the number of videos that could not be read."""
        return int(np.isnan(self.scores[:, 0]).sum())

    def top(self, k: int) -> float:
        """Return the percentage of the videos whose label is among the k highest scores.

        Equal scores are ordered by class number, so the figure depends on nothing but the scores.
        """
        own = np.take_along_axis(self.scores, self.labels[:, None], axis=1)
        classes = np.arange(self.scores.shape[1])[None, :]
        ahead = (self.scores > own) | ((self.scores == own) & (classes < self.labels[:, None]))
        is_right = (ahead.sum(axis=1) < k) & ~np.isnan(own[:, 0])
        return 100.0 * float(np.mean(is_right))

    def save(self, path: Path) -> None:
        """Write video, label and scores as npz, whole or not at all. `np.load` reads it without pickle."""
        with replacing(path) as file:
            np.savez_compressed(file, video=self.videos, label=self.labels, scores=self.scores)


@dataclass(frozen=True)
class Evaluation:
    """Scores a manifest's videos on all ranks: rank r those at r, r + ranks, ... of what data.quarantine leaves.

    No video is padded or scored twice. A video's views form batches of their own, so its scores do not depend on the
    number of ranks. prepare: done to a checkpoint's network before it is scored, as precise_bn.preparation.
    """

    spec: Spec
    manifest: Manifest
    world: World
    device: torch.device
    prepare: Callable[[VideoNetwork], None] | None = None

    def score(
        self, model: nn.Module, clips: int, crops: int | str, progress: Progress = lambda done, total: None
    ) -> Scores | None:
        """Score every video with `clips` x `crops` views; return the Scores on rank 0, None elsewhere. Collective.

        With data.on_bad_clip "skip" a video that cannot be read is counted and written down. Raises AgreedError if
        there are too many, UserError at the first one otherwise.
        """
        data = self.spec.data
        kept = kept_clips(data, self.manifest)
        mine = kept.ids(np.arange(self.world.rank, len(kept), self.world.size)).tolist()
        scores: list[np.ndarray] = []
        bad: list[BadClip] = []
        was_training = model.training
        model.eval()
        normalise = Normalise(parameter_type(self.spec.precision), self.device)
        with torch.inference_mode(), mixed_precision(self.spec.precision, self.device):
            store = open_store(data, self.manifest)
            evaluate = self.spec.evaluate.model_copy(update={"clips": clips, "crops": crops})
            for batch in test_batches(data, evaluate, store, mine):
                if batch.bad is None:
                    parts = [model(normalise(part)) for part in torch.split(batch.views, _VIEWS_AT_ONCE)]
                    scores.append(torch.cat(parts).double().mean(0).cpu().numpy())
                else:
                    bad.append(batch.bad)
                    scores.append(np.full(self.spec.model.num_classes, np.nan))
                assert batch.video == mine[len(scores) - 1]
                progress(len(scores), len(mine))
        model.train(was_training)
        if data.on_bad_clip == "skip":
            check_test(self.world, self.spec.run_path, bad, len(kept), data.max_bad_fraction)
        gathered = self.world.gather((mine, scores))
        return None if gathered is None else self._in_order(gathered, kept)

    def _in_order(self, gathered: Sequence[tuple[list[int], list[np.ndarray]]], kept: Kept) -> Scores:
        by_video = {video: score for videos, scores in gathered for video, score in zip(videos, scores, strict=True)}
        assert sum(len(videos) for videos, _ in gathered) == len(by_video) == len(kept), "each video exactly once"
        videos = kept.ids(np.arange(len(kept)))
        labels = self.manifest.labels[videos].astype(np.int64)
        return Scores(videos, labels, np.stack([by_video[video] for video in videos.tolist()]).astype(np.float32))

    def score_checkpoints(
        self, model: VideoNetwork, paths: Sequence[Path], progress: Callable[[Path], Progress]
    ) -> dict[str, Any] | None:
        """Score the checkpoints with the spec's views; on rank 0 write predictions/*.npz and eval.json. Collective.

        Source: the paper, section 4.1: mean and standard deviation (of the population) over the last checkpoints.
        The averages of the weights that the checkpoints hold are scored beside them ("ema"). Returns the content of
        eval.json on rank 0, None elsewhere.
        """
        rows: list[dict[str, Any]] = []
        averages: list[dict[str, Any]] = []  # of the same checkpoints' averaged weights
        num_videos = 0
        for path, name in zip(paths, _prediction_names(paths), strict=True):
            state = load_checkpoint(path) if self.world.rank == 0 else {}
            # The optimizer's state, which is as large as the weights, is of no use here.
            average = state.get("ema", {}).get("model")
            weights, average, step = self.world.broadcast((state.get("model", {}), average, state.get("step", 0)))
            for found, kind, suffix in ((weights, rows, ""), (average, averages, "_ema")):
                if found is not None:
                    model.load_state_dict(found)
                    scores = self._score_saved(model, f"{name}{suffix}.npz", progress(path))
                    if scores is not None:
                        kind.append({"path": str(path), "step": step} | _accuracy_of(scores))
                        num_videos = len(scores.videos)
        if self.world.rank != 0:
            return None
        result = summarise(rows, self.spec, num_videos)
        if self.prepare is not None:
            result["precise_bn"] = self.spec.evaluate.precise_bn
        if averages:
            result["ema"] = summarise(averages, self.spec, num_videos)
        write_json(self.spec.run_path / "eval.json", result)
        return result

    def _score_saved(self, model: VideoNetwork, name: str, progress: Progress) -> Scores | None:
        """Score with the spec's views; rank 0 writes predictions/`name` and returns the Scores."""
        if self.prepare is not None:
            self.prepare(model)
        scores = self.score(model, self.spec.evaluate.clips, self.spec.evaluate.crops, progress)
        if scores is not None:
            scores.save(self.spec.run_path / "predictions" / name)
        return scores


def show_accuracy(top1: str, top5: float, num_classes: int) -> str:
    """Return the accuracies for people. Top-5 is left out where every class is among the five."""
    return f"top-1 {top1} %" + (f"  top-5 {top5:.2f} %" if has_top5(num_classes) else "")


def _accuracy_of(scores: Scores) -> dict[str, Any]:
    bad = {"bad_videos": scores.num_bad} if scores.num_bad else {}
    return {"top1": scores.top(1), "top5": scores.top(5)} | bad


def _prediction_names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each checkpoint's scores. Checkpoints of one name, from several folders, are numbered."""
    stems = [path.stem for path in paths]
    return [
        stem if stems.count(stem) == 1 else f"{stem}_{stems[: place + 1].count(stem)}"
        for place, stem in enumerate(stems)
    ]


def summarise(rows: Sequence[dict[str, Any]], spec: Spec, num_videos: int) -> dict[str, Any]:
    """Return the content of eval.json: mean and standard deviation over the checkpoints' accuracies, in percent."""
    return {
        "top1_mean": statistics.fmean(row["top1"] for row in rows),
        "top1_std": statistics.pstdev(row["top1"] for row in rows),
        "top5_mean": statistics.fmean(row["top5"] for row in rows),
        "top5_std": statistics.pstdev(row["top5"] for row in rows),
        "videos": num_videos,
        "clips": spec.evaluate.clips,
        "crops": spec.evaluate.crops,
        "checkpoints": list(rows),
    }
