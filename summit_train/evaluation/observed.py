"""Early recognition: the accuracy when only the first part of each video is seen (Lin et al., TSM, section 5.5.2)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from summit_train.core.errors import UserError
from summit_train.core.result import TextTable
from summit_train.core.saved import give_weights
from summit_train.core.text import counted, percent
from summit_train.data.batches.loader import WholeVideo
from summit_train.data.video.augment import num_observed, observed_frames, stream_frames
from summit_train.evaluation import scoring
from summit_train.evaluation.evaluation import read_weights
from summit_train.evaluation.measures import measures_of
from summit_train.evaluation.scores import Scored, Scores
from summit_train.models import VideoNetwork
from summit_train.models.precision import Normalise, parameter_type
from summit_train.spec import DataSpec, Spec
from summit_train.spec.checks import stream_problem

TENTHS = tuple(Fraction(tenth, 10) for tenth in range(1, 11))
_MOST = 1000
_DECIMAL = re.compile(r"\d{0,3}\.?\d{1,9}|\d{1,3}\.")


def parse_fractions(text: str) -> tuple[Fraction, ...]:
    """Read '0.1,0.5,1' or '0.1,0.2,...,1.0' as exact numbers, rising, each once.

    '...' continues in steps of the difference of the two numbers before it, or of the only one.
    Raises UserError for anything else, and for numbers that are not above 0 and up to 1.
    """
    words = [word.strip() for word in text.split(",")]
    fractions = list[Fraction]()
    for index, word in enumerate(words):
        if word != "..." or not fractions or index + 1 == len(words):
            fractions.append(_fraction(text, word))
            continue
        end = _fraction(text, words[index + 1])
        last = fractions[-1]
        step = last - fractions[-2] if len(fractions) > 1 else last
        number, rest = divmod(end - last, step) if step > 0 else (0, Fraction(1))
        if rest or not 0 < number <= _MOST:
            raise UserError(f"--observed {text}: the steps before '...' do not lead to {float(end):g}")
        fractions += [last + i * step for i in range(1, number)]
    return tuple(sorted(set(fractions)))


def _fraction(text: str, word: str) -> Fraction:
    value = Fraction(word) if _DECIMAL.fullmatch(word) else None
    if value is None or not 0 < value <= 1:
        right = "must be above 0 and up to 1, such as 0.1,0.5,1 or 0.1,0.2,...,1"
        raise UserError(f"--observed {text}: {word!r} is not a fraction of a video: {right}")
    return value


def score_observed(
    scorer: scoring.VideoScorer[Scored],
    model: VideoNetwork,
    path: Path,
    fractions: Sequence[Fraction],
    progress: scoring.Progress,
) -> dict[str, Any] | None:
    """Score a checkpoint after each fraction of every video. Collective; return the content of observed.json on rank 0.

    "observed": of ceil(fraction * N) frames of a video, the network sees a clip of T, taken uniformly from them.
    "anytime", for networks that can stream: the average of a stream's logits over the same part; the stream sees the
    frames of mode stream. "undecided" videos have no frame of the stream yet, and count as wrong.
    """
    spec = scorer.spec
    weights, _, step = read_weights(scorer, model, path)
    scorer.world.together(lambda: give_weights(model, path, weights))
    scores = _Observer(**vars(scorer), fractions=tuple(fractions), path=path).score(model, progress, source=None)
    if scores is None:
        return None
    return {
        "name": spec.name,
        "arch": spec.model.arch,
        "backbone": spec.model.backbone,
        "frames": spec.data.num_frames,
        "crops": spec.evaluate.crops,
        "checkpoint": str(path),
        "step": step,
        **_curves(scores, fractions),
    }


@dataclass(frozen=True, kw_only=True)
class _Observer(scoring.Scorer):
    """Scores the videos after each fraction of them. path: of the checkpoint, for messages.

    A result is fp64 (1, fractions, classes) by a clip of the part, or (2, ...) with those of the stream so far below. A
    part of which the stream has no frame yet is NaN.
    """

    fractions: tuple[Fraction, ...]
    path: Path

    @property
    def can_stream(self) -> bool:
        return stream_problem(self.spec.model) is None

    @property
    def shape(self) -> tuple[int, ...]:
        return (1 + self.can_stream, len(self.fractions), self.spec.model.num_classes)

    def results(self, model: nn.Module, videos: Sequence[int]) -> scoring.Results:
        streamer = scoring.Streamer(model, self.spec, self.device) if self.can_stream else None
        frames = partial(_frames, self.spec.data, self.fractions, self.can_stream)
        normalise = Normalise(parameter_type(self.spec.precision), self.device, self.spec.data.input)
        yield from self.each_video(videos, frames, partial(self._observed, model, normalise, streamer))

    def _observed(
        self, model: nn.Module, normalise: Normalise, streamer: scoring.Streamer | None, video: WholeVideo
    ) -> scoring.Results:
        spec = self.spec
        path = self.dataset.manifest.path(video.video)
        number = video.first.num_frames
        kept = dict[int, torch.Tensor]()
        clips = observed_frames(number, self.fractions, spec.data.num_frames)
        average: scoring.StreamAverage | None = None
        if streamer is not None:
            edges = [num_observed(number, fraction) for fraction in self.fractions]
            average = scoring.StreamAverage(streamer, stream_frames(spec.data, number).tolist(), edges)
        of_clips = set(clips.ravel().tolist())
        for block in video.blocks():
            for index, frame in enumerate(block.numbers.tolist()):
                if frame in of_clips:
                    kept[frame] = block.views[:, index].clone()  # a view would keep the whole block
            if average is not None:
                average.add(block)
            yield None
        views = [torch.stack([kept[frame] for frame in clip], 1) for clip in clips.tolist()]  # (crops, T, h, w, C)
        logits = scoring.view_logits(model, normalise, torch.cat(views), spec)
        curves = [logits.view(len(clips), -1, logits.shape[1]).mean(1).cpu().numpy()]
        scoring.check_finite(curves[0], path, str(self.path))
        if average is not None:
            scoring.check_finite(average.at_edges(0.0), path, str(self.path))
            curves.append(average.at_edges())
        yield np.stack(curves)


def _frames(data: DataSpec, fractions: tuple[Fraction, ...], is_streamed: bool, num_frames: int) -> NDArray[np.int64]:
    """Return the frames of the clips of each fraction, and those of the stream."""
    clips = observed_frames(num_frames, fractions, data.num_frames).ravel()
    return np.concatenate([clips, stream_frames(data, num_frames)]) if is_streamed else clips


def _curves(scores: Scores, fractions: Sequence[Fraction]) -> dict[str, Any]:
    """Return the accuracy after each fraction: of the clips, and of the stream where there is one."""
    curves: dict[str, Any] = {"videos": len(scores.videos), "bad_videos": scores.num_bad}
    for curve, name in enumerate(("observed", "anytime")[: scores.scores.shape[1]]):
        rows: list[dict[str, Any]] = []
        for number, fraction in enumerate(fractions):
            # The logits have been checked: NaN marks videos that could not be read, and parts without a frame.
            logits = scores.scores[:, curve, number]
            known = replace(scores, scores=logits, is_read=scores.is_read & ~np.isnan(logits).any(axis=1))
            rows.append({"fraction": float(fraction)} | measures_of(known.kind).values(known))
            if name == "anytime":
                rows[-1]["undecided"] = known.num_bad - scores.num_bad
        curves[name] = rows
    return curves


def curves_text(result: dict[str, Any], spec: Spec) -> list[str | TextTable]:
    """Return the accuracies by the observed part for people."""
    names = {one.key: one.name for one in measures_of(spec.loss.base, spec.model.num_classes).shown}
    curves = {"clip": result["observed"], "stream": result.get("anytime")}
    known = {kind: rows for kind, rows in curves.items() if rows}
    rows = [["observed", *(f"{kind} {name}" for kind in known for name in names.values())]]
    for i, point in enumerate(result["observed"]):
        cells = [percent(curve[i][key]) for curve in known.values() for key in names]
        rows.append([f"{100 * point['fraction']:g} %", *cells])
    unread = f"; {result['bad_videos']} unreadable, counted as wrong" if result["bad_videos"] else ""
    about = f"{counted(result['videos'], 'video')}, step {result['step']}{unread}"
    lines: list[str | TextTable] = [TextTable(rows), about]
    if (why := stream_problem(spec.model)) is not None:
        lines.append(f"no stream: {why}")
    undecided = {100 * row["fraction"]: row["undecided"] for row in curves["stream"] or [] if row["undecided"]}
    if undecided:
        parts = ", ".join(f"{number} at {part:g} %" for part, number in undecided.items())
        lines.append(f"videos of which the stream has no frame yet, which count as wrong: {parts}")
    return lines
