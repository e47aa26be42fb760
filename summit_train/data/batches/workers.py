"""Worker processes that make batches, one key each: started, watched, replaced when one dies, and always ended.

Each worker notes in shared memory which clip it reads, so the main process can name one that kills its reader or hangs.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import shutil
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import chain, count
from multiprocessing import resource_tracker
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from summit_train.core.errors import RunFailed, UserError
from summit_train.data.batches.order import PREFETCHED_PER_WORKER
from summit_train.data.video.source import (
    RAISE_SECONDS,
    DecodeError,
    check_temporary_folder,
    claim_leftovers,
    prepare_reader,
)

Batch = TypeVar("Batch")
Key = Any
# Notes which clip (its number and path) is read in the block; a batch is made of a key with its help.
Reading = Callable[[int, str], AbstractContextManager[None]]
Make = Callable[[Key, Reading], Batch]
Worker = multiprocessing.process.BaseProcess

_SECONDS_TO_DIE = 5.0
_PATIENCE = 2.0  # times a clip's seconds


AnyTensors = TypeVar("AnyTensors", bound="Tensors")


class Tensors:
    """A dataclass with tensors, which the DataLoader puts into page-locked memory."""

    def moved(self: AnyTensors, move: Callable[[torch.Tensor], torch.Tensor]) -> AnyTensors:
        tensors = {name: move(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return cast(AnyTensors, replace(cast(Any, self), **tensors))

    def pin_memory(self: AnyTensors) -> AnyTensors:
        return self.moved(torch.Tensor.pin_memory)


class Slots:
    """A worker's shared memory, which its batches reuse: page faults of new memory cost more than copying a clip.

    The main process copies a batch before it asks for the next one, and a worker is at most PREFETCHED_PER_WORKER
    batches ahead, so with one set of slots more than that no batch is overwritten before it is copied.
    """

    def __init__(self) -> None:
        self._slots, self._turn = dict[tuple[int, int], torch.Tensor](), 0

    def put(self, batch: AnyTensors) -> AnyTensors:
        """Return the batch with its tensors copied to the next slots."""
        places, self._turn = count(), (self._turn + 1) % (PREFETCHED_PER_WORKER + 1)

        def shared(tensor: torch.Tensor) -> torch.Tensor:
            key, size = (self._turn, next(places)), tensor.nbytes
            if key not in self._slots or self._slots[key].nbytes < size:
                self._slots[key] = torch.empty(size, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
            return self._slots[key][:size].view(tensor.dtype).view(tensor.shape).copy_(tensor)

        return batch.moved(shared)


class WatchedDataset(Dataset[Any]):
    """The batches that `make` returns by key, and the clip that each worker reads: a row (process, clip + 1 or 0).

    A clip gets `seconds`. The decoder checks the time itself. Where it cannot, SIGALRM ends the worker: it has no
    handler, so it works also in a library that never returns.
    """

    def __init__(self, make: Make[Any], num_workers: int, seconds: float) -> None:
        self._make, self._seconds = make, seconds
        self.rows = torch.zeros((num_workers, 2), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._given_up = dict[int, str]()
        self._slots = Slots()

    def __getitem__(self, key: Key) -> Any:
        # The error as a value: the DataLoader would turn the exception itself into a RuntimeError.
        try:
            batch = self._make(key, self.reading)
        except (DecodeError, UserError) as error:
            return error
        return self._slots.put(batch) if isinstance(batch, Tensors) and get_worker_info() else batch

    @contextmanager
    def reading(self, clip: int, path: str) -> Iterator[None]:
        """Note the clip that this worker (not the main process) reads. Raises DecodeError if it was given up."""
        if clip in self._given_up:
            raise DecodeError(path, self._given_up[clip])
        worker = get_worker_info()
        if worker is None:
            yield
            return
        row = self.rows[worker.id]
        row[0], row[1] = os.getpid(), clip + 1
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE * self._seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            row[1] = 0

    def give_up(self, dead: Iterable[Worker]) -> bool:
        """Make the clips that dead workers were reading unreadable from now on; return whether there are any."""
        clips = {process: clip - 1 for process, clip in self.rows.tolist() if clip}
        culprits = [worker for worker in dead if worker.pid in clips]
        for worker in culprits:
            hint = ": killed, or out of memory?" if worker.exitcode == -signal.SIGKILL else ""
            reason = f"kills the process that reads it (exit status {worker.exitcode}{hint})"
            if worker.exitcode == -signal.SIGALRM:
                reason = f"takes longer than {self._seconds:g} s to read: its reader never came back{RAISE_SECONDS}"
            self._given_up[clips[worker.pid]] = reason
        return bool(culprits)


def check_shared_memory(batch_bytes: int, num_workers: int) -> None:
    """Raise UserError where the batches that workers read ahead do not fit into shared memory."""
    needed, folder = batch_bytes * (PREFETCHED_PER_WORKER + 1) * num_workers, "/dev/shm"
    if os.path.isdir(folder) and (free := shutil.disk_usage(folder).free) < needed:
        wrong = f"{folder} must have {needed / 1e6:,.1f} MB free for data.workers={num_workers}, got {free / 1e6:,.1f}"
        raise UserError(f"{wrong}; give the container more (docker run --shm-size=8g), or set data.workers=0")


class _Loader(DataLoader[Any]):
    def check_worker_number_rationality(self) -> None:
        """Leave out torch's warning, which it gives twice in each process; a run says it once."""


class Batches(Iterator[Batch]):
    """An iterator over the batches that `make` returns, in the order of the keys.

    It owns the workers until its end, an error or `close()`. A worker that dies while it reads a clip, or takes far
    longer than `seconds`, is replaced, and the clip counts as unreadable from then on. Raises DecodeError, as raised in
    the worker, at the batch with the bad video, and RunFailed if a worker died while it read no clip.
    """

    def __init__(self, make: Make[Batch], keys: Iterable[Key], num_workers: int, seconds: float) -> None:
        self._dataset, self._num_workers = WatchedDataset(make, num_workers, seconds), num_workers
        self._keys = iter(keys)
        self._asked = deque[Key]()  # keys of the batches that have not come yet
        self._workers: list[Worker] = []
        # Also at exit: multiprocessing would send the workers a SIGTERM, which they block, and wait for ever.
        self._kill = weakref.finalize(self, _kill_all, self._workers)
        self._batches: Iterator[Any] | None = self._start(self._keys)

    def _start(self, keys: Iterable[Key]) -> Iterator[Any]:
        """Start workers that ask the dataset for whole batches by key (batch_size=None: no collation)."""

        def noted() -> Iterator[Key]:
            for key in keys:
                self._asked.append(key)
                yield key

        has_workers = self._num_workers > 0
        if has_workers:
            check_temporary_folder()
            claim_leftovers()
        # Forking a process that has MPI, CUDA or threads is unsafe; workers are forked from a clean one.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["summit_train.data.batches.loader"])
        batches = _Loader(
            self._dataset,
            batch_size=None,
            sampler=noted(),
            num_workers=self._num_workers,
            multiprocessing_context=context if has_workers else None,
            prefetch_factor=PREFETCHED_PER_WORKER if has_workers else None,
            worker_init_fn=prepare_reader,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # else it would draw from the global one
        )
        others = set(multiprocessing.active_children())
        with _signals_held_back():
            iterator = iter(batches)
        self._workers[:] = set(multiprocessing.active_children()) - others
        return iterator

    def __next__(self) -> Batch:
        while self._batches is not None:
            try:
                batch: Batch | DecodeError | UserError = next(self._batches)
            except (RuntimeError, EOFError, ConnectionError, FileNotFoundError) as error:
                self._replace_workers(error)
                continue
            except BaseException:
                self.close()
                raise
            self._asked.popleft()
            if isinstance(batch, DecodeError | UserError):
                self.close()
                raise batch
            if self._num_workers and isinstance(batch, Tensors) and not torch.cuda.is_available():
                return batch.moved(torch.clone)  # pinning copies too
            return batch
        raise StopIteration

    def _replace_workers(self, error: Exception) -> None:
        """Replace the workers if some died while they read a clip. Raises RunFailed if none did."""
        deadline = time.monotonic() + (0.0 if isinstance(error, RuntimeError) else _SECONDS_TO_DIE)
        while not (dead := [one for one in self._workers if not one.is_alive()]) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self._dataset.give_up(dead):
            self.close()
            if not dead and isinstance(error, RuntimeError):
                raise error  # of our own making, in a worker that lives
            raise RunFailed("a loader worker has died: killed, or out of memory?") from error
        self._batches = None
        _kill_all(self._workers)
        self._dataset.rows.zero_()
        asked = list(self._asked)
        self._asked.clear()
        self._batches = self._start(chain(asked, self._keys))

    def __enter__(self) -> Batches[Batch]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers and drop batches that were read ahead. May be called again."""
        self._batches = None  # the DataLoader's iterator asks its workers to end, and waits some seconds
        self._kill()  # those that hang in a file system or a decoder


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Block signals in the block, so that processes started in it inherit that and only SIGKILL ends them.

    A scheduler signals all processes of a job, workers included; the main one decides what to do and still needs its
    batches. It receives a signal of the meantime afterwards.
    """
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        resource_tracker.ensure_running()  # its start unblocks two of them; the fork server would do it later
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill_all(workers: Iterable[Worker]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.kill()
