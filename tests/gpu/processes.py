"""Whole runs of `summit-train train` in processes of their own, on one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests import worlds


def environment(device: torch.device) -> dict[str, str]:
    """The environment of a process on a device: no launcher's traces, packages from wherever this process has them."""
    packages = os.pathsep.join(filter(None, (str(worlds.ROOT), os.environ.get("PYTHONPATH"))))
    hidden = {} if device.type == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    return worlds.environment(CUBLAS_WORKSPACE_CONFIG=":4096:8", **hidden) | {"PYTHONPATH": packages}


def start(program: str, spec: Path, device: torch.device, log: Path) -> subprocess.Popen[bytes]:
    """Start `python -c program train SPEC` in a process group of its own; its output goes to `log`."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-c", program, "train", str(spec)],
            cwd=worlds.ROOT,
            env=environment(device),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
