"""The device of a rank, and the machine and the software that its figures belong to."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

import summit_train
from summit_train.core.comm import World
from summit_train.core.machine import keep_freed_memory, processor_name

_PACKAGES = ("torch", "horovod", "mpi4py", "numpy", "av", "pydantic")


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


def environment(world: World, device: torch.device, hosts: Sequence[str], kernels: str) -> dict[str, Any]:
    """Return the versions and the machine that a run's figures belong to. hosts: every rank's. kernels: CPU level."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "summit_train": summit_train.__version__,
        "python": platform.python_version(),
        **versions,
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_rank": torch.get_num_threads(),
        "kernels": kernels,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "backend": world.backend,
        "ranks": world.size,
        "hosts": dict(Counter(hosts)),
        "ranks_per_node": world.local_size,  # of rank 0's node, as the launcher sees nodes
    }
