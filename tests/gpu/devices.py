"""Where the tests of this folder run: on a GPU at full size, and on the CPU, made tiny, as a rehearsal of their code.

`pytest -m gpu` chooses the GPU's, `-k rehearsal` the others, which every test run has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from summit_train.data.batches.loader import MicroBatch
from summit_train.spec import Spec
from tests import worlds

CPU = torch.device("cpu")
GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)


def on_devices(cases: Iterable[str], rehearsed: Iterable[str]) -> list[Any]:
    """Return (case, device) for every case on the GPU, and for the `rehearsed` ones on the CPU."""
    real = [pytest.param(case, torch.device("cuda", 0), marks=GPU, id=f"{case}, cuda") for case in cases]
    return real + [pytest.param(case, CPU, id=f"{case}, rehearsal") for case in rehearsed]


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Let matrix products and convolutions in fp32 round their inputs to TF32 within the block, or not."""
    former = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = former


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ||found - expected|| / ||expected||."""
    return float((found - expected).norm() / expected.norm())


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a copy of tensors as one vector in double precision on the CPU."""
    return torch.cat([tensor.detach().double().cpu().flatten() for tensor in tensors])


def random_batch(step: int, virtual_gpu: int, shape: tuple[int, ...], classes: int) -> MicroBatch:
    """Return clips of random bytes, (N, T, H, W, C), that step and virtual GPU decide; page-locked beside a GPU."""
    generator = torch.Generator().manual_seed(1000 * step + virtual_gpu)
    clips = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, classes, shape[:1], generator=generator)
    batch = MicroBatch(step, virtual_gpu, clips, labels, torch.arange(shape[0]))
    return batch.pin_memory() if torch.cuda.is_available() else batch


def batches_of(spec: Spec, step: int, virtual_gpus: Iterable[int]) -> list[MicroBatch]:
    """Return a spec's random micro-batches of a step, one for each virtual GPU."""
    shape = (spec.scale.clips_per_gpu, *spec.data.clip_shape)
    return [random_batch(step, number, shape, spec.model.num_classes) for number in virtual_gpus]


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
