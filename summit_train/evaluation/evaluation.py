"""The accuracy of a network on a manifest's videos, and of a run's checkpoints."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from summit_train.core.comm import World
from summit_train.core.errors import RunFailed
from summit_train.core.files import write_json
from summit_train.core.saved import CheckpointError, bound_of, digest_path, give_weights, load_checkpoint
from summit_train.core.text import has_top5
from summit_train.core.watch import StopRequest, leave_if_asked
from summit_train.data.bad_clips import check_test, record_test
from summit_train.data.batches.loader import BadClip
from summit_train.data.batches.stores import open_store
from summit_train.data.manifest import Manifest
from summit_train.data.manifest.clip import clip_of
from summit_train.data.manifest.quarantine import kept_clips
from summit_train.evaluation.scores import PREDICTIONS, Scores, prediction_names
from summit_train.evaluation.scoring import Progress, Results, Scorer
from summit_train.evaluation.so_far import SoFar, so_far_path
from summit_train.models import VideoNetwork
from summit_train.spec import Spec

OFFICIAL = "eval"  # the result by the run's own spec


# Keys below `data`, `evaluate` and `model` that change no score: where data come from, how fast, and when.
_NO_SCORE = {
    "data.root",
    "data.stage",
    "data.workers",
    "data.clip_seconds",
    "evaluate.every_epochs",
    "model.pretrained",
}


def changes_scores(spec: Spec, key: str) -> bool:
    """Return whether another value of a key, `section.key`, can change the scores of a checkpoint."""
    if key in _NO_SCORE:
        return False
    if key.startswith(("data.train", "seed", "scale.")):  # what precise BN trains on
        return spec.evaluate.precise_bn > 0
    return key.startswith(("data.", "evaluate.", "model.", "precision"))


@dataclass(frozen=True)
class Evaluation:
    """Scores a manifest's videos on all ranks, as `Scorer` does: those that data.quarantine leaves.

    prepare: called on a checkpoint's network before it is scored, as precise_bn.preparation. overrides: the keys of
    the spec that differ from the run's own. name: of the result, NAME.json in the run's directory. stop: asks all ranks
    to leave between two videos with Stopped. resume_key: everything besides a checkpoint that its scores depend on; an
    evaluation with the same key reuses the scores of a stopped one. None: nothing is kept.
    """

    spec: Spec
    manifest: Manifest
    world: World
    device: torch.device
    prepare: Callable[[VideoNetwork], None] | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    name: str = OFFICIAL
    stop: StopRequest = field(default_factory=StopRequest)
    resume_key: str | None = None

    @property
    def predictions(self) -> Path:
        """Return the folder of the scores: a separate one for a result other than the run's own."""
        folder = self.spec.run_path / PREDICTIONS
        return folder if self.name == OFFICIAL else folder / self.name

    def score(
        self,
        model: nn.Module,
        clips: int,
        crops: int | str,
        progress: Progress = lambda done, total: None,
        source: str = "the network",
        so_far: SoFar | None = None,
    ) -> Scores | None:
        """Score every video with `clips` x `crops` views; return the Scores on rank 0, None elsewhere. Collective.

        With evaluate.mode "stream" all frames are streamed in `crops` crops, and `clips` is not read.
        With data.on_bad_clip "skip" a video that cannot be read is counted and written down. Raises AgreedError if
        there are too many, DecodeError at the first one otherwise, and RunFailed, with `source`, at the first scores
        that are not finite.
        """
        settings = self.spec.evaluate.model_copy(update={"clips": clips, "crops": crops})
        scorer = Scorer(self.spec.model_copy(update={"evaluate": settings}), self.world, self.device)
        results = scorer.results(model, open_store(self.spec.data, self.manifest))

        def checked(videos: Sequence[int]) -> Iterator[NDArray[np.float64] | BadClip]:
            for video, found in zip(videos, results(videos), strict=True):
                if not isinstance(found, BadClip):
                    self.check_finite(found, video, source)
                yield found

        return self.gathered(model, checked, (self.spec.model.num_classes,), progress, so_far)

    def check_finite(self, scores: NDArray[np.float64], video: int, source: str) -> None:
        """Raise RunFailed, with the name of their source, if a video's scores are not finite."""
        if not np.isfinite(scores).all():
            raise RunFailed(f"{source}: scores are not finite, those of {self.manifest.path(video)} the first")

    def gathered(
        self,
        model: nn.Module,
        results: Results,
        shape: tuple[int, ...],
        progress: Progress,
        so_far: SoFar | None = None,
    ) -> Scores | None:
        """Return the results of all ranks' videos, each an array of `shape`, in the manifest's order. Collective.

        results: gives those of some videos, in their order, while `model` is in evaluation mode.
        """
        data, kept = self.spec.data, kept_clips(self.spec.data, self.manifest)
        scorer = Scorer(self.spec, self.world, self.device, self.stop)
        so_far = so_far or SoFar()
        num_known = len(so_far.bad)
        try:
            scored = scorer.gathered(model, results, shape, kept, progress, so_far)
        finally:  # where a request stops it too: the evaluation that resumes knows them
            record_test(self.spec.run_path, so_far.bad[num_known:])
        if data.on_bad_clip == "skip":
            check_test(self.world, self.spec.run_path, len(so_far.bad), len(kept), data.max_bad_fraction)
        if scored is None:
            return None
        videos = kept.ids(np.arange(len(kept)))
        is_read = ~np.isin(videos, [clip.clip for clip in scored.bad])
        return Scores(videos, self.manifest.labels[videos].astype(np.int64), scored.scores, is_read)

    def load(self, model: nn.Module, path: Path) -> int:
        """Give `model` the weights of a checkpoint, which rank 0 reads, and return its step. Collective."""
        weights, _, step = self._saved(model, path)
        self.world.together(lambda: give_weights(model, path, weights))
        return step

    def _saved(
        self, model: nn.Module, path: Path
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor] | None, int]:
        """Return the weights of a checkpoint, their average if it holds one, and its step. Collective."""

        def read() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor] | None, int]:
            state = load_checkpoint(path, bound_of(model))
            self._check_classes(path, state.get("classes"))
            # The optimizer's state, which is as large as the weights, is of no use here.
            return state["model"], state.get("ema", {}).get("model"), state["step"]

        return self.world.from_first(read)

    def _check_classes(self, path: Path, names: Any) -> None:
        """Raise CheckpointError if a network's class names differ from the manifest's."""
        ours = self.manifest.classes
        if not isinstance(names, list) or ours is None or ours == tuple(names):
            return
        differing = sorted(set(ours) ^ set(map(str, names))) or ["only in their order"]
        raise CheckpointError(
            f"{path} and {self.manifest.source} do not have the same classes, so their labels mean different things: "
            f"they differ in {', '.join(map(repr, differing[:5]))}"
        )

    def score_checkpoints(
        self, model: VideoNetwork, paths: Sequence[Path], progress: Callable[[Path], Progress]
    ) -> dict[str, Any] | None:
        """Score the checkpoints with the spec's views; on rank 0 write their npz and the result. Collective.

        Source: the paper, section 4.1: mean and standard deviation (of the population) over the last checkpoints.
        The averages of the weights that the checkpoints hold are scored, too ("ema"). Returns the result on rank
        0, None elsewhere.
        """
        rows: list[dict[str, Any]] = []
        averages: list[dict[str, Any]] = []  # of the same checkpoints' averaged weights
        num_videos = 0
        for path, name in zip(paths, prediction_names(paths), strict=True):
            weights, average, step = self._saved(model, path)
            for found, kind, suffix in ((weights, rows, ""), (average, averages, "_ema")):
                if found is not None:
                    self.world.together(partial(give_weights, model, path, found))
                    scores = self._score_saved(model, path, f"{name}{suffix}", progress(path))
                    if scores is not None:
                        kind.append({"path": str(path), "step": step} | _accuracy_of(scores))
                        num_videos = len(scores.videos)
        if self.world.rank != 0:
            return None
        result = summarise(rows, self.spec, num_videos) | {"overrides": dict(self.overrides)}
        if self.prepare is not None:
            result["precise_bn"] = self.spec.evaluate.precise_bn
        if averages:
            result["ema"] = summarise(averages, self.spec, num_videos)
        write_json(self.spec.run_path / f"{self.name}.json", result)
        return result

    def _score_saved(self, model: VideoNetwork, path: Path, name: str, progress: Progress) -> Scores | None:
        """Score with the spec's views; rank 0 writes predictions/`name`.npz and returns the Scores.

        path: the checkpoint that the weights of `model` are of.
        """
        so_far = SoFar()
        if self.resume_key is not None and self.world.rank == 0:
            key = f"{self.resume_key} {digest_path(path).read_text()}"
            so_far = SoFar(so_far_path(self.spec.run_path, name), key)
        is_scored = self.world.broadcast(len(so_far.results) == len(kept_clips(self.spec.data, self.manifest)))
        leave_if_asked(self.world, self.stop)
        if self.prepare is not None and not is_scored:
            self.prepare(model)
        scores = self.score(model, self.spec.evaluate.clips, self.spec.evaluate.crops, progress, str(path), so_far)
        if scores is not None:
            clips = [clip_of(self.manifest, video) for video in scores.videos.tolist()]
            scores.save(self.predictions / f"{name}.npz", clips, self.manifest.classes or ())
        return scores


def show_accuracy(top1: str, top5: float, num_classes: int) -> str:
    """Return the accuracies for people. Top-5 is left out where every class is among the five."""
    return f"top-1 {top1} %" + (f"  top-5 {top5:.2f} %" if has_top5(num_classes) else "")


def _accuracy_of(scores: Scores) -> dict[str, Any]:
    bad = {"bad_videos": scores.num_bad} if scores.num_bad else {}
    return {"top1": scores.top(1), "top5": scores.top(5)} | bad


def summarise(rows: Sequence[dict[str, Any]], spec: Spec, num_videos: int) -> dict[str, Any]:
    """Return the content of eval.json: mean and standard deviation over the checkpoints' accuracies, in percent.

    The mean is the paper's figure. top1_last and top1_best are those of one checkpoint.
    """
    return {
        "top1_mean": statistics.fmean(row["top1"] for row in rows),
        "top1_std": statistics.pstdev(row["top1"] for row in rows),
        "top1_last": rows[-1]["top1"],
        "top1_best": max(row["top1"] for row in rows),
        "top5_mean": statistics.fmean(row["top5"] for row in rows),
        "top5_std": statistics.pstdev(row["top5"] for row in rows),
        "videos": num_videos,
        "mode": spec.evaluate.mode,
        "clips": spec.evaluate.clips if spec.evaluate.mode == "clips" else None,
        "crops": spec.evaluate.crops,
        "checkpoints": list(rows),
    }
