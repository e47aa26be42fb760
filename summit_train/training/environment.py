"""Describe the machine and the software of a run for its report."""

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
from summit_train.core.machine import processor_name
from summit_train.models.network import cpu_kernels

_PACKAGES = ("torch", "horovod", "mpi4py", "numpy", "av", "pydantic")


def environment(world: World, device: torch.device, hosts: Sequence[str]) -> dict[str, Any]:
    """Return what a person needs to trust or repeat the run's figures; `hosts`: every rank's host."""
    return {
        "summit_train": summit_train.__version__,
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_rank": torch.get_num_threads(),
        "kernels": cpu_kernels(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "backend": world.backend,
        "ranks": world.size,
        "hosts": dict(Counter(hosts)),
        "ranks_per_node": world.local_size,  # of rank 0's node, as the launcher sees nodes
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
