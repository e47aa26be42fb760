"""Put a run together: data, model, optimizer, and the checkpoint that it resumes from."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from summit_train.core.checkpoints import checkpoint_path, measures_path
from summit_train.core.comm import World
from summit_train.core.machine import raise_open_files, rank_cpus
from summit_train.core.run_lock import RunLock
from summit_train.core.saved import Checkpoint, check_fit
from summit_train.core.text import counted
from summit_train.core.watch import Watchdog
from summit_train.data.bad_clips import BadClips
from summit_train.data.batches.order import PREFETCHED_PER_WORKER
from summit_train.data.batches.workers import check_shared_memory
from summit_train.data.dataset import Dataset, open_datasets
from summit_train.data.video.own_augment import try_augment
from summit_train.data.video.source import check_temporary_folder
from summit_train.evaluation.measures import Measures, open_measures
from summit_train.models import VideoNetwork
from summit_train.models.by_name import lr_factors
from summit_train.models.network import check_arithmetic, check_batch, initial_network
from summit_train.optim.solvers import build_solver, parameter_groups
from summit_train.optim.trust import TrustRatio
from summit_train.plan import Plan, make_plan
from summit_train.spec import Spec, own_parts
from summit_train.spec.keys import OptimizerSpec
from summit_train.training.agreement import experiment_of
from summit_train.training.averaging import AveragingStep
from summit_train.training.checkpoint import (
    Writer,
    prune_checkpoints,
    serialised,
    shared_starting_state,
    starting_state,
    write_checkpoint,
)
from summit_train.training.decisions import Decisions
from summit_train.training.health import Health
from summit_train.training.loss import TaskLoss, build_loss
from summit_train.training.noise import NoiseScale
from summit_train.training.state import Extension, Validation
from summit_train.training.step import StepSettings, TrainStep

_OPEN_FILES = 100  # of a rank besides its batches: libraries, logs, pipes of workers


@dataclass(frozen=True)
class Inputs:
    """The user's input, read and checked for consistency before the ranks communicate. Each part is made once, here.

    loss: on the CPU. measures: of validation videos.
    """

    spec: Spec
    plan: Plan
    train: Dataset
    val: Dataset
    loss: TaskLoss
    measures: Measures

    @property
    def datasets(self) -> dict[str, Dataset]:
        return {"train": self.train, "val": self.val}


def read_inputs(spec: Spec, ranks: int) -> Inputs:
    """Read the lists, and make what follows from the spec and them. Raises UserError."""
    train, val = open_datasets(spec)
    loss, measures = loss_and_measures(spec, list(train.manifest.clips_per_class().values()))
    check_batch(spec)
    return Inputs(spec, make_plan(spec, ranks, len(train)), train, val, loss, measures)


def loss_and_measures(spec: Spec, clips_of_class: Sequence[int] = ()) -> tuple[TaskLoss, Measures]:
    """Return the spec's loss and measures, after a call of each part of the user's own.

    clips_of_class: as in build_loss. Raises UserError for a part that does not do what it must.
    """
    for part in own_parts(spec, "data"):
        try_augment(part, spec.data.clip_shape)
    return build_loss(spec, clips_of_class), open_measures(spec)


def check_room(spec: Spec, local_ranks: int) -> None:
    """Raise UserError where this node has no room for what the loader workers exchange with a rank."""
    workers = spec.data.on_node(local_ranks).num_workers()
    if workers:
        check_temporary_folder()
        clips = local_ranks * spec.scale.clips_per_gpu * spec.data.repeats
        check_shared_memory(clips * math.prod(spec.data.clip_shape), workers)


class Run:
    """One run on one rank.

    start_step: the updates in the checkpoint that it resumes from. notes: lines for people. loss, measures: of
    validation videos, on the CPU. writer: writes rank 0's checkpoints.
    """

    def __init__(
        self,
        inputs: Inputs,
        network: VideoNetwork,
        world: World,
        device: torch.device,
        lock: RunLock | None = None,
        watchdog: Watchdog | None = None,
        *,
        extension: Extension | None = None,
    ) -> None:
        """Build the run as its spec says, or as the newest whole checkpoint left it. Collective.

        network: the spec's initial one, on `device`. lock: rank 0's, checked at each checkpoint. extension: as in
        starting_state, which raises CheckpointError. Raises UserError where this machine's gradients would be wrong.
        """
        spec = inputs.spec
        plan = inputs.plan
        self.spec = spec
        self.plan = plan
        self.world = world
        self.device = device
        self._lock = lock
        self.watchdog = watchdog or Watchdog(world, None)
        # --- data
        may_open = raise_open_files()
        self.train_set = replace(inputs.train, data=spec.data.on_node(world.local_size))
        self.val_set = inputs.val
        # --- network: its weights are those of the checkpoint, pretrained ones, or those that it has
        world.together(lambda: check_arithmetic(spec, device))
        self.model = network
        find = partial(starting_state, spec, plan, self.train_set, self.model, extension=extension)
        saved, resumed = shared_starting_state(find, spec.run_path, world, self.watchdog)
        step = saved.get("step", 0)
        checkpoint = Checkpoint(checkpoint_path(spec.run_path, step), saved, world)
        if saved:
            checkpoint.restore(self.model)
        else:
            world.broadcast_tensors(self.model.state_dict())
        # --- step
        self.step = build_step(spec, plan, world, self.model, device, inputs.loss)
        self.step.unfreeze(max(0, step - 1) // plan.steps_per_epoch)  # as in the update before the checkpoint
        if saved:
            self.step.restore(checkpoint)
        unfrozen = self.step.unfreeze(step // plan.steps_per_epoch)
        # --- records
        self.measures = inputs.measures
        self.loss = inputs.loss
        self._experiment = experiment_of(spec, plan, self.train_set, self.model)
        self.health = Health(spec, plan)
        self.noise = NoiseScale(plan.clips_per_gpu, plan.virtual_gpus)
        self.decisions = Decisions(spec, plan.ladder)
        clips_per_epoch = plan.clips - plan.dropped_clips_per_epoch
        self.bad_clips = BadClips(world, spec.run_path, clips_per_epoch, spec.data.max_bad_fraction)
        self.start_step = self._saved_step = step
        self._restore_records(checkpoint)
        self.writer = Writer(background=spec.checkpoint.background)
        self._saved_at = time.monotonic()
        self.notes = [*_notes(self, may_open, unfrozen), *resumed]

    def _restore_records(self, checkpoint: Checkpoint) -> None:
        path = checkpoint.path
        saved = checkpoint.state
        for name, state in self._parts().items():
            if name in saved:
                check_fit(path, name, saved[name], state)
        if "bad_clips" in saved:
            self.bad_clips.load_state_dict(saved["bad_clips"])
        if "noise_scale" in saved:
            self.noise.load_state_dict(saved["noise_scale"])
        self.decisions.load_state_dict(saved)
        best = self.decisions.best_checkpoint
        if not self.world.broadcast(best is None or best.exists()):  # pruned for a better one, which is damaged
            self.decisions.forget_best()
        self.bad_clips.forget_after(self.start_step)

    def is_checkpoint_due(self) -> bool:
        """Return whether rank 0 asks for a checkpoint: by time, or because the last one could not be written.

        The error of that one then ends all ranks in the next.
        """
        minutes = (time.monotonic() - self._saved_at) / 60
        is_late = minutes >= (self.spec.checkpoint.every_minutes or math.inf)
        return self.world.rank == 0 and (self.writer.has_failed or is_late)

    def save(self, step: int) -> None:
        """Write the checkpoint after `step` updates on rank 0 and delete those that are not kept. Collective.

        With checkpoint.background rank 0 returns with its bytes in memory. Raises AgreedError where the checkpoint
        before could not be written, or another run has taken the directory.
        """
        path = checkpoint_path(self.spec.run_path, step)
        self.world.together(partial(self._make_ready_to_save, path))
        parts = self.step.checkpoint(path, step)
        self._saved_step = step
        if self.world.rank != 0:
            return
        state = parts | {
            "format": 1,
            "step": step,
            "epoch": step // self.plan.steps_per_epoch,
            "model": self.model.state_dict(),
            **self._parts(),
            "backend": self.world.backend,
            "experiment": self._experiment.values(),
            "spec": self.spec.model_dump(mode="json"),
            # So that the file alone is enough to use the network.
            "classes": (classes := self.train_set.manifest.classes) and list(classes),
        }
        content = serialised(state)
        best = self.decisions.best_checkpoint

        def write() -> None:
            write_checkpoint(path, content)
            prune_checkpoints(self.spec, self.plan.steps_per_epoch, path, best)

        self.writer.start(write)
        self._saved_at = time.monotonic()

    def keep_best(self, step: int) -> None:
        """Keep the checkpoint of `step` in place of the former best. Collective."""

        def keep() -> None:
            self.writer.wait()  # best.json names no file that is half written
            self.decisions.write_best()
            newest = checkpoint_path(self.spec.run_path, step)
            prune_checkpoints(self.spec, self.plan.steps_per_epoch, newest, self.decisions.best_checkpoint)

        self.world.from_first(keep)

    def save_validation(self, epoch: int, measures: Mapping[str, Any], *, stops_early: bool) -> None:
        """Write the result of the validation after `epoch` next to that epoch's checkpoint, if it has one. Collective.

        A run that resumes from it does not validate again.
        """
        if self._saved_step == epoch * self.plan.steps_per_epoch:
            found = Validation(epoch, dict(measures), self.decisions.own_measures, stops_early)
            self.world.from_first(lambda: found.write(checkpoint_path(self.spec.run_path, self._saved_step)))

    def saved_measures(self) -> Mapping[str, Any] | None:
        """Return the measures beside the checkpoint that the run resumes from; None if they are of other code."""
        found = Validation.read(checkpoint_path(self.spec.run_path, self.start_step))
        return found.measures if found is not None and found.own_measures == self.decisions.own_measures else None

    def _parts(self) -> dict[str, Any]:
        """Return the parts of a checkpoint that the run itself holds, by their names in it."""
        return {
            "bad_clips": self.bad_clips.state_dict(),
            "noise_scale": self.noise.state_dict(),
            **self.decisions.state_dict(),
        }

    def _make_ready_to_save(self, path: Path) -> None:
        # Before learners write their files, too: deleting old checkpoints would take files of one without a name yet.
        self.writer.wait()
        if self._lock is not None:
            self._lock.check()
        if self.world.rank == 0:
            measures_path(path).unlink(
                missing_ok=True
            )  # from an earlier start that reached this step with other weights


def _notes(run: Run, may_open: int | None, unfrozen: int) -> Iterator[str]:
    """Yield notes before the first step. may_open: files of this process. unfrozen: parameters trained from here on."""
    spec = run.spec
    plan = run.plan
    world = run.world
    yield f"network: {run.model.execution}"
    if (workers := spec.data.workers or 0) > (cpus := rank_cpus(world.local_size)):
        yield f"data.workers: {workers} loader processes share {counted(cpus, 'core')} of a rank"
    if unfrozen:
        epoch = run.start_step // plan.steps_per_epoch
        yield f"epoch {epoch}: optimizer.freeze ends for {counted(unfrozen, 'parameter')}"
    # A batch that is read ahead has three tensors of shared memory.
    needed = _OPEN_FILES + 3 * (PREFETCHED_PER_WORKER + 1) * run.train_set.data.num_workers() + world.connections
    if may_open is not None and may_open < needed:
        yield f"open files: a rank may need {needed:,}, the limit is {may_open:,}; raise `ulimit -Hn`"
    if spec.noise_scale.every_steps and spec.parallel.method == "averaging":
        yield "noise scale: not measured; the gradients of learners are those of different weights"
    elif spec.noise_scale.every_steps and plan.virtual_gpus == 1:
        yield "noise scale: not measured; one virtual GPU has no other to compare its gradient with"


def build_step(
    spec: Spec, plan: Plan, world: World, model: VideoNetwork, device: torch.device, loss: TaskLoss | None = None
) -> TrainStep | AveragingStep:
    """Return the step of the spec's method of parallel training, before its first update of `model`.

    loss: the spec's, on any device; None: build it as if all classes had equally many clips.
    """
    solver = spec.optimizer
    is_synchronous = spec.parallel.method == "synchronous"
    settings = StepSettings(
        spec.seed,
        plan.virtual_gpus if is_synchronous else 1,
        spec.precision,
        solver.clip_norm,
        (build_loss(spec) if loss is None else loss).to(device).of_batch,
        spec.noise_scale.every_steps if is_synchronous and plan.virtual_gpus > 1 else 0,
        spec.ema.decay,
        spec.data.input,
        solver.compression,
        spec.data.mix,
        spec.data.erase,
    )

    def step_of(model: VideoNetwork, world: World) -> TrainStep:
        return build_train_step(solver, settings, world, model, device, lr_factors(model, solver))

    if is_synchronous:
        return step_of(model, world)
    learners = dict[int, TrainStep]()
    alone = World()
    for number in plan.virtual_gpus_of(world.rank):
        learner = initial_network(spec, device)
        learner.load_state_dict(model.state_dict())
        learners[number] = step_of(learner, alone)
    return AveragingStep(spec.parallel, model, learners, plan.virtual_gpus, world, device, plan.steps_per_epoch)


def build_train_step(
    solver: OptimizerSpec,
    settings: StepSettings,
    world: World,
    model: nn.Module,
    device: torch.device,
    factors: Mapping[str, float],
) -> TrainStep:
    """Return a step that updates `model` over all ranks, not yet run. factors: of the LR of some parameters."""
    groups = parameter_groups(model, solver.weight_decay, factors, decay_norms=solver.decay_norms)
    optimizer = build_solver(solver, groups)
    trust = None if solver.trust_ratio is None else TrustRatio(solver.trust_ratio, model, optimizer)
    return TrainStep(model, optimizer, world, device, settings, trust)
