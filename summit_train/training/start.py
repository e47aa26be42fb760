"""Check the inputs of `train` and `eval`, and choose the device."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from summit_train.core.comm import World
from summit_train.core.memory import keep_freed_memory
from summit_train.data.batches.stores import open_store
from summit_train.data.manifest import Manifest, read_manifest
from summit_train.data.manifest.quarantine import kept_clips
from summit_train.plan import make_plan
from summit_train.spec import Spec, load_spec
from summit_train.spec.source import SpecError
from summit_train.training.run import Inputs


def tell_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell files from overrides, where an option takes both as one list: (files, overrides)."""
    overrides = [word for word in words if re.match(r"[a-z_.0-9]+=", word) and not Path(word).exists()]
    return [word for word in words if word not in overrides], overrides


def read_inputs(path: str, overrides: Sequence[str], ranks: int) -> Inputs:
    """Read spec and manifests and make the plan. Raises UserError for any mistake in them."""
    return inputs_of(load_spec(path, overrides), ranks)


def inputs_of(spec: Spec, ranks: int) -> Inputs:
    """Read the spec's manifests and make the plan. Raises UserError for any mistake in them."""
    train_manifest, val_manifest = read_manifests(spec)
    plan = make_plan(spec, ranks, len(kept_clips(spec.data, train_manifest)))
    return Inputs(spec, plan, train_manifest, val_manifest)


def read_manifests(spec: Spec) -> tuple[Manifest, Manifest]:
    """Read the training and the validation manifest. Raises UserError if one is wrong or they do not fit together."""
    train_manifest, val_manifest = (manifest_of(spec, which) for which in ("train", "val"))
    val_manifest.check_classes(train_manifest)
    return train_manifest, val_manifest


def run_spec(path: str, overrides: Sequence[str]) -> Spec:
    """Return the spec in a file, or that of a run's directory, wherever the directory is now. Raises UserError."""
    if not Path(path).is_dir():
        return load_spec(path, overrides)
    file, run = Path(path) / "spec.yaml", Path(os.path.abspath(path))
    if not file.is_file():
        raise SpecError(f"{path}: must be a spec or the directory of a run; there is no spec.yaml in it")
    spec = load_spec(file, overrides)
    is_there = spec.run_path.exists() and spec.run_path.samefile(run)
    return spec if is_there else spec.model_copy(update={"run_dir": str(run.parent), "name": run.name})


def manifest_of(spec: Spec, which: str) -> Manifest:
    """Read the spec's manifest; `which` is train or val. Raises UserError if it is missing or wrong."""
    path = spec.data.train if which == "train" else spec.data.val
    if not Path(path).exists():
        raise SpecError(f"data.{which}: there is no {path} (relative paths start at {Path.cwd()})")
    manifest = read_manifest(path)
    manifest.check_labels(spec.model.num_classes)
    open_store(spec.data, manifest)  # a packed set that is damaged or does not fit is refused before ranks meet
    return manifest


def choose_device(world: World) -> torch.device:
    """Return a GPU by local rank, or the CPU, and take this rank's share of the cores there.

    Where a launcher shows each rank one GPU only (jsrun -r6 -g1), every local rank's device is number 0.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))
    keep_freed_memory()
    return torch.device("cpu")
