"""Worker processes: they end, and do not change the batches."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from summit_train.core.errors import RunFailed, UserError
from summit_train.core.machine import num_cpus
from summit_train.data.batches import loader
from summit_train.data.batches.order import PREFETCHED_PER_WORKER
from summit_train.data.batches.stores import open_store
from summit_train.data.batches.workers import Slots, check_shared_memory
from summit_train.data.manifest import Manifest
from summit_train.spec import EvaluateSpec, load_spec, smallest_spec
from tests.conftest import WriteSpec
from tests.data.batches.conftest import data_spec, open_batches
from tests.runs import steps_of
from tests.worlds import needs_ranks, run, start, until


@pytest.mark.parametrize("way", ["close", "end", "forget"])
def test_workers_end_with_their_batches(manifest: Manifest, way: str) -> None:
    others = set(multiprocessing.active_children())
    batches = open_batches(manifest, data_spec(workers=1), end_step=5 if way == "end" else 1000)
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 1 and next(batches).step == 0
    if way == "end":
        assert len(list(batches)) == 19
    elif way == "close":
        batches.close()
        assert list(batches) == []
        batches.close()
    else:
        del batches
        gc.collect()
    assert until(lambda: not any(worker.is_alive() for worker in workers))


def test_a_workers_batches_take_turns_in_its_shared_memory(manifest: Manifest) -> None:
    slots, turns = Slots(), PREFETCHED_PER_WORKER + 1  # so many batches are in use before one may be overwritten
    with open_batches(manifest, data_spec(), end_step=turns) as batches:
        own = list(batches)
    assert len(own) > 2 * turns
    for first in range(0, len(own) - turns, turns + 1):
        shared = [slots.put(batch) for batch in own[first : first + turns]]
        for batch, put in zip(own[first:], shared, strict=False):
            assert put.clips.is_shared() and put.labels.is_shared() and put.ids.is_shared()
            assert put.step == batch.step and not batch.clips.is_shared()
            assert all(map(torch.equal, (put.clips, put.labels, put.ids), (batch.clips, batch.labels, batch.ids)))
        again = slots.put(own[first + turns])
        assert again.clips.data_ptr() == shared[0].clips.data_ptr()
        assert torch.equal(again.clips, own[first + turns].clips)
    smaller = replace(own[0], clips=own[0].clips[:, :1])
    slots = Slots()  # those above have room for a whole batch
    for batch in (*[smaller] * turns, own[0], *[smaller] * (turns - 1), own[1]):  # one that grows, one that has room
        assert torch.equal(slots.put(batch).clips, batch.clips)


def test_a_batch_stays_while_later_ones_are_read(manifest: Manifest) -> None:
    with open_batches(manifest, data_spec(), end_step=5) as expected:
        wanted = [batch.clips for batch in expected]
    with open_batches(manifest, data_spec(workers=1), end_step=5) as batches:
        held = list(batches)
    assert len(held) == 20 and all(map(torch.equal, (batch.clips for batch in held), wanted))
    assert not any(batch.clips.is_shared() for batch in held)  # no descriptor of a file is kept for it


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


def test_torch_says_nothing_of_more_workers_than_cores(manifest: Manifest) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_batches(manifest, data_spec(workers=num_cpus() + 1), end_step=1) as batches:
            assert next(batches).step == 0


def test_a_signal_to_the_job_leaves_the_workers_to_the_main_process(manifest: Manifest) -> None:
    with open_batches(manifest, data_spec(workers=1)) as batches:
        first = next(batches)  # the worker is up
        for pid in _descendants(os.getpid()):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                os.kill(pid, number)
        steps = [first.step, *(batch.step for batch in batches)]
    assert steps == [step for step in range(5) for _ in range(4)]


def _descendants(pid: int) -> list[int]:
    """The processes below one: the fork server, its workers and the resource tracker."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(below for child in children for below in _descendants(child))]


def test_a_signal_to_the_main_process_is_not_lost(manifest: Manifest) -> None:
    held: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: held.append(number))
    try:
        with open_batches(manifest, data_spec(workers=1)) as batches:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert len(list(batches)) == 20
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert held == [signal.SIGUSR1]


@pytest.mark.parametrize(
    "ending", [pytest.param("raise SystemExit(7)", marks=pytest.mark.nightly), "os.kill(os.getpid(), 9)"]
)
def test_a_process_that_ends_without_close_does_not_hang(videos: Path, tmp_path: Path, ending: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.format(manifest=str(videos / "list.csv"), ending=ending))
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(loader.__file__).parents[3])},
    )
    assert done.returncode in (7, -9), done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


_SCRIPT = """
import multiprocessing, os
from summit_train.data.batches import loader
from summit_train.data.batches.order import Order
from summit_train.data.batches.stores import open_store
from summit_train.data.manifest import read_manifest
from summit_train.spec import DataSpec

if __name__ == "__main__":
    data = DataSpec(train="x", val="x", num_frames=4, frame_stride=2, short_side=(24, 32), crop=24, workers=2)
    read = loader.TrainingClips(data, open_store(data, read_manifest({manifest!r})), 0)
    batches = loader.training_batches(read, Order(9, 0, 1, 1, 9), rank=0, ranks=1, steps=range(1000))
    next(batches)
    print(*[worker.pid for worker in multiprocessing.active_children()], flush=True)
    {ending}
"""


def _named_after(pids: list[int], temporary: Path) -> list[str]:
    """The semaphores and temporary folders that bear the number of one of some processes. Nobody else may use them."""
    found = [path for folder in (Path("/dev/shm"), temporary) for path in folder.iterdir()]
    number = re.compile(r"(?:sem\.)?summit-[0-9a-f]{6}-(\d+)\b.*")  # others may have files of other names
    found = [path for path in found if (match := number.fullmatch(path.name)) and int(match[1]) in pids]
    assert not any(path.stat().st_mode & 0o077 for path in found)
    return [path.name for path in found]


@needs_ranks
def test_what_ranks_leave_that_were_killed_is_deleted_at_a_later_start(
    write_spec: WriteSpec, motion_set: Path, short_folder: Path
) -> None:
    spec = write_spec("killed", data={"workers": 1}, schedule={"epochs": 1000})
    program = "import os, sys; from summit_train.__main__ import main; os.umask(0); sys.exit(main(sys.argv[1:]))"
    job = start(2, "-c", program, "train", str(spec), env={"TMPDIR": str(short_folder)})
    begun = until(lambda: len(steps_of(load_spec(spec).run_path)) > 2)
    pids = _descendants(job.pid)
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    for pid in (job.pid, *pids):
        os.kill(pid, signal.SIGKILL)
    said, _ = job.communicate()
    assert begun, said
    assert set(re.findall(r"/dev/shm/sem\.(\w+)-", maps)) == {"summit"}
    assert len(_named_after(pids, short_folder)) > 10 and not list(short_folder.rglob("pymp-*"))
    scan = ("data", "scan", str(motion_set / "val.csv"), "--out", str(short_folder / "bad.csv"), "--workers", "1")
    status, said = run(0, "-m", "summit_train", *scan, env={"TMPDIR": str(short_folder)})
    assert status == 0, said
    assert _named_after(pids, short_folder) == [] and not list(short_folder.glob("summit-*"))


def test_a_worker_that_is_killed_ends_the_run_with_an_error(manifest: Manifest) -> None:
    others = set(multiprocessing.active_children())
    batches = open_batches(manifest, data_spec(workers=1), end_step=100_000)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    assert until(lambda: not any(_reads_at(batches, 0.02) for _ in range(20)))  # it has read ahead and waits
    worker.kill()
    with pytest.raises(RunFailed, match="worker"):
        for _ in batches:
            pass
    assert list(batches) == []


def _reads_at(batches: loader.Batches[loader.MicroBatch], pause: float) -> bool:
    """Whether a worker is reading a clip, a moment later."""
    time.sleep(pause)
    return bool(batches._dataset.rows[:, 1].any())


def test_batches_are_pinned_whole(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    batch = next(open_batches(manifest, data_spec()))
    assert batch.pin_memory() == batch
    assert sorted(tuple(tensor.shape) for tensor in pinned) == [(1,), (1,), (1, 4, 24, 24, 3)]


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


def test_batches_that_do_not_fit_into_shared_memory_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers have three batches each: six of 100,000 bytes."""
    free = 600_000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    check_shared_memory(100_000, 2)
    free -= 1
    with pytest.raises(
        UserError, match=r"^/dev/shm must have 0\.6 MB free for data\.workers=2, got 0\.6; give the con"
    ):
        check_shared_memory(100_000, 2)
