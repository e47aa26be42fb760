"""A run on one rank: its network, step and records, as its newest checkpoint left them, and how it saves them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from summit_train.core.comm import World
from summit_train.core.machine import raise_open_files, rank_cpus
from summit_train.core.run_folder import RunLock, checkpoint_path, measures_path
from summit_train.core.saved import Checkpoint, check_fit
from summit_train.core.text import counted
from summit_train.core.watch import Watchdog
from summit_train.core.workers import OPEN_FILES
from summit_train.data.bad_clips import BadClips
from summit_train.models import VideoNetwork
from summit_train.models.network import check_arithmetic
from summit_train.training.agreement import experiment_of
from summit_train.training.build import build_step
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
from summit_train.training.inputs import Inputs
from summit_train.training.noise import NoiseScale
from summit_train.training.state import Origin, Validation

_OPEN_FILES = 100  # of a rank besides its workers: libraries, logs


class Rank(NamedTuple):
    """The context of a rank that builds a run.

    network: the spec's initial one, on `device`. lock: rank 0's of the run folder, checked at each checkpoint.
    """

    world: World
    device: torch.device
    network: VideoNetwork
    watchdog: Watchdog
    lock: RunLock | None = None


class Run:
    """One run on one rank.

    start_step: the updates in the checkpoint that it resumes from. notes: lines for people. loss, measures: of
    validation videos, on the CPU. writer: writes rank 0's checkpoints. origin: another run's checkpoint that this one
    begins with now.
    """

    def __init__(self, inputs: Inputs, rank: Rank) -> None:
        """Build the run as its spec says, or as the newest whole checkpoint left it. Collective.

        Raises CheckpointError, as starting_state does, and UserError where this machine's gradients would be wrong.
        """
        spec = inputs.spec
        plan = inputs.plan
        world = rank.world
        self.inputs = inputs
        self.spec = spec
        self.plan = plan
        self.world = world
        self.device = rank.device
        self.watchdog = rank.watchdog
        self._lock = rank.lock
        # --- data
        self.train_set = replace(inputs.train, data=spec.data.on_node(world.local_size))
        self.val_set = inputs.val
        # --- network: its weights are those of the checkpoint, pretrained ones, or those that it has
        world.together(lambda: check_arithmetic(spec, rank.device))
        self.model = rank.network
        find = partial(
            starting_state, spec, plan, self.train_set, self.model, extension=inputs.extension, origin=inputs.origin
        )
        saved, resumed = shared_starting_state(find, spec.run_path, world, self.watchdog)
        step = saved.get("step", 0)
        self.origin = Origin(**saved["origin"]) if "origin" in saved else None
        path = checkpoint_path(spec.run_path, step) if self.origin is None else Path(self.origin.checkpoint)
        checkpoint = Checkpoint(path, saved, world)
        if saved:
            checkpoint.restore(self.model)
        else:
            world.broadcast_tensors(self.model.state_dict())
        # --- step
        self.step = build_step(spec, plan, world, self.model, rank.device, inputs.loss)
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
        self._records: dict[str, BadClips | NoiseScale] = {"bad_clips": self.bad_clips, "noise_scale": self.noise}
        self.start_step = step
        self._saved_step = step
        self._restore_records(checkpoint)
        self.writer = Writer(background=spec.checkpoint.background)
        self._saved_at = time.monotonic()
        self.notes = [*_notes(self, unfrozen), *resumed]

    def _restore_records(self, checkpoint: Checkpoint) -> None:
        saved = checkpoint.state
        for name, state in self._records_state().items():
            if name in saved:
                check_fit(checkpoint.path, name, saved[name], state)
        for name, record in self._records.items():
            if name in saved:
                record.load_state_dict(saved[name])
        self.decisions.load_state_dict(saved)
        best = self.decisions.best_checkpoint
        if not self.world.broadcast(best is None or best.exists()):  # pruned for a better one, which is damaged
            self.decisions.forget_best()
        self.bad_clips.forget_after(self.start_step)

    def is_checkpoint_due(self) -> bool:
        """True if rank 0 asks for a checkpoint: by time, or because the last one could not be written.

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
            **self._records_state(),
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
        """Return the measures of the checkpoint that the run resumes from; None if other code measured them."""
        found = Validation.read(checkpoint_path(self.spec.run_path, self.start_step))
        return found.measures if found is not None and found.own_measures == self.decisions.own_measures else None

    def _records_state(self) -> dict[str, Any]:
        """Return the entries of a checkpoint that the run itself holds."""
        states = {name: record.state_dict() for name, record in self._records.items()}
        return {**states, **self.decisions.state_dict()}

    def _make_ready_to_save(self, path: Path) -> None:
        # Before learners write their files, too: deleting old checkpoints would take files of one without a name yet.
        self.writer.wait()
        if self._lock is not None:
            self._lock.check()
        if self.world.rank == 0:
            # From an earlier start, which reached this step with other weights.
            measures_path(path).unlink(missing_ok=True)


def _notes(run: Run, unfrozen: int) -> Iterator[str]:
    """Let this process open as many files as it may; yield notes. unfrozen: parameters trained from here on."""
    spec = run.spec
    plan = run.plan
    world = run.world
    yield f"network: {run.model.execution}"
    if (workers := spec.data.workers or 0) > (cpus := rank_cpus(world.local_size)):
        yield f"data.workers: {workers} loader processes share {counted(cpus, 'core')} of a rank"
    if unfrozen:
        epoch = run.start_step // plan.steps_per_epoch
        yield f"epoch {epoch}: optimizer.freeze ends for {counted(unfrozen, 'parameter')}"
    may_open = raise_open_files()
    needed = _OPEN_FILES + OPEN_FILES * run.train_set.data.num_workers() + world.connections
    if may_open is not None and may_open < needed:
        yield f"open files: a rank may need {needed:,}, the limit is {may_open:,}; raise `ulimit -Hn`"
    if spec.noise_scale.every_steps and spec.parallel.method == "averaging":
        yield "noise scale: not measured; the gradients of learners are those of different weights"
    elif spec.noise_scale.every_steps and plan.virtual_gpus == 1:
        yield "noise scale: not measured; one virtual GPU has no other to compare its gradient with"
