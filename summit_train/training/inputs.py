"""Read a run's spec and lists, before its ranks meet, and make what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from summit_train.data.dataset import Dataset, open_datasets
from summit_train.data.video.own_augment import try_augment
from summit_train.evaluation.measures import Measures, open_measures
from summit_train.models.network import check_batch
from summit_train.plan import Plan, make_plan
from summit_train.spec import Spec, own_parts
from summit_train.training.loss import TaskLoss, build_loss
from summit_train.training.state import Extension, Origin


@dataclass(frozen=True)
class Inputs:
    """The user's input, read and checked for consistency before the ranks communicate. Each part is made once, here.

    loss: on the CPU. measures: of validation videos. extension: what --more-epochs asks for. origin:
    the checkpoint that --from names.
    """

    spec: Spec
    plan: Plan
    train: Dataset
    val: Dataset
    loss: TaskLoss
    measures: Measures
    extension: Extension | None = None
    origin: Origin | None = None

    @property
    def datasets(self) -> dict[str, Dataset]:
        return {"train": self.train, "val": self.val}


def read_inputs(spec: Spec, ranks: int, extension: Extension | None = None, origin: Origin | None = None) -> Inputs:
    """Read the lists, and make what follows from the spec and them. Raises UserError."""
    train, val = open_datasets(spec)
    loss, measures = loss_and_measures(spec, list(train.manifest.clips_per_class.values()))
    check_batch(spec)
    plan = make_plan(spec, ranks, len(train))
    return Inputs(spec, plan, train, val, loss, measures, extension, origin)


def loss_and_measures(spec: Spec, clips_of_class: Sequence[int] = ()) -> tuple[TaskLoss, Measures]:
    """Call each part of the user's own once, then return the spec's loss and measures.

    clips_of_class: as in build_loss. Raises UserError if a part returns a wrong type or shape.
    """
    for part in own_parts(spec, "data"):
        try_augment(part, spec.data.clip_shape)
    return build_loss(spec, clips_of_class), open_measures(spec)
