"""Score videos by the average of their views' logits: each once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from summit_train.comm import World
from summit_train.data.batches.loader import BadClip, Store, test_batches
from summit_train.data.manifest.quarantine import Kept
from summit_train.spec import Spec
from summit_train.training.step import Normalise, mixed_precision, parameter_type

# Bounds the memory of 30 views of 256^2 without splitting a common case.
_VIEWS_AT_ONCE = 16

Progress = Callable[[int, int], None]  # (videos done, videos of this rank)


@dataclass(frozen=True)
class Scored:
    """The averaged logits of some videos, float32 (V, classes), in their order, and the videos without any.

    A video in `bad` could not be read; its scores are NaN.
    """

    scores: NDArray[np.float32]
    bad: tuple[BadClip, ...]


@dataclass(frozen=True)
class Scorer:
    """Scores videos on all ranks with the views of spec.evaluate: rank r those at r, r + ranks, ...

    No video is padded or scored twice. A video's views form batches of their own, so its scores do not depend on the
    number of ranks.
    """

    spec: Spec
    world: World
    device: torch.device

    def score(
        self, model: nn.Module, store: Store, kept: Kept, progress: Progress = lambda done, total: None
    ) -> Scored | None:
        """Score the kept videos of a store; return them on rank 0, None elsewhere. Collective.

        With data.on_bad_clip "skip" a video that cannot be read is collected. Raises DecodeError at the first one
        otherwise.
        """
        mine = kept.ids(np.arange(self.world.rank, len(kept), self.world.size)).tolist()
        was_training = model.training
        model.eval()
        scores, bad = self._scores(model, store, mine, progress)
        model.train(was_training)
        gathered = self.world.gather((mine, scores, bad))
        if gathered is None:
            return None
        by_video = {video: score for ids, rows, _ in gathered for video, score in zip(ids, rows, strict=True)}
        assert sum(len(ids) for ids, _, _ in gathered) == len(by_video) == len(kept), "each video exactly once"
        videos = kept.ids(np.arange(len(kept))).tolist()
        unreadable = sorted((clip for _, _, clips in gathered for clip in clips), key=lambda clip: clip.clip)
        return Scored(np.stack([by_video[video] for video in videos]).astype(np.float32), tuple(unreadable))

    def _scores(
        self, model: nn.Module, store: Store, videos: list[int], progress: Progress
    ) -> tuple[list[NDArray[np.float64]], list[BadClip]]:
        """Return the scores of this rank's videos, and those that could not be read."""
        spec = self.spec
        normalise = Normalise(parameter_type(spec.precision), self.device)
        scores: list[NDArray[np.float64]] = []
        bad: list[BadClip] = []
        with torch.inference_mode(), mixed_precision(spec.precision, self.device):
            for batch in test_batches(spec.data, spec.evaluate, store, videos):
                if batch.bad is None:
                    parts = [model(normalise(part)) for part in torch.split(batch.views, _VIEWS_AT_ONCE)]
                    scores.append(torch.cat(parts).double().mean(0).cpu().numpy())
                else:
                    bad.append(batch.bad)
                    scores.append(np.full(spec.model.num_classes, np.nan))
                assert batch.video == videos[len(scores) - 1]
                progress(len(scores), len(videos))
        return scores, bad
