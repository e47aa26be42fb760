"""Score videos by their views or frame by frame: each once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from summit_train.core.comm import World
from summit_train.core.watch import Ballot, Stopped, StopRequest
from summit_train.data.batches.loader import BadClip, TestBatch, test_batches
from summit_train.data.batches.stores import Store
from summit_train.data.manifest.quarantine import Kept
from summit_train.evaluation.so_far import SoFar
from summit_train.evaluation.streaming import stream_scores, streamer_of
from summit_train.models.precision import Normalise, mixed_precision, parameter_type
from summit_train.plan import views_at_once
from summit_train.spec import Spec

Progress = Callable[[int, int], None]  # (videos done, videos of this rank); equal while it waits for the others
Results = Callable[[Sequence[int]], Iterator[NDArray[np.float64] | BadClip]]  # of these videos, or why one has none


@dataclass(frozen=True)
class Scored:
    """The averaged logits of some videos, float32 (V, classes), or other results, in their order.

    A video in `bad` could not be read; its scores are NaN.
    """

    scores: NDArray[np.float32]
    bad: tuple[BadClip, ...]


@dataclass(frozen=True)
class Scorer:
    """Scores videos on all ranks with the views of spec.evaluate: rank r those at r, r + ranks, ...

    No video is padded or scored twice. A video's views form batches of their own, so its scores do not depend on the
    number of ranks. Where `stop` asks one rank to stop, all leave between two videos and raise Stopped.
    """

    spec: Spec
    world: World
    device: torch.device
    stop: StopRequest = field(default_factory=StopRequest)

    def score(
        self, model: nn.Module, store: Store, kept: Kept, progress: Progress = lambda done, total: None
    ) -> Scored | None:
        """Score the kept videos of a store; return them on rank 0, None elsewhere. Collective.

        With data.on_bad_clip "skip" a video that cannot be read is collected. Raises DecodeError at the first one
        otherwise.
        """
        return self.gathered(model, self.results(model, store), (self.spec.model.num_classes,), kept, progress)

    def results(self, model: nn.Module, store: Store) -> Results:
        """Return what scores videos of a store, as spec.evaluate.mode says."""
        data, evaluate = self.spec.data, self.spec.evaluate
        if evaluate.mode == "stream":
            streamer = streamer_of(model, self.spec, self.device)
            return lambda videos: stream_scores(streamer, data, evaluate, store, videos)
        return lambda videos: self._clip_scores(model, test_batches(data, evaluate, store, videos), videos)

    def gathered(
        self,
        model: nn.Module,
        results: Results,
        shape: tuple[int, ...],
        kept: Kept,
        progress: Progress,
        so_far: SoFar | None = None,
    ) -> Scored | None:
        """Return the results of all ranks' kept videos on rank 0, each an array of `shape`; None elsewhere. Collective.

        results: yields those of some videos, in their order, while `model` is in evaluation mode. so_far: rank 0's
        earlier results, which are not computed again; the new ones are added and saved.
        """
        so_far = so_far or SoFar()
        known = set(self.world.broadcast(list(so_far.results)))
        videos = kept.videos_of(self.world.rank, self.world.size).tolist()
        mine = [video for video in videos if video not in known]
        was_training, ballot = model.training, Ballot(self.world, self.stop)
        model.eval()
        scores: list[NDArray[np.float64]] = []
        bad: list[BadClip] = []
        if not mine:
            progress(0, 0)
        with torch.inference_mode(), mixed_precision(self.spec.precision, self.device):
            for result in results(mine):
                if isinstance(result, BadClip):
                    bad.append(result)
                    result = np.full(shape, np.nan)
                assert result.shape == shape
                scores.append(result)
                progress(len(scores), len(mine))
                if ballot.is_over(busy=len(scores) < len(mine)):
                    break
        model.train(was_training)
        for _ in ballot.rounds():
            progress(len(scores), len(mine))  # the others go on: to wait for them longer than a stall is no fault
        gathered = self.world.gather((mine[: len(scores)], scores, bad))
        if gathered is not None:
            for found in gathered:
                so_far.add(*found)
            so_far.save()
        if ballot.is_stopped:
            raise Stopped
        assert len(scores) == len(mine)
        return None if gathered is None else _in_order(so_far, kept)

    def _clip_scores(
        self, model: nn.Module, batches: Iterable[TestBatch], videos: Sequence[int]
    ) -> Iterator[NDArray[np.float64] | BadClip]:
        """Yield the average of the logits of each video's views, or why it has none."""
        normalise = Normalise(parameter_type(self.spec.precision), self.device, self.spec.data.input)
        for batch, video in zip(batches, videos, strict=True):
            assert batch.video == video
            if batch.bad is None:
                yield view_logits(model, normalise, batch.views, self.spec).mean(0).cpu().numpy()
            else:
                yield batch.bad


def view_logits(model: nn.Module, normalise: Normalise, views: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Return the logits, fp64 (n, classes), of views (n, T, h, w, C), computed in parts of bounded memory."""
    parts = torch.split(views, views_at_once(spec, views.shape[2] * views.shape[3]))
    return torch.cat([model(normalise(part)) for part in parts]).double()


def _in_order(found: SoFar, kept: Kept) -> Scored:
    """Return the results in the order of the videos."""
    videos = kept.ids(np.arange(len(kept))).tolist()
    assert sorted(found.results) == videos, "each video exactly once"
    unreadable = sorted(found.bad, key=lambda clip: clip.clip)
    return Scored(np.stack([found.results[video] for video in videos]).astype(np.float32), tuple(unreadable))
