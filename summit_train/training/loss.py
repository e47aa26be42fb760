"""The training loss of a micro-batch: softmax or binary cross-entropy, with class weights and label smoothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from summit_train.core.errors import UserError
from summit_train.core.own_parts import OwnPart
from summit_train.evaluation.scores import Scored
from summit_train.models.precision import parameter_type
from summit_train.spec import Spec, own_parts

_AT_ONCE = 1024  # videos of whose logits there is a copy


class TaskLoss(Protocol):
    """The loss of a task."""

    def of_batch(
        self, outputs: torch.Tensor, targets: torch.Tensor, size: tuple[int, int], seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss of a micro-batch and the number of its clips that are right.

        size: the frames' height and width in pixels. seed: of random draws on the device.
        """

    def of_scores(self, scored: Scored) -> float | None:
        """Return the mean loss of validation videos; None where there is none."""

    def to(self, device: torch.device) -> TaskLoss:
        """Return the loss for outputs on `device`. Raises UserError if a loss of the user's own fails there."""


@dataclass(frozen=True)
class Loss:
    """The mean over the n clips of a micro-batch; with targets t, logits x and class weights w (default 1)

        softmax:  -1/n      sum_ik w_k t_ik log softmax(x_i)_k
        binary:   -1/(n K)  sum_ik [w_k t_ik log s(x_ik) + (1 - t_ik) log(1 - s(x_ik))],   s the logistic function

    A weighted loss is divided by n, too, not by the clips' weights as torch.nn.CrossEntropyLoss does: those differ from
    micro-batch to micro-batch, and the gradient would no longer be that of one loss over the global batch.

    label_smoothing: e in t (1 - e) + e / K (Szegedy et al., "Rethinking the Inception architecture", section 7), of
    binary in t (1 - e) + e / 2. class_weights: (K,), of the logits' type and device, or None.
    """

    kind: str = "softmax"
    label_smoothing: float = 0.0
    class_weights: torch.Tensor | None = None

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of logits (n, K).

        targets: class numbers, int64 (n,); of clips of several bool (n, K); or shares, floats (n, K), as mixing makes.
        """
        if self.kind == "binary":
            hot = one_hot(targets, logits) * (1 - self.label_smoothing) + self.label_smoothing / 2
            return functional.binary_cross_entropy_with_logits(logits, hot, pos_weight=self.class_weights)
        if self.class_weights is None:
            return functional.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        weights = self.class_weights
        smoothing = self.label_smoothing
        total = functional.cross_entropy(logits, targets, weights, label_smoothing=smoothing, reduction="sum")
        return total / len(logits)

    def of_scores(self, scored: Scored) -> float | None:
        """Return the mean loss of the videos that could be read, by their averaged logits; None without any."""
        scores = scored.class_scores
        if scores is None or not scores.is_read.any():
            return None
        read = np.flatnonzero(scores.is_read)
        double = replace(self, class_weights=None if self.class_weights is None else self.class_weights.double())
        total = 0.0
        for part in np.split(read, range(_AT_ONCE, len(read), _AT_ONCE)):
            logits = torch.from_numpy(scores.scores[part])
            labels = torch.from_numpy(scores.labels[part])
            total += len(part) * double(logits.double(), labels).item()
        return total / len(read)

    def of_batch(
        self, outputs: torch.Tensor, targets: torch.Tensor, size: tuple[int, int], seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self(outputs, targets), num_correct(outputs, targets)

    def to(self, device: torch.device) -> Loss:
        return self if self.class_weights is None else replace(self, class_weights=self.class_weights.to(device))


@dataclass(frozen=True, kw_only=True)
class OwnLoss(Loss):
    """The mean of a loss of the user's own (docs/own_parts.md); kind: the built-in one that it is like.

    part: named in messages. function: takes logits (n, K) and targets, and returns the loss of each clip, (n,), or the
    mean. are_shares: targets are always floats (n, K), because mixing makes some of them so. num_classes, dtype: of the
    training logits.
    """

    part: OwnPart
    function: Callable[..., Any]
    are_shares: bool
    num_classes: int
    dtype: torch.dtype

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        targets = one_hot(targets, logits) if self.are_shares else targets
        losses = self.function(logits.clone(), targets.clone())  # it may work in place; num_correct reads both later
        shapes = ((len(logits),), ())
        if isinstance(losses, torch.Tensor) and losses.is_floating_point() and losses.shape in shapes:
            return losses.mean()
        got = f"{losses.dtype} {tuple(losses.shape)}" if isinstance(losses, torch.Tensor) else type(losses).__name__
        raise self.part.wrong(f"the loss of each clip, floats ({len(logits)},), or their mean", got)

    def of_batch(
        self, outputs: torch.Tensor, targets: torch.Tensor, size: tuple[int, int], seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Seed torch's generators for a draw that `check` did not see; others do not change."""
        with torch.random.fork_rng([outputs.device] if outputs.is_cuda else []):
            torch.default_generator.manual_seed(seed)
            if outputs.is_cuda:
                torch.cuda.manual_seed(seed)
            return super().of_batch(outputs, targets, size, seed)

    def to(self, device: torch.device) -> OwnLoss:
        if device.type == "cpu":  # where it was tried
            return self
        # It may have made tensors on the CPU in its first call.
        loss = replace(self, function=self.part.make("logits", "targets"))
        loss.check(self.dtype, device)
        return loss

    def check(self, dtype: torch.dtype, device: torch.device) -> None:
        """Try the loss on random logits. Raises UserError if training could not start with it, or not repeat."""
        module = self.function if isinstance(self.function, nn.Module) else nn.Module()
        if list(module.parameters()):
            raise UserError(f"{self.part.key}: {self.part.name} must have no parameters: nothing trains them")
        buffers = [buffer.clone() for buffer in module.buffers()]
        draw = torch.Generator().manual_seed(0)
        batches = [torch.randn(n, self.num_classes, generator=draw).to(device, dtype).requires_grad_() for n in (3, 1)]
        labels = torch.arange(3, device=device) % self.num_classes
        loss, _, again = (self(batches[n], labels[: len(batches[n])]) for n in (0, 1, 0))
        if not loss.requires_grad:
            raise self.part.wrong("a function of the logits", "one without a gradient")
        if not torch.isfinite(loss):
            raise self.part.wrong("finite losses", f"{loss.item()} of logits of a normal distribution")
        if not torch.equal(loss, again) or not all(map(torch.equal, buffers, module.buffers())):
            right = "draw nothing, and keep no state between calls"
            wrong = f"{self.part.name} must return the same for the same scores and labels"
            raise UserError(f"{self.part.key}: {wrong}; {right}")


def one_hot(targets: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return targets as shares, (n, K), of the type of the logits."""
    if targets.dim() == 2:
        return targets.to(logits.dtype)
    return torch.zeros_like(logits).scatter_(1, targets[:, None], 1.0)


def num_correct(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the number of clips whose highest logit is of their class; of a mixed clip, of its largest share's."""
    best = logits.detach().argmax(1)
    if targets.dim() == 1:
        return (best == targets).sum()
    shares = one_hot(targets, logits)
    predicted = shares.gather(1, best[:, None])[:, 0]
    return ((predicted > 0) & (predicted == shares.amax(1))).sum()


def build_loss(spec: Spec, clips_of_class: Sequence[int] = ()) -> TaskLoss:
    """Return the loss of a spec, on the CPU.

    clips_of_class: the training clips of the first classes, for balanced class weights; the others have none.
    """
    if spec.task == "detection":
        from summit_train.tasks.detection.loss import DetectionLoss

        assert spec.model.detector is not None
        return DetectionLoss(spec.model.detector, spec.model.num_classes)
    dtype = parameter_type(spec.precision)
    for part in own_parts(spec, "loss"):
        loss = OwnLoss(
            spec.loss.base,
            part=part,
            function=part.make("logits", "targets"),
            are_shares=spec.loss.base == "binary" or spec.data.mix is not None,
            num_classes=spec.model.num_classes,
            dtype=dtype,
        )
        for kind in (dtype, torch.float64):  # validation has doubles
            loss.check(kind, torch.device("cpu"))
        return loss
    weights = spec.loss.class_weights
    if weights == "balanced":
        total = sum(clips_of_class)
        known = sum(count > 0 for count in clips_of_class)
        counts = [*clips_of_class, *[0] * (spec.model.num_classes - len(clips_of_class))]
        # The weight of a class without a clip matters only to smoothed labels.
        weights = tuple(total / (known * count) if count else 1.0 for count in counts)
    tensor = None if weights is None else torch.tensor(weights, dtype=dtype)
    return Loss(spec.loss.kind, spec.loss.label_smoothing, tensor)
