"""What each task has of its own."""

from __future__ import annotations

from summit_train.detection.loss import DetectionLoss
from summit_train.detection.scoring import DetectionScorer
from summit_train.evaluation.scoring import Scorer
from summit_train.spec import Spec


def loss_of(spec: Spec) -> DetectionLoss | None:
    """Return the loss of a task that has its own; None for classification, whose loss is that of training/loss.py."""
    detector = spec.model.detector
    return None if detector is None else DetectionLoss(detector, spec.model.num_classes)


def scorer_of(spec: Spec) -> type[Scorer]:
    """Return the class that scores the validation videos of a spec."""
    return Scorer if spec.model.detector is None else DetectionScorer
