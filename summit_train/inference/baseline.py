"""A frozen network's features under logistic regression: what a small set reaches without training.

A video's features are what the network's last linear layer sees, averaged over its frames and over the test views of
`evaluate`. The regression is multinomial, with an L2 penalty of which cross-validation within the training set chooses
the strength: the minimum of |W|^2 / 2 + C * sum of the cross entropies, as by scikit-learn's LogisticRegression (which
has one vector of weights for two classes, so that its C is twice this one then).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from summit_train.core.errors import UserError
from summit_train.core.progress import followed
from summit_train.data.manifest import Manifest
from summit_train.data.manifest.split import parts_of
from summit_train.evaluation.measures import interval
from summit_train.evaluation.scores import Scores
from summit_train.evaluation.scoring import Scorer
from summit_train.models import VideoNetwork
from summit_train.models.trn import TRN

STRENGTHS = tuple(10.0**power for power in range(-4, 3))  # C: the penalty is |W|^2 / 2C
_FOLDS = 5


class Features(nn.Module):
    """The features of clips (N, T, C, H, W) by a network, (N, F): the input of its classifier's last linear layer."""

    def __init__(self, network: VideoNetwork) -> None:
        super().__init__()
        # TRN's head relates what `fc` makes of each frame; both are trained with the classes.
        name = "fc" if isinstance(network, TRN) else network.head
        head = network.get_submodule(name) if name else nn.Identity()
        linear = [module for module in head.modules() if isinstance(module, nn.Linear)]
        if not linear:
            raise UserError("the network must name its last linear layer as `head`; see docs/own_parts.md")
        self.width = linear[-1].in_features
        self._network = network
        self._seen: list[torch.Tensor] = []
        linear[-1].register_forward_pre_hook(lambda _, inputs: self._seen.append(inputs[0]))

    def forward(self, clips_NTCHW: torch.Tensor) -> torch.Tensor:
        self._seen.clear()
        self._network(clips_NTCHW)
        return self._seen.pop().double().view(len(clips_NTCHW), -1, self.width).mean(1)


@dataclass(frozen=True)
class FeatureScorer(Scorer):
    """Returns the features of videos, (V, width), where a Scorer returns their logits."""

    width: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.width,)


class Regression(NamedTuple):
    """A fitted logistic regression of standardised features. labels: the classes that it knows, (L,)."""

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]
    labels: NDArray[np.int64]
    weight: NDArray[np.float64]  # (L, F)
    bias: NDArray[np.float64]  # (L,)

    def logits(self, features: NDArray[Any], num_classes: int) -> NDArray[np.float64]:
        """Return logits (N, num_classes): far below all others, and finite, for a class that it does not know."""
        known = (features - self.mean) / self.deviation @ self.weight.T + self.bias
        logits = np.full((len(features), num_classes), known.min(initial=0.0) - 1000)
        logits[:, self.labels] = known
        return logits


class _Basis(NamedTuple):
    """Features (N, F) as inputs (N, M) of a regression: standardised, in M of their own directions, M = min(N, F).

    The optimal weights are a combination of the videos, which are often fewer than the features.
    """

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]
    directions: NDArray[np.float64]  # (M, F)
    inputs: NDArray[np.float64]

    @classmethod
    def of(cls, features: NDArray[Any]) -> _Basis:
        mean = features.mean(0, dtype=np.float64)
        deviation = features.std(0, dtype=np.float64)
        deviation[deviation == 0] = 1.0
        left, scale, directions = np.linalg.svd((features - mean) / deviation, full_matrices=False)
        return cls(mean, deviation, directions, left * scale)


def fit(features: NDArray[Any], labels: NDArray[np.int64], strength: float) -> Regression:
    """Fit a regression to features (N, F); strength: C, the more the weaker the penalty. Biases have no penalty."""
    return _fit_in(_Basis.of(features), labels, strength)


def _fit_in(basis: _Basis, labels: NDArray[np.int64], strength: float) -> Regression:
    known, numbers = np.unique(labels, return_inverse=True)
    inputs = torch.from_numpy(basis.inputs)
    targets = torch.from_numpy(numbers)
    weight = torch.zeros(len(known), inputs.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(len(known), dtype=torch.float64, requires_grad=True)
    penalty = 1 / (strength * len(targets))
    solver = torch.optim.LBFGS(
        [weight, bias], max_iter=2000, tolerance_grad=1e-7, tolerance_change=1e-13, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        solver.zero_grad()
        errors = functional.cross_entropy(functional.linear(inputs, weight, bias), targets)
        # Scaled so that one tolerance serves all strengths.
        value = (penalty / 2 * weight.square().sum() + errors) / (1 + penalty)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    solver.step(loss)  # type: ignore[no-untyped-call]
    weights = weight.detach().numpy() @ basis.directions
    return Regression(basis.mean, basis.deviation, known, weights, bias.detach().numpy())


def choose_strength(
    features: NDArray[Any], labels: NDArray[np.int64], parts: Sequence[int]
) -> tuple[float, list[float]]:
    """Return the strength with the best top-1 over the parts, of equal ones the smallest; and top-1 of each, percent.

    parts: of each video, 0 to n - 1; each is predicted by a regression that was fitted to the others.
    """
    part_of = np.asarray(parts)
    right = np.zeros(len(STRENGTHS))
    folds = int(part_of.max()) + 1
    for part in followed(range(folds), folds, "folds fitted"):
        held_out = part_of == part
        basis = _Basis.of(features[~held_out])
        for number, strength in enumerate(STRENGTHS):
            regression = _fit_in(basis, labels[~held_out], strength)
            logits = regression.logits(features[held_out], int(labels.max()) + 1)
            right[number] += (logits.argmax(1) == labels[held_out]).sum()
    found: list[float] = (100 * right / len(labels)).tolist()
    return STRENGTHS[int(np.argmax(found))], found


def parts_within(manifest: Manifest, videos: NDArray[np.int64], seed: int) -> list[int] | None:
    """Return the part of each video in a cross-validation that keeps groups together; None where there is none.

    There are five parts, or fewer where a class has clips in fewer groups.
    """
    rows = [manifest.row(video) for video in videos.tolist()]
    for folds in range(_FOLDS, 1, -1):
        try:
            return parts_of(rows, manifest.class_names, folds, seed)
        except UserError:  # a class with clips in too few groups
            continue
    return None


def baseline(
    train: Scores, val: Scores, parts: Sequence[int] | None, num_classes: int
) -> tuple[dict[str, Any], Scores]:
    """Return the values of baseline.json, and the regression's logits of the validation videos.

    train, val: features; parts: as in choose_strength, of the training videos that were read; without them C is 1.
    """
    features = train.scores[train.is_read]
    labels = train.labels[train.is_read]
    strength, found = (1.0, []) if parts is None else choose_strength(features, labels, parts)
    regression = fit(features, labels, strength)
    logits = np.full((len(val.videos), num_classes), np.nan, np.float32)
    logits[val.is_read] = regression.logits(val.scores[val.is_read], num_classes)
    scores = Scores(val.videos, val.labels, logits, val.is_read)
    top1 = scores.value("top1")
    values = {
        "top1": top1,
        "top1_interval": list(interval(top1, len(val.videos))),
        "videos": len(val.videos),
        "training_videos": len(labels),
        "features": features.shape[1],
        "strength": strength,
        "folds": 0 if parts is None else max(parts) + 1,
        "strengths": dict(zip(map(str, STRENGTHS), found, strict=False)),
    }
    return values, scores
