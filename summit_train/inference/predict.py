"""The classes of videos, by a trained network, with the test views of its spec; the accuracy where labels are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    labelled = list[Scores]()
    for number, listing in enumerate(listings):
        results = PartialScores()
        scorer = Scorer(spec, listing, world, device, keeps_records=False)
        follow = _after(sum(counts[:number]), sum(counts), progress)
        scores = scorer.score(network, follow, source=None, earlier=results)
        if scores is None:  # not rank 0
            continue
        reasons = {bad.clip: listing.reason(bad) for bad in results.bad}
        is_read = np.isfinite(scores.scores).all(axis=1)
        is_read[list(reasons)] = False
        for clip, logits in enumerate(scores.scores):
            if is_read[clip]:
                best = most_probable(logits, trained.classes, top, spec.loss.base)
                videos.append(PredictedVideo(listing.clip(clip), best))
            else:
                error = reasons.get(clip, "its scores are not finite")
                videos.append(PredictedVideo(listing.clip(clip), (), error))
        if listing.has_labels:
            labelled.append(replace(scores, is_read=is_read))
    return Predictions(videos, _joined(labelled)) if world.rank == 0 else None


def _after(before: int, total: int, progress: Progress) -> Progress:
    """Return the progress of a part of the work that begins when `before` videos of `total` are done."""
    return lambda done, _: progress(before + done, total)


def _joined(parts: Sequence[Scores]) -> Scores | None:
    """Return the scores of several lists of videos as those of one; None without any video."""
    if not sum(len(part.videos) for part in parts):
        return None
    labels, scores, is_read = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("labels", "scores", "is_read")
    )
    return Scores(np.arange(len(labels)), labels, scores, is_read)


def most_probable(
    logits: NDArray[np.floating[Any]], classes: Sequence[str], top: int, kind: str = "softmax"
) -> list[dict[str, Any]]:
    """Return label, name and probability of the `top` highest logits (classes,), equal ones by class number."""
    scores = probabilities(logits, kind)
    order = np.argsort(-logits, kind="stable")[:top].tolist()
    return [{"label": label, "name": classes[label], "score": float(scores[label])} for label in order]
