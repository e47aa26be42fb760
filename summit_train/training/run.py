"""Put a run together: data, model, optimizer, and the checkpoint that it goes on from."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from summit_train.comm import World
from summit_train.data.batches.loader import MicroBatch
from summit_train.data.manifest import Manifest
from summit_train.data.manifest.quarantine import Kept, kept_clips
from summit_train.errors import UserError
from summit_train.models import VideoNetwork
from summit_train.models.weights import load_pretrained
from summit_train.optim.sgd import build_sgd, parameter_groups, start_momentum
from summit_train.plan import Plan
from summit_train.spec import Spec, experiment_defaults, experiment_keys
from summit_train.training.bad_clips import BadClips
from summit_train.training.checkpoint import (
    CheckpointError,
    checkpoint_path,
    differences,
    load_newest,
    prune_checkpoints,
    save_checkpoint,
)
from summit_train.training.network import fresh_model
from summit_train.training.step import StepSettings, TrainStep


@dataclass
class Run:
    """One run on one rank; start_step is the number of updates in its checkpoint, notes are lines for people."""

    spec: Spec
    plan: Plan
    world: World
    device: torch.device
    train_manifest: Manifest
    val_manifest: Manifest
    model: VideoNetwork
    optimizer: torch.optim.Optimizer
    step: TrainStep
    start_step: int
    notes: list[str]
    train_clips: Kept
    bad_clips: BadClips

    def paths_of(self, micro_batches: Sequence[MicroBatch]) -> list[str]:
        """Return the paths of the clips of some micro-batches."""
        return [self.train_manifest.path(int(i)) for batch in micro_batches for i in batch.ids]

    def save(self, step: int) -> None:
        """Write the checkpoint after `step` updates on rank 0 and delete those that are not kept."""
        if self.world.rank != 0:
            return
        self.step.statistics.count(step)
        state = {
            "format": 1,
            "step": step,
            "epoch": step // self.plan.steps_per_epoch,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loss_scale": self.step.loss_scale.state_dict(),
            "bad_clips": self.bad_clips.state_dict(),
            "experiment": experiment(self.spec, self.plan, self.train_manifest, self.train_clips),
            "spec": self.spec.model_dump(mode="json"),
        }
        save_checkpoint(checkpoint_path(self.spec.run_path, step), state)
        prune_checkpoints(self.spec.run_path, self.spec.checkpoint.keep, self.plan.steps_per_epoch)


def prepare_run(
    spec: Spec,
    plan: Plan,
    world: World,
    device: torch.device,
    train_manifest: Manifest,
    val_manifest: Manifest,
    *,
    force_resume: bool = False,
) -> Run:
    """Build the model and the optimizer and load the newest whole checkpoint. Collective.

    Raises CheckpointError if the checkpoint is of another experiment (unless `force_resume`) or none is whole.
    """
    model = fresh_model(spec, device)
    kept = kept_clips(spec.data, train_manifest)
    notes = [f"network: {model.execution}", *_quarantine_notes(spec, kept)]
    same = experiment(spec, plan, train_manifest, kept)
    saved = world.broadcast(_saved_state(spec, same, force_resume, notes) if world.rank == 0 else {})
    if spec.model.pretrained is not None and not saved and world.rank == 0:
        notes.append(f"pretrained: {load_pretrained(model, spec.model.pretrained)}")
    model.load_state_dict(saved["model"] if saved else world.broadcast(_cpu_state(model)))
    optimizer, step = build_step(spec, plan, world, model, device)
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
        step.loss_scale.load_state_dict(saved["loss_scale"])
    start = int(saved["step"]) if saved else 0
    bad_clips = BadClips(world, spec.run_path, plan.steps_per_epoch * plan.global_batch, spec.data.max_bad_fraction)
    bad_clips.load_state_dict(saved.get("bad_clips", bad_clips.state_dict()), start)
    return Run(
        spec, plan, world, device, train_manifest, val_manifest, model, optimizer, step, start, notes, kept, bad_clips
    )


def build_step(
    spec: Spec, plan: Plan, world: World, model: VideoNetwork, device: torch.device
) -> tuple[torch.optim.Optimizer, TrainStep]:
    """Return the spec's optimizer over all ranks, with zero momentum, and the step that drives it."""
    settings = spec.optimizer
    groups = parameter_groups(model, settings.weight_decay, model.head, settings.head_lr_factor)
    sgd = build_sgd(groups, settings.momentum)
    optimizer = world.wrap(sgd, model.named_parameters(), plan.accumulation, settings.compression)
    start_momentum(optimizer)
    smoothing = spec.loss.label_smoothing
    step = StepSettings(spec.seed, plan.accumulation, spec.precision, settings.clip_norm, smoothing)
    return optimizer, TrainStep(model, optimizer, world, device, step)


def experiment(spec: Spec, plan: Plan, train_manifest: Manifest, kept: Kept) -> dict[str, str | int | float | None]:
    """Return what must be equal for one run to go on from another's checkpoint, as flat `section.key: value`.

    The number of ranks is not part of it, nor where the data are, nor what only changes the speed.
    """
    same = experiment_keys(spec) | {"data.train (fingerprint)": train_manifest.fingerprint()}
    if kept.fingerprint() is not None:
        same["data.quarantine (fingerprint)"] = kept.fingerprint()
    return same | {"scale.gpus": plan.virtual_gpus, "scale.clips_per_gpu": plan.clips_per_gpu}


@contextmanager
def locked_run(run_path: Path) -> Iterator[None]:
    """Hold the run directory for the block. Raises UserError if another process has it.

    The lock is a POSIX record lock, so it ends with the process, however that ends.
    """
    run_path.mkdir(parents=True, exist_ok=True)
    with open(run_path / "lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise UserError(
                f"{run_path}: another run is using this directory ({file.read().strip() or 'unknown'}); "
                "wait for it, or give this one another name (name=...)"
            ) from error
        file.truncate(0)
        file.write(f"{os.uname().nodename}, process {os.getpid()}\n")
        file.flush()
        yield


def _quarantine_notes(spec: Spec, kept: Kept) -> list[str]:
    if spec.data.quarantine is None:
        return []
    return [f"left out: {len(kept.excluded):,} of {kept.total:,} training clips, by {spec.data.quarantine}"]


def _saved_state(
    spec: Spec, same: Mapping[str, str | int | float | None], force_resume: bool, notes: list[str]
) -> dict[str, Any]:
    path, state, complaints = load_newest(spec.run_path)
    notes.extend(f"passed over: {complaint}" for complaint in complaints)
    if path is None:
        return {}
    older = {key: value for key, value in experiment_defaults().items() if key in same}
    differing = differences(older | state.get("experiment", {}), same)
    if differing and not force_resume:
        raise CheckpointError(
            f"{path} is of another experiment: {'; '.join(differing)}. Give this run another name, or take it over "
            "all the same with --force-resume"
        )
    notes.extend(f"forced: {difference}" for difference in differing)
    notes.append(f"goes on from {path}")
    return state


def _cpu_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}
