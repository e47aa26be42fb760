"""The small tasks of DATE with their baselines, for bench/date.py.

Source: You et al., *Large-Batch Training for LSTM and Beyond* (2019), Table 2 and sections 3.5, 3.6, 4.1 to 4.3. What
the paper leaves open is marked as ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from date_data import SEQUENCE, Data, read_mnist, read_ptb
from date_networks import LeNet, Network, RowsLSTM, WordLSTM

from summit_train.spec.optimizer import OptimizerSpec, ScheduleSpec


@dataclass(frozen=True)
class Task:
    """A task with its baseline: `optimizer` and `schedule` at optimizer.base_batch samples a step.

    warmup_epochs: of the baseline, for LEGW to scale. loss_factor: the paper's loss over this program's; its LRs are
    for that loss. adam_lrs, grid_lrs: what the paper tunes over, thinned. batches: with their first the baseline's.
    published: (method, batch) -> the paper's test figure. samples: of a virtual GPU, at most.
    """

    title: str
    metric: str
    build: Callable[[], Network]
    read: Callable[[Path], Data]
    optimizer: OptimizerSpec
    schedule: ScheduleSpec
    warmup_epochs: float
    batches: tuple[int, ...]
    samples: int
    adam_lrs: tuple[float, ...]
    grid_lrs: tuple[float, ...]
    published: dict[tuple[str, int], float]
    loss_factor: float = 1.0

    @property
    def is_loss(self) -> bool:
        """Return whether less is better."""
        return self.metric == "perplexity"


_MNIST_ADAM = (0.0002, 0.0005, 0.001)  # section 4.2: 0.0001, 0.0002, ... 0.0010
_CONSTANT = partial(ScheduleSpec, warmup_epochs=0, decay="none")
_PLAIN = {"weight_decay": 0.0, "lr_scaling": "none"}

TASKS = {
    # Section 3.5. Ours: LR, epochs, and a warm-up that takes the part of the run that it takes in section 3.6.
    "lenet": Task(
        title="LeNet on MNIST, RMSprop",
        metric="accuracy",
        build=LeNet,
        read=read_mnist,
        optimizer=OptimizerSpec(name="rmsprop", base_lr=1e-3, base_batch=256, **_PLAIN),
        schedule=_CONSTANT(epochs=15),
        warmup_epochs=0.25,
        batches=(256, 1024, 8192),
        samples=1024,
        adam_lrs=_MNIST_ADAM,
        grid_lrs=(5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
        published={("baseline", 256): 99.0, ("legw", 8192): 97.2, ("lars", 8192): 78.2, ("date", 8192): 99.0},
    ),
    # Section 3.6, the worked example.
    "lenet_momentum": Task(
        title="LeNet on MNIST, momentum: the worked example",
        metric="accuracy",
        build=LeNet,
        read=read_mnist,
        optimizer=OptimizerSpec(name="sgd", base_lr=1.25e-3, base_batch=1024, **_PLAIN),
        schedule=ScheduleSpec(epochs=30, warmup_epochs=2, decay="steps", milestones=(10, 20, 27)),
        warmup_epochs=2,
        batches=(1024, 8192),
        samples=1024,
        adam_lrs=_MNIST_ADAM,
        grid_lrs=(0.01, 0.02, 0.04, 0.08, 0.16),
        published={},
    ),
    # Section 4.1.1. Ours: LR at 128 and warm-up.
    "lstm": Task(
        title="LSTM on the rows of MNIST",
        metric="accuracy",
        build=RowsLSTM,
        read=read_mnist,
        optimizer=OptimizerSpec(name="sgd", base_lr=0.1, base_batch=128, **_PLAIN),
        schedule=_CONSTANT(epochs=25),
        warmup_epochs=0.1,
        batches=(128, 512, 2048, 8192),
        samples=512,
        adam_lrs=_MNIST_ADAM,
        grid_lrs=(0.01, 0.02, 0.04, 0.08, 0.16),
        published={("baseline", 128): 98.7},
    ),
    # Section 4.1.2, the baseline as in the program that it names: SGD, LR 1, halved after each epoch from the fifth.
    # That program sums the loss over the steps of a sequence, where this one takes the mean. Ours: the warm-up.
    "ptb": Task(
        title="PTB, small",
        metric="perplexity",
        build=WordLSTM,
        read=read_ptb,
        optimizer=OptimizerSpec(name="sgd", momentum=0.0, base_lr=1.0, base_batch=20, clip_norm=5.0, **_PLAIN),
        schedule=ScheduleSpec(epochs=13, warmup_epochs=0, decay="steps", milestones=tuple(range(4, 13)), factor=0.5),
        warmup_epochs=0.1,
        batches=(20, 80, 320, 640),
        samples=20,
        adam_lrs=(0.001, 0.002, 0.005),  # section 4.2: 0.0001 ... 0.0020 and 0.001 ... 0.020
        grid_lrs=(0.1, 0.2, 0.4, 0.8, 1.6),  # section 4.3: "only the range from 0.1 to 1.6 is effective"
        published={("baseline", 20): 116.0},
        loss_factor=float(SEQUENCE),
    ),
}
