"""Notice a network that does not learn: its loss stays that of a guess, or one class takes all its predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from summit_train.core.text import share
from summit_train.evaluation.scores import Scored
from summit_train.plan import Plan
from summit_train.spec import Spec

# A network that guesses has the loss ln(classes) to within the noise of a batch; one that learns has left it by more
# than this part, also TSN on a task that it cannot solve, whose mean goes up before it goes down.
_NEAR = 0.02
_FEWEST_STEPS = 50  # of a mean loss: a network that learns may need them to leave that of a guess
# One class takes a few percent less than all where single clips are far from the others. A class that is nearly all of
# the list is rightly predicted. With fewer videos a class may take all of them by chance.
_NEARLY_ALL = 0.98
_MOST_OF_LIST = 0.9
_FEWEST_VIDEOS = 20
_VIDEOS_A_CLASS = 4
# BN's running statistics lag in the first epochs: a TSM that ends at 97.5 % takes all videos for one class until then.
_EARLY = 1 / 3
_CAUSES = (
    "usual causes: a learning rate too high for the classifier (optimizer.base_lr, optimizer.head_lr_factor), one too "
    "low, too much of the network frozen (model.freeze_*, optimizer.freeze), shuffled labels"
)


class Health:
    """Reports a run with one class a clip that does not learn, once by its loss and once by its predictions.

    The loss: its mean over a tenth of the steps, 50 at least, from the end of the warm-up. The predictions: of two
    validations in a row, or of the last one, beyond the first third of the run.
    """

    def __init__(self, spec: Spec, plan: Plan) -> None:
        self._spec = spec
        self._plan = plan
        first = plan.warmup_steps + 1
        number = max(_FEWEST_STEPS, plan.total_steps // 10)
        self._window = range(first, first + number)
        self._losses = list[float]()
        self._was_one_class = False
        self._is_reported = False

    def of_step(self, step: int, loss: float) -> str | None:
        """Take in the loss of a step; return what is wrong with the mean, at its last step."""
        loss_spec = self._spec.loss
        classes = self._spec.model.num_classes
        # Class weights change the loss of a guess.
        if step not in self._window or loss_spec.kind != "softmax" or loss_spec.class_weights is not None:
            return None
        self._losses.append(loss)
        if step != self._window[-1] or len(self._losses) < _FEWEST_STEPS:  # fewer: resumed within
            return None
        mean = math.fsum(self._losses) / len(self._losses)
        guess = math.log(classes)
        if not abs(mean - guess) <= _NEAR * guess:
            return None
        what = f"the mean loss of steps {self._window[0]:,} to {step:,} is {mean:.3f}, that of a guess, ln({classes})"
        return f"the network does not learn: {what} = {guess:.3f}; {_CAUSES}"

    def of_validation(self, step: int, scored: Scored, names: Sequence[str]) -> str | None:
        """Take in the scores after a step; return what is wrong with their predictions."""
        scores = scored.class_scores
        if scores is None or scores.kind != "softmax" or step < _EARLY * self._plan.total_steps:
            return None
        labels = scores.labels[scores.is_read]
        predicted = scores.scores[scores.is_read].argmax(1)
        classes = scores.scores.shape[1]
        if len(labels) < max(_FEWEST_VIDEOS, _VIDEOS_A_CLASS * classes):
            return None
        top = int(np.bincount(predicted, minlength=classes).argmax())
        taken = float((predicted == top).mean())
        labelled = float((labels == top).mean())
        is_one_class = taken >= _NEARLY_ALL and labelled < _MOST_OF_LIST
        is_sure = self._was_one_class or step >= self._plan.total_steps
        self._was_one_class = is_one_class
        if not is_one_class or not is_sure or self._is_reported:
            return None
        self._is_reported = True
        name = names[top] if top < len(names) else str(top)
        what = f"{share(taken)} of the validation videos are predicted as {name!r}; {share(labelled)} belong to it"
        return f"the network does not learn: {what}; {_CAUSES}"
