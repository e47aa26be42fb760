"""Check the inputs of `train` and `eval`, and choose the device."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from summit_train.core.comm import World
from summit_train.core.errors import UserError
from summit_train.core.machine import keep_freed_memory
from summit_train.data.dataset import Dataset
from summit_train.plan import Plan, make_plan
from summit_train.spec import Spec, load_spec


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of an option that takes files and overrides: (files, overrides)."""
    overrides = [word for word in words if re.match(r"[a-z_.0-9]+=", word) and not Path(word).exists()]
    return [word for word in words if word not in overrides], overrides


@dataclass(frozen=True)
class Inputs:
    """The user's input, read and found to fit together before any rank talks to another."""

    spec: Spec
    plan: Plan
    train: Dataset
    val: Dataset

    @property
    def datasets(self) -> dict[str, Dataset]:
        """The data sets by their keys in the spec's `data`."""
        return {"train": self.train, "val": self.val}


def read_inputs(spec: Spec, ranks: int) -> Inputs:
    """Open the spec's data sets and make the plan. Raises UserError for any mistake in them."""
    train, val = open_datasets(spec)
    return Inputs(spec, make_plan(spec, ranks, len(train)), train, val)


def open_datasets(spec: Spec) -> tuple[Dataset, Dataset]:
    """Open the training and the validation set. Raises UserError if one is wrong or they do not fit together."""
    train, val = Dataset.open(spec, "train"), Dataset.open(spec, "val")
    val.manifest.check_classes(train.manifest)
    return train, val


def run_spec(path: str, overrides: Sequence[str]) -> Spec:
    """Return the spec in a file, or that of a run's directory, wherever the directory is now. Raises UserError."""
    if not Path(path).is_dir():
        return load_spec(path, overrides)
    file, run = Path(path) / "spec.yaml", Path(os.path.abspath(path))
    if not file.is_file():
        raise UserError(f"{path}: must be a spec or the directory of a run; there is no spec.yaml in it")
    spec = load_spec(file, overrides)
    is_there = spec.run_path.exists() and spec.run_path.samefile(run)
    return spec if is_there else spec.model_copy(update={"run_dir": str(run.parent), "name": run.name})


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
