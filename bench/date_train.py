"""Train one run of a task of DATE on all ranks, for bench/date.py: its solver, its schedule, its epochs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from date_data import Data, Share
from date_networks import Network
from date_tasks import TASKS, Task

from summit_train.core import rng
from summit_train.core.comm import World
from summit_train.core.errors import UserError
from summit_train.models.precision import parameter_type
from summit_train.optim.schedule import Schedule
from summit_train.plan import plan_schedule
from summit_train.spec.optimizer import OptimizerSpec, ScheduleSpec, TrustRatioSpec
from summit_train.training.run import drive_solver
from summit_train.training.step import StepSettings

Tell = Callable[[int], None]  # hears of samples that were trained on


@dataclass(frozen=True)
class Run:
    """One training of a task. lr: of the baseline for the method to scale, or None for the task's own."""

    task: str
    method: str
    batch: int
    lr: float | None
    seed: int
    epochs: int
    precision: str
    bounds: tuple[float, float] | None

    @property
    def name(self) -> str:
        """Return the name of the result's file."""
        lr = "" if self.lr is None else f"_lr{self.lr:g}"
        bounds = "" if self.bounds is None else "_bounds{:g}-{:g}".format(*self.bounds)
        return (
            f"{self.task}_{self.method}_{self.batch}{lr}{bounds}_{self.epochs}epochs_{self.precision}_seed{self.seed}"
        )


def recipe(task: Task, run: Run, num_samples: int) -> tuple[OptimizerSpec, Schedule]:
    """Return a run's solver and the course of its LR. Raises PlanError where the warm-up takes the whole run.

    With f = task.loss_factor the paper's gradient G is f times ours, g. LR G = (LR f) g; but LR |w| / |G| G =
    LR |w| / |g| g, so where a trust ratio holds, its bounds are f times as large and the LR is the paper's. Adam's
    update does not depend on f.
    """
    base, factor = task.optimizer, task.loss_factor
    lr = base.base_lr if run.lr is None else run.lr
    common = {"base_batch": base.base_batch, "weight_decay": base.weight_decay}
    if base.clip_norm is not None:
        common["clip_norm"] = base.clip_norm / factor
    schedule = task.schedule.model_copy(update={"epochs": run.epochs})
    if run.method == "adam":
        solver = OptimizerSpec(name="adam", base_lr=lr, lr_scaling="none", **common)
        schedule = ScheduleSpec(epochs=run.epochs, warmup_epochs=0, decay="none")
        return solver, plan_schedule(solver, schedule, run.batch, num_samples)
    trust, scaling = _trust_ratio(run, factor), {"baseline": "none", "grid": "none", "linear": "linear"}
    solver = OptimizerSpec(
        name=base.name,
        momentum=base.momentum,
        base_lr=lr * (factor if trust is None else 1.0),
        lr_scaling=scaling.get(run.method, "sqrt"),
        trust_ratio=trust,
        **common,
    )
    if run.method in ("legw", "lars", "date"):
        schedule = ScheduleSpec(
            epochs=run.epochs, warmup_epochs=task.warmup_epochs, warmup_scaling="linear", decay="linear"
        )
    return solver, plan_schedule(solver, schedule, run.batch, num_samples)


def _trust_ratio(run: Run, factor: float) -> TrustRatioSpec | None:
    if run.method == "lars":
        return TrustRatioSpec(kind="lars")
    if run.method != "date":
        return None
    usual = TrustRatioSpec(kind="bounded")
    lower, upper = run.bounds or (usual.lower, usual.upper)
    return TrustRatioSpec(kind="bounded", lower=lower * factor, upper=upper * factor)


def share_of(run: Run, num_samples: int, samples: int, rank: int, ranks: int) -> Share:
    """Return a rank's share of a batch: virtual GPUs of at most `samples`. Raises UserError where there is none."""
    if run.batch > num_samples:
        raise UserError(f"--batches: {run.batch:,} is more than the {num_samples:,} training samples")
    virtual_gpus = max(1, run.batch // samples)
    if run.batch % virtual_gpus or virtual_gpus % ranks:
        raise UserError(
            f"--samples: a batch of {run.batch:,} makes {virtual_gpus} virtual GPUs of {samples:,}, which has to leave "
            f"no rest and give each of {ranks} ranks as many; try --samples {max(1, run.batch // ranks)}"
        )
    return Share(rank, ranks, virtual_gpus, run.batch // virtual_gpus, num_samples // run.batch)


class Trainer:
    """One run on one rank: network, solver, schedule and step."""

    def __init__(self, run: Run, data: Data, share: Share, world: World, device: torch.device) -> None:
        self.run, self.data, self.share, self.world, self.device = run, data, share, world, device
        self.solver, self.schedule = recipe(TASKS[run.task], run, data.num_samples)
        self.network = fresh_network(run, world, device)
        clip_norm, modality = self.solver.clip_norm, data.modality
        settings = StepSettings(run.seed, len(share.mine), run.precision, clip_norm, modality=modality)
        self._step = drive_solver(self.solver, settings, world, self.network, device, {})

    def train(self, tell: Tell) -> dict[str, Any]:
        """Train and score epoch by epoch; return what came out, as one JSON object. Collective.

        A run ends early, as diverged, after an epoch in which no update was finite.
        """
        began, curve, skipped = time.perf_counter(), list[dict[str, Any]](), 0
        for epoch in range(self.run.epochs):
            loss, skipped = self._epoch(epoch, tell)
            scores = self.world.broadcast(self.data.score(self.network, self.device) if self.world.rank == 0 else {})
            curve.append({"epoch": epoch + 1, "loss": loss, "skipped": skipped, **scores})
            if skipped == self.share.steps:
                break
        values = asdict(self.run) | {
            "peak_lr": self.schedule.peak_lr,
            "warmup_steps": int(self.schedule.warmup_steps),
            "total_steps": self.schedule.total_steps,
            "virtual_gpus": self.share.virtual_gpus,
            "solver": self.solver.model_dump(mode="json"),
            "diverged": skipped == self.share.steps,
            "test": curve[-1]["test"],
            "curve": curve,
            "seconds": time.perf_counter() - began,
        }
        return without_infinity(values)

    def _epoch(self, epoch: int, tell: Tell) -> tuple[float, int]:
        """Return the mean loss and the number of updates that were skipped as not finite."""
        losses, skipped, share = list[float](), 0, self.share
        self.network.begin_epoch(len(share.mine))
        batches = self.data.epoch(self.run.seed, share, epoch)
        for step, micro_batches in enumerate(batches, epoch * share.steps):
            result = self._step(micro_batches, self.schedule.learning_rate(step))
            vote = result.read(self.run.batch, share.virtual_gpus, self.world.size)
            losses.append(vote.loss)
            skipped += vote.skipped
            tell(self.run.batch)
        return sum(losses) / len(losses), skipped


def fresh_network(run: Run, world: World, device: torch.device) -> Network:
    """Build the run's network with weights that the seed alone decides, the same on every rank. Collective."""
    with torch.random.fork_rng():
        torch.manual_seed(rng.seed_of(run.seed, "weights"))
        network = TASKS[run.task].build().to(device, parameter_type(run.precision))
    network.load_state_dict(world.broadcast({name: value.cpu() for name, value in network.state_dict().items()}))
    return network


def without_infinity(value: Any) -> Any:
    """Return a JSON value with null for each number that is not finite, which JSON has not."""
    if isinstance(value, dict):
        return {key: without_infinity(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_infinity(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
