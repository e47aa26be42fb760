"""The classes of videos, by a trained network, with the test views of its spec; the accuracy where labels are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from summit_train.core.comm import World
from summit_train.core.text import csv_text
from summit_train.data.manifest.clip import Clip, clip_columns
from summit_train.data.manifest.tables import label_text
from summit_train.evaluation.measures import measures_of
from summit_train.evaluation.scores import Scores, probabilities
from summit_train.evaluation.scoring import PartialScores, Progress, Scorer
from summit_train.inference.trained import Trained
from summit_train.inference.videos import VideoList


@dataclass(frozen=True)
class PredictedVideo:
    """A video and its most probable classes in order: label, name and score (probability). error: why it has none."""

    clip: Clip
    predictions: Sequence[dict[str, Any]]
    error: str | None = None


@dataclass(frozen=True)
class Predictions:
    """The videos in their order, and the scores of those with known labels, None without any."""

    videos: Sequence[PredictedVideo]
    labelled: Scores | None

    def values(self) -> dict[str, Any]:
        """Return the JSON object. Accuracies are in percent; a labelled video without a prediction counts as wrong."""
        found = [{"error": one.error} if one.error else {"predictions": one.predictions} for one in self.videos]
        rows = [video.clip.values() | row for video, row in zip(self.videos, found, strict=True)]
        values: dict[str, Any] = {"videos": rows}
        if self.labelled is not None:
            values |= measures_of(self.labelled.kind).values(self.labelled)
            values["videos_labelled"] = len(self.labelled.videos)
        return values

    def csv_text(self) -> str:
        """Return a CSV with a row for each video: path, label, name, score, label_2, ... and error.

        With the frames of spans, regions and directions, so that it is a manifest; a video with an error has no class.
        """
        depth = max([1, *(len(video.predictions) for video in self.videos)])
        ranks = ["", *(f"_{rank}" for rank in range(2, depth + 1))]
        header = [f"{column}{rank}" for rank in ranks for column in ("label", "name", "score")]
        rows: list[list[object]] = [[*header, "error"]]
        for video in self.videos:
            cells = [cell for one in video.predictions for cell in one.values()] or [label_text(())]
            rows.append([*cells, *[""] * (len(header) - len(cells)), video.error or ""])
        places = clip_columns([video.clip for video in self.videos])
        return csv_text([*place, *row] for place, row in zip(places, rows, strict=True))


def predict_videos(
    trained: Trained,
    listings: Sequence[VideoList],
    world: World,
    device: torch.device,
    top: int,
    progress: Progress = lambda done, total: None,
) -> Predictions | None:
    """Predict the `top` most probable classes of all videos; return them on rank 0, None elsewhere. Collective.

    Probabilities are those of the logits averaged over the views. A video that cannot be read is named in the result.
    """
    data = trained.spec.data.model_copy(update={"on_bad_clip": "skip"})
    spec = trained.spec.model_copy(update={"data": data})
    network = trained.network(device)
    counts = [len(listing.shard(world.rank, world.size)) for listing in listings]
    videos = list[PredictedVideo]()
    known = list[tuple[Any, NDArray[Any], bool]]()
    for number, listing in enumerate(listings):
        before = sum(counts[:number])
        found = PartialScores()
        follow = lambda done, _, before=before: progress(before + done, sum(counts))  # noqa: E731
        scorer = Scorer(spec, listing, world, device, keeps_records=False)
        scores = scorer.score(network, follow, source=None, earlier=found)
        if scores is None:  # not rank 0
            continue
        reasons = {one.clip: listing.reason(one) for one in found.bad}
        for clip, own, label in zip(range(len(listing)), scores.scores, scores.labels, strict=True):
            error = reasons.get(clip) or (None if np.isfinite(own).all() else "its scores are not finite")
            best = most_probable(own, trained.classes, top, spec.loss.base) if error is None else []
            videos.append(PredictedVideo(listing.clip(clip), best, error))
            if listing.has_labels:
                known.append((label, own, error is None))
    if world.rank != 0:
        return None
    labelled = Scores(np.arange(len(known)), *map(np.array, zip(*known, strict=True))) if known else None
    return Predictions(videos, labelled)


def most_probable(
    logits: NDArray[np.floating[Any]], classes: Sequence[str], top: int, kind: str = "softmax"
) -> list[dict[str, Any]]:
    """Return label, name and probability of the `top` highest logits (classes,), equal ones by class number."""
    scores = probabilities(logits, kind)
    order = np.argsort(-logits, kind="stable")[:top].tolist()
    return [{"label": label, "name": classes[label], "score": float(scores[label])} for label in order]
