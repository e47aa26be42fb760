"""The classes of videos, by a trained network, with the test views of its spec; the accuracy where labels are known."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from summit_train.comm import World
from summit_train.data.manifest import read_classes
from summit_train.data.video.span import TO_THE_END, WHOLE, Span
from summit_train.errors import UserError
from summit_train.inference.trained import Trained
from summit_train.inference.videos import Listing
from summit_train.training.evaluation import Scores
from summit_train.training.scoring import Progress, Scored, Scorer

_NOT_FINITE = "its scores are not finite"


@dataclass(frozen=True)
class Prediction:
    """One of a video's classes. score: its softmax, from 0 to 1."""

    label: int
    name: str
    score: float


@dataclass(frozen=True)
class PredictedVideo:
    """A video, as its list names it, and its most probable classes, the first one first; or why there are none."""

    path: str
    span: Span
    predictions: tuple[Prediction, ...]
    error: str | None = None
    is_reversed: bool = False

    def values(self) -> dict[str, Any]:
        """Return what JSON has of it. A clip that is a span of its file, or plays backwards, says so."""
        named: dict[str, Any] = {"path": self.path} | ({"reversed": True} if self.is_reversed else {})
        if self.span != WHOLE:
            end = None if self.span.end == TO_THE_END else self.span.end
            named |= {"start_frame": self.span.start, "end_frame": end}
        if self.error is not None:
            return named | {"error": self.error}
        return named | {"predictions": [vars(prediction) for prediction in self.predictions]}


@dataclass(frozen=True)
class Predictions:
    """The videos in their order, and the scores of those whose labels are known, None where there is none."""

    videos: tuple[PredictedVideo, ...]
    labelled: Scores | None

    @property
    def bad(self) -> list[PredictedVideo]:
        """Return the videos that have no prediction."""
        return [video for video in self.videos if video.error is not None]

    def values(self) -> dict[str, Any]:
        """Return the JSON object. Accuracies are in percent; a labelled video without a prediction counts as wrong."""
        values: dict[str, Any] = {"videos": [video.values() for video in self.videos]}
        if self.labelled is None:
            return values
        top = {f"top{k}": self.labelled.top(k) for k in (1, 5)}
        return values | top | {"videos_labelled": len(self.labelled.videos)}

    def csv_text(self) -> str:
        """Return a CSV with a row for each video: path, label, name, score, label_2, ... and error.

        With the frames of spans and the directions, so that the rows without an error are a manifest.
        """
        depth = max((len(video.predictions) for video in self.videos), default=0)
        ranks = ["", *(f"_{rank}" for rank in range(2, depth + 1))]
        columns = [f"{column}{rank}" for rank in ranks for column in ("label", "name", "score")]
        has_spans = any(video.span != WHOLE for video in self.videos)
        has_directions = any(video.is_reversed for video in self.videos)
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        spans, directions = ("start_frame", "end_frame") if has_spans else (), ("reversed",) if has_directions else ()
        writer.writerow(["path", *spans, *directions, *columns, "error"])
        for video in self.videos:
            cells: list[object] = [video.path, *(video.span.cells if has_spans else ())]
            cells += [int(video.is_reversed)] if has_directions else []
            classes = [cell for one in video.predictions for cell in (one.label, one.name, one.score)]
            writer.writerow([*cells, *classes, *[""] * (len(columns) - len(classes)), video.error or ""])
        return text.getvalue()


def named(trained: Trained, names_file: str | None) -> Trained:
    """Return the trained network with the names in a file, one a line, label 0 first; as it is without a file.

    Raises UserError for a file that is missing or has another number of names.
    """
    if names_file is None:
        return trained
    names, wanted = read_classes(names_file), trained.spec.model.num_classes
    if names is None and not os.path.exists(names_file):
        raise UserError(
            f"{names_file}: there is no such file; the names of the {wanted} classes, one a line, are wanted"
        )
    if names is None or len(names) != wanted:
        found = len(names or ())
        raise UserError(
            f"{names_file}: has {found} names, and {trained.path} {wanted} classes: one name each is wanted"
        )
    return replace(trained, classes=names, has_names=True)


def predict_videos(
    trained: Trained,
    listings: Sequence[Listing],
    world: World,
    device: torch.device,
    top: int,
    progress: Progress = lambda done, total: None,
) -> Predictions | None:
    """Predict the `top` most probable classes of all videos; return them on rank 0, None elsewhere. Collective.

    Logits are averaged over the views, then the softmax is taken. A video that cannot be read is named in the result.
    """
    data = trained.spec.data.model_copy(update={"on_bad_clip": "skip"})
    scorer = Scorer(trained.spec.model_copy(update={"data": data}), world, device)
    network = trained.network(device)
    # Opened before the long work: a packed set that is damaged is refused here.
    stores = [listing.store(data) for listing in listings]
    counts = [len(range(world.rank, len(listing.kept), world.size)) for listing in listings]
    scored = []
    for number, (listing, store) in enumerate(zip(listings, stores, strict=True)):
        before = sum(counts[:number])
        follow = lambda done, _, before=before: progress(before + done, sum(counts))  # noqa: E731
        scored.append(scorer.score(network, store, listing.kept, follow))
    if world.rank != 0:
        return None
    return _together(trained, listings, [part for part in scored if part is not None], top)


def _together(trained: Trained, listings: Sequence[Listing], scored: Sequence[Scored], top: int) -> Predictions:
    videos: list[PredictedVideo] = []
    labels, scores = list[NDArray[np.int64]](), list[NDArray[np.float32]]()
    for listing, part in zip(listings, scored, strict=True):
        clips = listing.kept.ids(np.arange(len(listing.kept)))
        videos += _predicted(listing, clips, part, trained.classes, top)
        if listing.has_labels:
            labels.append(listing.manifest.labels[clips].astype(np.int64))
            scores.append(part.scores)
    if not labels:
        return Predictions(tuple(videos), None)
    known = np.concatenate(labels)
    return Predictions(tuple(videos), Scores(np.arange(len(known)), known, np.concatenate(scores)))


def _predicted(
    listing: Listing, clips: NDArray[np.int64], scored: Scored, classes: Sequence[str], top: int
) -> list[PredictedVideo]:
    reasons = {bad.clip: (bad.path, bad.reason) for bad in scored.bad}
    videos = []
    for clip, logits in zip(clips.tolist(), scored.scores, strict=True):
        path, error = listing.manifest.path(clip), None
        if clip in reasons:
            error = _reason(path, *reasons[clip])
        elif not np.isfinite(logits).all():
            error = _NOT_FINITE
        found = most_probable(logits, classes, top) if error is None else ()
        backwards = listing.manifest.is_reversed(clip)
        videos.append(PredictedVideo(path, listing.manifest.span(clip), found, error, backwards))
    return videos


def _reason(path: str, bad_path: str, reason: str) -> str:
    """Return why a clip cannot be read, with the name of the picture in its folder where that is bad."""
    _, _, picture = bad_path.partition(f"{path}{os.sep}")
    return f"{picture} {reason}" if picture else reason


def most_probable(logits: NDArray[np.floating[Any]], classes: Sequence[str], top: int) -> tuple[Prediction, ...]:
    """Return the `top` classes of the highest logits (classes,); equal ones are ordered by class number."""
    powers = np.exp(logits.astype(np.float64) - logits.max())
    softmax = powers / powers.sum()
    order = np.argsort(-logits, kind="stable")[:top].tolist()
    return tuple(Prediction(label, classes[label], float(softmax[label])) for label in order)
