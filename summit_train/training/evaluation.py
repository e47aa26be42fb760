"""Evaluation: every video once, whatever the number of ranks, its views' logits averaged."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from summit_train.comm import World
from summit_train.data.batches.loader import BadClip, test_batches
from summit_train.data.batches.store import open_store
from summit_train.data.manifest import Manifest
from summit_train.data.manifest.quarantine import Kept, kept_clips
from summit_train.files import replacing, write_json
from summit_train.spec import Spec
from summit_train.training.bad_clips import check_test
from summit_train.training.checkpoint import load_checkpoint
from summit_train.training.step import AUTOCAST, Normalise, parameter_type

# Views that go through the network at once: bounds memory at 30 views of 256^2 without splitting a common case.
_VIEWS_AT_ONCE = 16

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Scores:
    """The averaged logits of the videos of a manifest, in its order: scores (videos, classes), labels (videos,).

    videos: their places in the manifest. A video that could not be read has NaN for scores, and counts as wrong.
    """

    videos: np.ndarray
    labels: np.ndarray
    scores: np.ndarray

    @property
    def num_bad(self) -> int:
        """How many videos could not be read."""
        return int(np.isnan(self.scores[:, 0]).sum())

    def top(self, k: int) -> float:
        """Percent of the videos whose label is among the k highest scores.

        Equal scores are ordered by class number, so the figure is a function of the scores and of nothing else.
        """
        own = np.take_along_axis(self.scores, self.labels[:, None], axis=1)
        classes = np.arange(self.scores.shape[1])[None, :]
        ahead = (self.scores > own) | ((self.scores == own) & (classes < self.labels[:, None]))
        is_right = (ahead.sum(axis=1) < k) & ~np.isnan(own[:, 0])
        return 100.0 * float(np.mean(is_right))

    def save(self, path: Path) -> None:
        """Write video, label and scores as npz, whole or not at all; `np.load` needs no pickle for it."""
        with replacing(path) as file:
            np.savez_compressed(file, video=self.videos, label=self.labels, scores=self.scores)


def evaluate(
    model: nn.Module,
    spec: Spec,
    manifest: Manifest,
    world: World,
    device: torch.device,
    *,
    clips: int,
    crops: int | str,
    progress: Progress | None = None,
) -> Scores | None:
    """Score every video of `manifest` with `clips` x `crops` views each; the Scores on rank 0, None elsewhere.

    Rank r takes the videos r, r + ranks, ... of those that data.quarantine leaves: none is padded or taken twice. A
    video's views form a batch of their own, so its scores do not depend on which others its rank has. With
    data.on_bad_clip "skip" a video that cannot be read is counted and written down; raises AgreedError where they are
    too many.
    """
    kept = kept_clips(spec.data, manifest)
    mine = kept.ids(np.arange(world.rank, len(kept), world.size))
    videos: list[int] = []
    scores: list[np.ndarray] = []
    bad: list[BadClip] = []
    was_training = model.training
    model.eval()
    normalise = Normalise(parameter_type(spec.precision), device)
    autocast = AUTOCAST.get(spec.precision)
    context = torch.autocast(device.type, autocast) if autocast else contextlib.nullcontext()
    with torch.inference_mode(), context:
        store = open_store(spec.data, manifest)
        for batch in test_batches(spec.data, spec.evaluate, store, mine.tolist(), clips=clips, crops=crops):
            videos.append(batch.video)
            if batch.bad is not None:
                bad.append(batch.bad)
                scores.append(np.full(spec.model.num_classes, np.nan))
                continue
            parts = [model(normalise(part)) for part in torch.split(batch.views, _VIEWS_AT_ONCE)]
            scores.append(torch.cat(parts).double().mean(0).cpu().numpy())
            if progress is not None:
                progress(len(videos), len(mine))
    model.train(was_training)
    if spec.data.on_bad_clip == "skip":
        check_test(world, spec.run_path, bad, len(kept), spec.data.max_bad_fraction)
    gathered = world.gather((videos, scores))
    return None if gathered is None else _in_order(gathered, manifest, kept)


def _in_order(gathered: Sequence[tuple[list[int], list[np.ndarray]]], manifest: Manifest, kept: Kept) -> Scores:
    by_video = {video: score for videos, scores in gathered for video, score in zip(videos, scores, strict=True)}
    assert sum(len(videos) for videos, _ in gathered) == len(by_video) == len(kept), "each video exactly once"
    videos = kept.ids(np.arange(len(kept)))
    labels = manifest.labels[videos].astype(np.int64)
    return Scores(videos, labels, np.stack([by_video[video] for video in videos.tolist()]).astype(np.float32))


def evaluate_checkpoints(
    model: nn.Module,
    spec: Spec,
    manifest: Manifest,
    world: World,
    device: torch.device,
    paths: Sequence[Path],
    progress: Callable[[Path], Progress | None] = lambda path: None,
) -> dict[str, Any] | None:
    """Evaluate each checkpoint with the spec's views; on rank 0 also write predictions/*.npz and eval.json.

    Source: the paper, section 4.1: mean and standard deviation (of the population) over the last checkpoints. Returns
    what eval.json holds, on rank 0.
    """
    rows: list[dict[str, Any]] = []
    num_videos = 0
    for path, name in zip(paths, _prediction_names(paths), strict=True):
        weights, step = world.broadcast(_weights(path) if world.rank == 0 else ({}, 0))
        model.load_state_dict(weights)
        settings = spec.evaluate
        scores = evaluate(
            model, spec, manifest, world, device, clips=settings.clips, crops=settings.crops, progress=progress(path)
        )
        if scores is not None:
            scores.save(spec.run_path / "predictions" / name)
            row = {"path": str(path), "step": step, "top1": scores.top(1), "top5": scores.top(5)}
            rows.append(row | ({"bad_videos": scores.num_bad} if scores.num_bad else {}))
            num_videos = len(scores.videos)
    if world.rank != 0:
        return None
    result = summarise(rows, spec, num_videos)
    write_json(spec.run_path / "eval.json", result)
    return result


def _prediction_names(paths: Sequence[Path]) -> list[str]:
    """A file name for each checkpoint's scores; checkpoints of one name, from several folders, are numbered."""
    stems = [path.stem for path in paths]
    return [
        f"{stem}.npz" if stems.count(stem) == 1 else f"{stem}_{stems[: place + 1].count(stem)}.npz"
        for place, stem in enumerate(stems)
    ]


def _weights(path: Path) -> tuple[dict[str, torch.Tensor], int]:
    """A checkpoint's model and step; the other ranks have no use for the optimizer's state, which is as large."""
    state = load_checkpoint(path)
    return state["model"], int(state["step"])


def summarise(rows: Sequence[dict[str, Any]], spec: Spec, num_videos: int) -> dict[str, Any]:
    """Mean and standard deviation over the checkpoints' accuracies, in percent."""
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
