"""Early recognition: the accuracy when only the first part of each video is seen (Lin et al., TSM, section 5.5.2)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from summit_train.core.errors import UserError
from summit_train.data.batches.loader import BadClip
from summit_train.data.batches.stores import open_store
from summit_train.data.batches.walk import ObservedFrames, StreamedFrames, Walk, walks
from summit_train.data.video.augment import num_observed
from summit_train.evaluation.evaluation import Evaluation
from summit_train.evaluation.scores import Scores
from summit_train.evaluation.scoring import Progress, view_logits
from summit_train.evaluation.streaming import Streamer, Streaming, scored, streamer_of
from summit_train.models.precision import Normalise, parameter_type
from summit_train.spec import Spec
from summit_train.spec.catalog import stream_problem

TENTHS = tuple(Fraction(tenth, 10) for tenth in range(1, 11))
_MOST = 1000
_DECIMAL = re.compile(r"\d{0,3}\.?\d{1,9}|\d{1,3}\.")


def parse_fractions(text: str) -> tuple[Fraction, ...]:
    """Read '0.1,0.5,1' or '0.1,0.2,...,1.0' as exact numbers, rising, each once.

    '...' goes on in steps of the difference of the two numbers before it, or of the one that is there.
    Raises UserError for anything else, and for numbers that are not above 0 and up to 1.
    """
    words, found = [word.strip() for word in text.split(",")], list[Fraction]()
    for place, word in enumerate(words):
        if word == "..." and found and place + 1 < len(words):
            found += _between(text, found, _fraction(text, words[place + 1]))
        else:
            found.append(_fraction(text, word))
    return tuple(sorted(set(found)))


def _fraction(text: str, word: str) -> Fraction:
    value = Fraction(word) if _DECIMAL.fullmatch(word) else None
    if value is None or not 0 < value <= 1:
        raise UserError(
            f"--observed {text}: {word!r} is no fraction of a video: wanted are numbers above 0 and up to 1, such as "
            "0.1,0.5,1 or 0.1,0.2,...,1"
        )
    return value


def _between(text: str, found: Sequence[Fraction], end: Fraction) -> list[Fraction]:
    """Return the numbers that '...' stands for: after the last one found, before `end`."""
    step = found[-1] - found[-2] if len(found) > 1 else found[-1]
    number, rest = divmod(end - found[-1], step) if step > 0 else (0, Fraction(1))
    if rest or not 0 < number <= _MOST:
        raise UserError(f"--observed {text}: the steps before '...' do not lead to {float(end):g}")
    return [found[-1] + i * step for i in range(1, number)]


@dataclass(frozen=True)
class _Observer:
    """Scores a video after each observed part: by a clip of the part, and where it can by the stream so far.

    check: raises where logits of a video are not finite.
    """

    model: nn.Module
    normalise: Normalise
    frames: ObservedFrames
    streamer: Streamer | None
    spec: Spec
    check: Callable[[np.ndarray, int], None]

    def __call__(self, walk: Walk) -> np.ndarray:
        """Return logits, fp64: (1, fractions, classes) of the clips, or (2, ...) with those of the stream below.

        A part of which the stream has no frame yet is NaN.
        """
        number = walk.num_frames
        clips, kept = self.frames.clips(number), dict[int, torch.Tensor]()
        streaming = self._streaming(number)
        wanted = set(clips.ravel().tolist())
        for piece in walk.pieces():
            for place, frame in enumerate(piece.numbers.tolist()):
                if frame in wanted:
                    kept[frame] = piece.views[:, place].clone()  # a view would keep the whole piece
            if streaming is not None:
                streaming.see(piece)
        by_clip = self._clip_logits(clips, kept)
        self.check(by_clip, walk.video)
        if streaming is None:
            return by_clip[None]
        self.check(streaming.averages(0.0), walk.video)
        return np.stack([by_clip, streaming.averages()])

    def _streaming(self, number: int) -> Streaming | None:
        if self.streamer is None or self.frames.streamed is None:
            return None
        edges = [num_observed(number, fraction) for fraction in self.frames.fractions]
        return Streaming(self.streamer, self.frames.streamed.in_order(number).tolist(), edges)

    def _clip_logits(self, clips: np.ndarray, frames: dict[int, torch.Tensor]) -> np.ndarray:
        views = [torch.stack([frames[number] for number in clip], 1) for clip in clips.tolist()]  # (crops, T, h, w, C)
        logits = view_logits(self.model, self.normalise, torch.cat(views), self.spec)
        by_clip: np.ndarray = logits.view(len(clips), -1, logits.shape[1]).mean(1).cpu().numpy()
        return by_clip


def score_observed(
    evaluation: Evaluation, model: nn.Module, path: Path, fractions: Sequence[Fraction], progress: Progress
) -> dict[str, Any] | None:
    """Score a checkpoint after each fraction of every video. Collective; return the content of observed.json on rank 0.

    "observed": of ceil(fraction * N) frames of a video, the network sees a clip of T, taken uniformly from them.
    "anytime", for networks that can stream: the average of a stream's logits over the same part; the stream sees the
    frames of mode stream. "undecided" videos have no frame of the stream yet, and count as wrong.
    """
    spec = evaluation.spec
    step = evaluation.load(model, path)
    streams = no_stream(spec) is None
    frames = ObservedFrames(spec.data, tuple(fractions), StreamedFrames(spec.data) if streams else None)
    streamer = streamer_of(model, spec, evaluation.device) if streams else None
    normalise = Normalise(parameter_type(spec.precision), evaluation.device, spec.data.input)
    check = partial(evaluation.check_finite, source=str(path))
    observer = _Observer(model, normalise, frames, streamer, spec, check)
    store = open_store(spec.data, evaluation.manifest)

    def results(videos: Sequence[int]) -> Iterator[np.ndarray | BadClip]:
        return scored(walks(spec.data, spec.evaluate, store, videos, frames), observer, spec.data)

    found = evaluation.gathered(model, results, (1 + streams, len(fractions), spec.model.num_classes), progress)
    if found is None:
        return None
    about: dict[str, Any] = {"name": spec.name, "arch": spec.model.arch, "backbone": spec.model.backbone}
    about |= {"frames": spec.data.num_frames, "crops": spec.evaluate.crops, "checkpoint": str(path), "step": step}
    return about | _curves(found, fractions)


def check_observable(spec: Spec) -> None:
    """Raise UserError for a network that sees what comes after the observed part."""
    if spec.data.modality == "flow":
        raise UserError(
            "--observed: a frame of flow (data.modality) stacks the fields after it, so that the network would see "
            "more than the observed part; take an rgb run"
        )


def no_stream(spec: Spec) -> str | None:
    """Return why there is no anytime curve, None where there is one."""
    return stream_problem(spec.model.arch, spec.model.shift_direction, spec.model.non_local)


def _curves(found: Scores, fractions: Sequence[Fraction]) -> dict[str, Any]:
    # The logits have been checked: NaN marks videos that could not be read, and parts without a frame.
    curves = [
        [
            Scores(found.videos, found.labels, scores, found.is_read & ~np.isnan(scores).any(axis=1))
            for scores in found.scores[:, curve].swapaxes(0, 1)
        ]
        for curve in range(found.scores.shape[1])
    ]
    num_bad = found.num_bad
    values = [
        [
            {"fraction": float(fraction), "top1": scores.top(1), "top5": scores.top(5)}
            | ({"undecided": scores.num_bad - num_bad} if number else {})
            for fraction, scores in zip(fractions, curve, strict=True)
        ]
        for number, curve in enumerate(curves)
    ]
    return {
        "videos": len(found.videos),
        "bad_videos": num_bad,
        **dict(zip(("observed", "anytime"), values, strict=False)),
    }
