"""The moment that is found in each video, the mean over its views, and how far that is from the event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from summit_train.data.batches.loader import test_batches
from summit_train.evaluation.measures import Measure
from summit_train.evaluation.scores import save_columns
from summit_train.evaluation.scoring import Results, Scorer, view_logits
from summit_train.models.precision import Normalise, parameter_type


@dataclass(frozen=True)
class Moments:
    """moments, events (V,): the frames that are found, NaN in a video that could not be read, and the true ones."""

    videos: NDArray[np.int64]
    is_read: NDArray[np.bool_]
    moments: NDArray[np.float64]
    events: NDArray[np.int32]
    tolerance: float

    left_out: tuple[int, ...] = ()

    @property
    def num_bad(self) -> int:
        return int((~self.is_read).sum())

    @property
    def errors(self) -> NDArray[np.float64]:
        return np.abs(self.moments - self.events)

    def save(self, path: Path, clips: Any, class_names: Sequence[str]) -> None:
        columns = {"video": self.videos, "is_read": self.is_read, "moments": self.moments, "events": self.events}
        save_columns(path, columns, clips, class_names)


class MomentScorer(Scorer):
    def results(self, model: Any, videos: Sequence[int]) -> Results:
        spec = self.spec
        normalise = Normalise(parameter_type(spec.precision), self.device, spec.data.input)
        data = spec.data.on_node(self.world.local_size)
        for batch in test_batches(data, spec.evaluate, self.dataset.store, videos):
            if batch.bad is not None:
                yield batch.bad
                continue
            positions = view_logits(model, normalise, batch.views, spec)[:, 0].cpu().numpy()
            first, last = (np.repeat(batch.frames[:, end], len(positions) // len(batch.frames)) for end in (0, -1))
            yield np.mean(first + positions * np.maximum(1, last - first), keepdims=True)

    def gathered(self, clips: NDArray[np.int64], results: Sequence[Any], is_read: NDArray[np.bool_]) -> Moments:
        events = self.dataset.manifest.annotation.columns["moment"][clips]
        return Moments(clips, is_read, np.concatenate(results), events, self.spec.model.moment.tolerance)


def _within(found: Moments) -> float:
    return 100 * float(np.mean(found.errors <= found.tolerance))


MEASURES = {
    "moment": (
        Measure("within", "within tolerance", _within, lambda found: np.zeros(0), ""),
        Measure(
            "frames", "mean error", lambda f: float(np.nanmean(f.errors)), lambda f: np.zeros(0), "", unit="frames"
        ),
    )
}
