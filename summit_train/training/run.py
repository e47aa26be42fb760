"""Put a run together: data, model, optimizer, and the checkpoint that it resumes from."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from summit_train.core import rng
from summit_train.core.comm import World
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import naming
from summit_train.core.machine import raise_open_files, rank_cpus
from summit_train.core.saved import CheckpointError, check_fit, check_learners, checkpoint_path, give_weights
from summit_train.core.text import counted
from summit_train.core.watch import Watchdog
from summit_train.data.bad_clips import BadClips
from summit_train.data.batches.order import PREFETCHED_PER_WORKER, virtual_gpus_of
from summit_train.data.manifest.quarantine import clips_per_class
from summit_train.models import VideoNetwork
from summit_train.models.network import build_network, make_ready
from summit_train.models.precision import parameter_type
from summit_train.optim.solvers import build_solver, parameter_groups
from summit_train.optim.trust import TrustRatio
from summit_train.plan import Plan
from summit_train.spec import Spec
from summit_train.spec.optimizer import OptimizerSpec
from summit_train.tasks.task import task_named
from summit_train.training.averaging import AveragingStep, GrowingBatch
from summit_train.training.best import Best
from summit_train.training.checkpoint import Writer, prune_checkpoints, serialised, write_checkpoint
from summit_train.training.health import Health
from summit_train.training.noise import NoiseScale
from summit_train.training.start import Inputs, check_arithmetic, experiment_of, first_state
from summit_train.training.step import StepSettings, TrainStep

_OPEN_FILES = 100  # of a rank besides its batches: libraries, logs, pipes of workers


class Run:
    """One run on one rank.

    line: the step at which its line of checkpoints began. forced: the keys in which that of --force-resume differs.
    start_step: the number of updates in the checkpoint that it resumes from. notes: lines for people. writer: writes
    rank 0's checkpoints. val_loss: the training loss, of validation videos.
    """

    def __init__(
        self,
        inputs: Inputs,
        world: World,
        device: torch.device,
        lock: RunLock | None = None,
        watchdog: Watchdog | None = None,
        **may: bool,
    ) -> None:
        """Build the model and the optimizer and load the newest whole checkpoint. Collective.

        may: what first_state may do; it raises CheckpointError otherwise. Raises UserError where this machine's
        gradients would be wrong. lock: rank 0's, checked at each checkpoint. watchdog: is told of each learner's file.
        """
        self.world, self.device, self._lock = world, device, lock
        self.spec, self.plan = spec, plan = inputs.spec, inputs.plan
        self.train_set, self.val_set = replace(inputs.train, data=spec.data.on_node(world.local_size)), inputs.val
        world.together(lambda: check_arithmetic(spec, device))
        self.model = fresh_model(spec, device)
        self.notes = [f"network: {self.model.execution}"]
        if spec.data.quarantine is not None:
            kept = inputs.train.kept
            out = f"{len(kept.excluded):,} of {kept.total:,} training clips, by {spec.data.quarantine}"
            self.notes.append(f"left out: {out}")
        if (workers := spec.data.workers or 0) > (cpus := rank_cpus(world.local_size)):
            self.notes.append(f"data.workers: {workers} loader processes share {counted(cpus, 'core')} of a rank")
        # A batch that is read ahead has three tensors of shared memory, torch.distributed a socket to each rank.
        needed = _OPEN_FILES + 3 * (PREFETCHED_PER_WORKER + 1) * self.train_set.data.num_workers() + world.size
        if (may_open := raise_open_files()) is not None and may_open < needed:
            self.notes.append(f"open files: a rank may need {needed:,}, the limit is {may_open:,}; raise `ulimit -Hn`")
        state = world.together(lambda: self._first_state(watchdog or Watchdog(world, None), **may))
        path = checkpoint_path(spec.run_path, world.broadcast(state.get("step", 0)))
        weights = world.broadcast(state.pop("model", None) or self.model.state_dict())
        world.together(partial(give_weights, self.model, path, weights))
        del weights  # before the rest arrives
        saved = world.broadcast(state)
        counts = list(clips_per_class(inputs.train.manifest, inputs.train.kept).values())
        self.step = build_step(spec, plan, world, self.model, device, counts)
        self.val_loss = task_named(spec.task).part("loss")(spec, counts, torch.device("cpu"))
        self.health = Health(spec, plan)
        if saved:
            whole = saved | {"model": self.model.state_dict()}
            self.notes += world.together(lambda: self.step.restore(path, whole))
        self.noise = NoiseScale(plan.clips_per_gpu, plan.virtual_gpus)
        self.noise.load_state_dict(_part(path, saved, "noise_scale", self.noise.state_dict()))
        if spec.noise_scale.every_steps and spec.parallel.method == "averaging":
            self.notes.append("noise scale: not measured; the gradients of learners are those of different weights")
        elif spec.noise_scale.every_steps and plan.virtual_gpus == 1:
            self.notes.append("noise scale: not measured; one virtual GPU has no other to compare its gradient with")
        self.start_step = int(saved.get("step", 0))
        self.line = int(_part(path, saved, "line", 0))
        self.forced: list[str] = saved.get("forced", [])
        self.best = Best(spec)
        self.best.load_state_dict(_part(path, saved, self.best.part, self.best.state_dict()))
        self.growth = GrowingBatch(spec.parallel.grow_batch, plan.ladder)
        self.growth.load_state_dict(_part(path, saved, "growth", self.growth.state_dict()))
        clips_per_epoch = plan.clips - plan.dropped_clips_per_epoch
        self.bad_clips = BadClips(world, spec.run_path, clips_per_epoch, spec.data.max_bad_fraction)
        self.bad_clips.load_state_dict(_part(path, saved, "bad_clips", self.bad_clips.state_dict()), self.start_step)
        self.writer = Writer(background=spec.checkpoint.background)

    def save(self, step: int) -> None:
        """Write the checkpoint after `step` updates on rank 0 and delete those that are not kept. Collective.

        With checkpoint.background rank 0 returns with its bytes in memory. Raises AgreedError where the checkpoint
        before could not be written, or another run has taken the directory.
        """
        self.world.together(self._make_ready_to_save)
        path = checkpoint_path(self.spec.run_path, step)
        parts = self.step.checkpoint(path, step)
        if self.world.rank != 0:
            return
        state = parts | {
            "format": 1,
            "step": step,
            "epoch": step // self.plan.steps_per_epoch,
            "model": self.model.state_dict(),
            "bad_clips": self.bad_clips.state_dict(),
            "noise_scale": self.noise.state_dict(),
            "growth": self.growth.state_dict(),
            "line": self.line,
            **({} if self.spec.checkpoint.keep_best is None else {self.best.part: self.best.state_dict()}),
            "backend": self.world.backend,
            "experiment": experiment_of(self.spec, self.plan, self.train_set, self.model).values(),
            "spec": self.spec.model_dump(mode="json"),
            # So that the file alone is enough to use the network.
            "classes": (classes := self.train_set.manifest.classes) and list(classes),
        }
        content, best = serialised(state), self.best.checkpoint

        def write() -> None:
            write_checkpoint(path, content)
            prune_checkpoints(self.spec, self.plan.steps_per_epoch, path, best)

        self.writer.start(write)

    def compare_with_best(self, step: int, measures: Mapping[str, Any] | None) -> None:
        """Keep the checkpoint of `step`, in place of the former best, if rank 0's `measures` are the best. Collective.

        The checkpoint at which a line begins is of the line before.
        """

        def compare() -> None:
            mine = measures if self.world.rank == 0 and step > self.line else None
            if mine is not None and self.best.takes(step, mine):
                self.writer.wait()  # best.json names no file that is half written
                self.best.write()
                newest = checkpoint_path(self.spec.run_path, step)
                prune_checkpoints(self.spec, self.plan.steps_per_epoch, newest, self.best.checkpoint)

        if self.spec.checkpoint.keep_best is not None:
            self.world.together(compare)

    def _make_ready_to_save(self) -> None:
        # Before learners write their files, too: deleting old checkpoints would take files of one without a name yet.
        self.writer.wait()
        if self._lock is not None:
            self._lock.check()

    def _first_state(self, watchdog: Watchdog, **may: bool) -> dict[str, Any]:
        """Return rank 0's first state, {} elsewhere. All ranks check the learners' files of what rank 0 offers."""
        world = self.world

        def check(path: Path, digests: list[str]) -> None:
            wrong = None
            try:
                check_learners(path, digests, world.rank, world.size, watchdog.at)
            except CheckpointError as error:
                wrong = str(error)
            watchdog.at("waiting for the other ranks' learners", waits=True)
            if found := list(filter(None, world.gather(wrong) or [])):
                raise CheckpointError(found[0])

        if world.rank > 0:
            while offered := world.broadcast(list[Any]()):
                check(*offered)
            return {}
        try:
            state, notes = first_state(
                self.spec, self.plan, self.train_set, self.model, lambda *it: check(*world.broadcast(it)), **may
            )
        finally:
            world.broadcast([])
        self.notes += notes
        if (before := state.get("backend", self.world.backend)) != self.world.backend:
            own = self.world.backend
            self.notes.append(f"continues over {own}; earlier steps ran over {before}, so results agree to rounding")
        return state


def _part(path: Path, saved: Mapping[str, Any], name: str, own: Any) -> Any:
    """Return a part of the checkpoint `path`, or the run's own where it has none."""
    part = saved.get(name, own)
    check_fit(path, name, part, own)
    return part


def fresh_model(spec: Spec, device: torch.device) -> VideoNetwork:
    """Build the spec's network on `device`, ready to run, with weights that the seed alone decides.

    Weights stay in their plain layout, as gradients are views of flat buckets; clips are channels-last, and every
    convolution follows its input.
    """
    generator = torch.Generator().manual_seed(rng.seed_of(spec.seed, "weights"))
    network = build_network(spec, generator).to(device=device, dtype=parameter_type(spec.precision))
    make_ready(network, spec)
    return network


def build_step(
    spec: Spec, plan: Plan, world: World, model: VideoNetwork, device: torch.device, clips_of_class: Sequence[int] = ()
) -> TrainStep | AveragingStep:
    """Return the step of the spec's method of parallel training, before its first update of `model`.

    clips_of_class: of the training set, for balanced class weights; without any all weights are 1.
    """
    solver, is_synchronous = spec.optimizer, spec.parallel.method == "synchronous"
    settings = StepSettings(
        spec.seed,
        plan.accumulation if is_synchronous else 1,
        spec.precision,
        solver.clip_norm,
        task_named(spec.task).part("loss")(spec, clips_of_class, device).of_batch,
        spec.noise_scale.every_steps if is_synchronous and plan.virtual_gpus > 1 else 0,
        spec.ema.decay,
        spec.data.input,
        solver.compression,
        spec.data.mix,
        spec.data.erase,
    )

    def drive(model: VideoNetwork, world: World) -> TrainStep:
        return drive_solver(solver, settings, world, model, device, lr_factors(model, solver))

    if is_synchronous:
        return drive(model, world)
    learners, alone = dict[int, TrainStep](), World()
    for number in virtual_gpus_of(world.rank, world.size, plan.virtual_gpus):
        own = fresh_model(spec, device)
        own.load_state_dict(model.state_dict())
        learners[number] = drive(own, alone)
    return AveragingStep(spec.parallel, model, learners, world, device, plan.steps_per_epoch)


def lr_factors(model: VideoNetwork, solver: OptimizerSpec) -> dict[str, float]:
    """Return what the LR of each parameter is multiplied by, by name: its module's factor and its layer's.

    With L the classifier's layer, layer l has layer_decay^(L - l): BEiT's rule (Bao et al. 2022), which VideoMAE and
    timm have as well.
    """
    modules = {model.head: solver.head_lr_factor} | dict.fromkeys(model.stem, solver.first_lr_factor)
    factors = {
        f"{module}.{name}": factor
        for module, factor in modules.items()
        if module  # a foreign network may not name them
        for name, _ in model.get_submodule(module).named_parameters()
    }
    if solver.layer_decay == 1:
        return factors
    layers = model.layer_numbers()
    last = max(layers.values())
    return {name: factors.get(name, 1.0) * solver.layer_decay ** (last - layer) for name, layer in layers.items()}


def drive_solver(
    solver: OptimizerSpec,
    settings: StepSettings,
    world: World,
    model: nn.Module,
    device: torch.device,
    factors: Mapping[str, float],
) -> TrainStep:
    """Return the step that drives `model` by the solver over all ranks, before its first update.

    factors: of the LR of some parameters, by name.
    """
    groups = parameter_groups(model, solver.weight_decay, factors, decay_norms=solver.decay_norms)
    optimizer = build_solver(solver, groups)
    trust = None if solver.trust_ratio is None else TrustRatio(solver.trust_ratio, model, optimizer)
    return TrainStep(model, optimizer, world, device, settings, trust)


class RunLock:
    """Holds a run folder for this process within the block.

    It is a POSIX record lock on the file `lock`, so it ends with the process, however it ends. It belongs to the file,
    not to its name: if `lock` is deleted, another run can take the directory.
    """

    def __init__(self, run_path: Path) -> None:
        run_path.mkdir(parents=True, exist_ok=True)
        self._path = run_path / "lock"
        self._file = self._take()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def check(self) -> None:
        """Take the directory again where `lock` was deleted. Raises RunFailed if another run has been faster."""
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                return
            wrong = f"{self._path} was deleted or replaced while this run was using the directory"
            other = f"another run has taken it ({self._path.read_text(encoding='utf-8').strip()})"
            raise RunFailed(f"{wrong}, and {other}; this one stops here")
        except FileNotFoundError:
            self._file.close()
        try:
            self._file = self._take()
        except UserError as error:
            raise RunFailed(str(error)) from error

    def _take(self) -> IO[str]:
        file = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115  (closed in __exit__)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            wrong = f"{self._path.parent}: another run is using this directory ({holder})"
            raise UserError(f"{wrong}; wait for it, or give this one another name (name=...)") from error
        file.truncate(0)
        with naming(self._path):
            os.write(file.fileno(), f"{os.uname().nodename}, process {os.getpid()}\n".encode())
        return file
