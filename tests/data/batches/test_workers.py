"""Batches by worker processes: the same ones, with tensors of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from summit_train.core import workers
from summit_train.core.fork_server import ForkServer
from summit_train.data.batches import loader
from summit_train.data.batches.stores import open_store
from summit_train.data.manifest import Manifest
from summit_train.spec import EvaluateSpec, smallest_spec
from tests.conftest import WriteSpec
from tests.data.batches.conftest import data_spec, open_batches
from tests.worlds import PATIENCE_S, children, environment


def test_a_batch_stays_while_later_ones_are_read(manifest: Manifest) -> None:
    with open_batches(manifest, data_spec(), end_step=5) as expected:
        wanted = [batch.clips for batch in expected]
    with open_batches(manifest, data_spec(workers=1), end_step=5) as batches:
        held = list(batches)
    assert len(held) == 20 and all(map(torch.equal, (batch.clips for batch in held), wanted))


@pytest.mark.parametrize(
    ("bound_to", "cpus", "local_ranks", "workers"),
    [(2, 2, 1, 2), (2, 2, 2, 1), (2, 2, 4, 1), (42, 42, 6, 4), (7, 42, 6, 4), (3, 64, 8, 3)],
)
def test_the_default_number_of_workers_fits_the_cores_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, bound_to: int, cpus: int, local_ranks: int, workers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(bound_to)))
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    assert smallest_spec().data.on_node(local_ranks).workers == workers
    assert data_spec(workers=9).on_node(local_ranks).workers == 9


def test_a_worker_loads_no_torch_and_has_one_thread_and_little_memory(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peak is that of NumPy and a decoder, about 60 MB; torch alone would be more."""
    server = ForkServer()  # that of other tests may have loaded an augmentation that needs torch
    monkeypatch.setattr(workers, "fork_server", lambda process: server)
    with open_batches(manifest, data_spec(workers=1, augment="rand_augment"), end_step=5) as batches:
        next(batches)
        (worker,) = children(server._process.pid)
        process = Path(f"/proc/{worker}")
        maps = (process / "maps").read_text()
        assert "PIL" in maps and "torch" not in maps
        assert b"OMP_NUM_THREADS=1" in (process / "environ").read_bytes().split(b"\0")
        peak = (process / "status").read_text().partition("VmHWM:")[2].split()[0]
        assert int(peak) < 120_000


_TRAIN = """
import os, sys
{before}
from summit_train.__main__ import main
sys.exit(main(["train", sys.argv[1]]))
"""


@pytest.mark.parametrize("has_memfd", [True, False])
def test_a_full_shared_memory_is_one_line_or_does_not_matter(write_spec: WriteSpec, has_memfd: bool) -> None:
    spec = write_spec(data={"workers": 2}, schedule={"epochs": 1})
    script = _TRAIN.format(before="" if has_memfd else "del os.memfd_create  # as conda-forge builds Python")
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs user namespaces")
    done = subprocess.run(
        [*inside, sys.executable, "-c", script, str(spec)],
        capture_output=True, text=True, check=False, env=environment(), timeout=PATIENCE_S,
    )  # fmt: skip
    if has_memfd:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "shared memory" in line]
    assert re.search(
        r"cannot allocate [\d.]+ kB of shared memory for worker processes: No space left on device; ", line
    )
    assert "Traceback" not in done.stderr


# Page-locked memory.


@pytest.mark.parametrize("workers", [0, 2])
def test_where_there_is_cuda_each_tensor_is_pinned_once_and_starts_its_own_memory(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """CUDA finds page-locked memory by its first address. A dict of the blocks' addresses stands in for it."""
    with open_batches(manifest, data_spec(), end_step=2) as expected:
        wanted = [batch.clips for batch in expected]
    blocks, copied = dict[int, torch.Tensor](), list[torch.Tensor]()

    def empty(size: Any, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        block = honest(size, **options)
        if pin_memory:
            blocks[block.data_ptr()] = block
        return block

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor)
        blocks[tensor.data_ptr()] = tensor
        return tensor

    honest = torch.empty
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() in blocks)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    with open_batches(manifest, data_spec(workers), end_step=2) as batches:
        held = list(batches)
    assert all(map(torch.equal, (batch.clips for batch in held), wanted))
    tensors = [tensor for batch in held for tensor in (batch.clips, batch.labels, batch.ids)]
    assert all(tensor.is_pinned() for tensor in tensors)
    # A slice is known by its storage, which must be a block's own.
    own = {block.untyped_storage()._cdata for block in blocks.values()}
    assert all(tensor[-1:].untyped_storage()._cdata in own for tensor in tensors)
    assert len(copied) == (0 if workers else len(tensors))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_in_pinned_memory(manifest: Manifest, workers: int) -> None:
    for batch in open_batches(manifest, data_spec(workers), end_step=1):
        assert batch.clips.is_pinned()
        assert batch.labels.is_pinned()
    evaluate = EvaluateSpec(clips=1, short_side=24)
    for test_batch in loader.test_batches(data_spec(workers), evaluate, open_store(data_spec(), manifest), [0, 1]):
        assert test_batch.views.is_pinned()
