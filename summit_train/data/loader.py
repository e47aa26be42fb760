"""Micro-batches of clips for training and views of videos for the test, decoded by worker processes.

What a batch holds is a function of (seed, epoch, clip) and of its place in the order; neither the rank nor
the worker that reads it enters. Pixels stay uint8: they are normalised on the device.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import signal
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from summit_train import rng
from summit_train.data import augment, order, sampling
from summit_train.data.store import Store
from summit_train.data.video import DecodeError
from summit_train.spec import DataSpec, EvaluateSpec

PREFETCHED_PER_WORKER = 2
Batch = TypeVar("Batch")
MicroBatchKey = tuple[int, int, int, NDArray[np.int64]]  # step, virtual GPU, epoch, clips


@dataclass(frozen=True)
class MicroBatch:
    """What one virtual GPU trains on in one step.

    clips uint8 (n, T, H, W, 3), RGB; labels int64 (n,); ids int64 (n,): the clips' places in the manifest.
    """

    step: int
    virtual_gpu: int
    clips: torch.Tensor
    labels: torch.Tensor
    ids: torch.Tensor

    def pin_memory(self) -> MicroBatch:
        """The same batch in page-locked memory; the DataLoader calls it."""
        pinned = {name: getattr(self, name).pin_memory() for name in ("clips", "labels", "ids")}
        return replace(self, **pinned)


@dataclass(frozen=True)
class TestBatch:
    """One video of the test: its place in the manifest, its views uint8 (clips * crops, T, h, w, 3), RGB."""

    __test__ = False  # not a test case, whatever pytest makes of the name

    video: int
    label: int
    views: torch.Tensor

    def pin_memory(self) -> TestBatch:
        """The same batch in page-locked memory; the DataLoader calls it."""
        return replace(self, views=self.views.pin_memory())


class Batches(Generic[Batch]):
    """An iterator over batches in their order; it owns the workers, until its end, an error or `close()`.

    Raises DecodeError, as it was raised in the worker, when it comes to the batch with the bad video, and
    RuntimeError where a worker died or has an error that is no video's.
    """

    def __init__(self, dataset: Dataset[Any], keys: Iterable[Any], num_workers: int) -> None:
        others = set(multiprocessing.active_children())
        with _signals_held_back():
            self._batches: Iterator[Any] | None = iter(_data_loader(dataset, keys, num_workers))
        # Also at the interpreter's exit: multiprocessing would send the workers a SIGTERM, and wait for ever.
        self._kill = weakref.finalize(self, _kill, set(multiprocessing.active_children()) - others)

    def __iter__(self) -> Batches[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            raise StopIteration
        try:
            batch: Batch | _Failure = next(self._batches)
        except (EOFError, ConnectionError, FileNotFoundError) as error:  # a batch that came half
            self.close()
            raise RuntimeError("a loader worker has died: killed, or out of memory?") from error
        except BaseException:
            self.close()
            raise
        if isinstance(batch, _Failure):
            self.close()
            raise batch.error
        return batch

    def __enter__(self) -> Batches[Batch]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; batches that were read ahead are dropped. May be called again."""
        self._batches = None  # the DataLoader's iterator asks its workers to end, and waits for some seconds
        self._kill()  # those that are stuck in a file system or a decoder

    def __del__(self) -> None:
        if hasattr(self, "_kill"):  # else it was never started
            self.close()


def training_batches(
    data: DataSpec,
    store: Store,
    *,
    seed: int,
    virtual_gpus: int,
    clips_per_gpu: int,
    steps_per_epoch: int,
    rank: int,
    ranks: int,
    start_step: int,
    end_step: int,
) -> Batches[MicroBatch]:
    """A rank's micro-batches of steps start_step .. end_step - 1, those of one step one after the other.

    The workers live through the whole run: epochs end without a pause. Raises ValueError as
    `order.micro_batches` does, and DecodeError when the batch with a bad video is asked for.
    """
    keys = order.micro_batches(
        len(store.manifest),
        seed,
        virtual_gpus,
        clips_per_gpu,
        steps_per_epoch,
        rank,
        ranks,
        start_step,
        end_step,
    )
    return Batches(_TrainingClips(data, store, seed), keys, data.workers)


def test_batches(
    data: DataSpec,
    evaluate: EvaluateSpec,
    store: Store,
    videos: Sequence[int],
    clips: int | None = None,
    crops: int | str | None = None,
) -> Batches[TestBatch]:
    """The test views of the given videos, in their order: `clips` times `crops` each, clip by clip.

    Left out, clips and crops are those of `evaluate`. Nothing is random.
    """
    dataset = _TestVideos(
        data,
        store,
        evaluate.short_side,
        evaluate.clips if clips is None else clips,
        evaluate.crops if crops is None else crops,
    )
    return Batches(dataset, [int(video) for video in videos], min(data.workers, len(videos)))


test_batches.__test__ = False  # type: ignore[attr-defined]  # nor is this one


@dataclass(frozen=True)
class _Failure:
    """A worker's error on its way home; the DataLoader would make a RuntimeError of the exception itself."""

    error: DecodeError


@dataclass(frozen=True)
class _TrainingClips(Dataset[MicroBatch | _Failure]):
    """Reads the micro-batch that a key names."""

    data: DataSpec
    store: Store
    seed: int

    def __getitem__(self, key: MicroBatchKey) -> MicroBatch | _Failure:
        step, virtual_gpu, epoch, ids = key
        try:
            clips = np.stack([self._clip(epoch, clip) for clip in ids.tolist()])
        except DecodeError as error:
            return _Failure(error)
        labels = self.store.manifest.labels[ids].astype(np.int64)
        tensors = (torch.from_numpy(array) for array in (clips, labels, ids))
        return MicroBatch(step, virtual_gpu, *tensors)

    def _clip(self, epoch: int, clip: int) -> NDArray[np.uint8]:
        data, manifest, seed = self.data, self.store.manifest, self.seed

        def choose(num_frames: int) -> NDArray[np.int64]:
            generator = rng.key(seed, "sampling", epoch, clip)
            frames = sampling.train_frames(
                data.sampling, num_frames, data.num_frames, data.frame_stride, generator
            )
            return _in_direction(frames, num_frames, manifest.is_reversed(clip))

        def view_of(width: int, height: int) -> augment.View:
            generator = rng.key(seed, "augment", epoch, clip)
            return augment.train_view(
                data.augment, data.short_side, data.crop, data.flip, width, height, generator
            )

        return self.store.read_clip(clip, choose, view_of)


@dataclass(frozen=True)
class _TestVideos(Dataset[TestBatch | _Failure]):
    """Reads the views of the video that a key names."""

    data: DataSpec
    store: Store
    short_side: int
    clips: int
    crops: int | str

    def __getitem__(self, video: int) -> TestBatch | _Failure:
        data, manifest = self.data, self.store.manifest

        def choose(num_frames: int) -> NDArray[np.int64]:
            frames = sampling.test_frames(
                data.sampling, num_frames, data.num_frames, data.frame_stride, self.clips
            )
            return _in_direction(frames, num_frames, manifest.is_reversed(video))

        def views_of(width: int, height: int) -> list[augment.View]:
            return augment.test_views(self.short_side, self.crops, width, height)

        try:
            views = self.store.read_views(video, choose, views_of)
        except DecodeError as error:
            return _Failure(error)
        return TestBatch(video, manifest.label(video), torch.from_numpy(views))


def _in_direction(frames: NDArray[np.int64], num_frames: int, backwards: bool) -> NDArray[np.int64]:
    """Frame i of the video played backwards is its frame N - 1 - i."""
    return num_frames - 1 - frames if backwards else frames


def _data_loader(dataset: Dataset[Any], keys: Iterable[Any], num_workers: int) -> DataLoader[Any]:
    """A loader that asks the dataset for whole batches by key; batch_size=None: it collates nothing."""
    parallel: dict[str, Any] = {}
    if num_workers:
        # Forking a process that has MPI, CUDA or threads is unsafe; workers are forked from a clean one.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        parallel = {
            "multiprocessing_context": context,
            "prefetch_factor": PREFETCHED_PER_WORKER,
            "worker_init_fn": _watch_main_process,
        }
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=keys,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # else it would draw from the global one
        **parallel,
    )


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Start processes that only SIGKILL ends: they inherit what is blocked here, across fork and exec.

    A scheduler signals all processes of a job, the fork server and the workers too; the main one decides what
    to do, and still wants its batches. A signal that comes meanwhile is delivered to it afterwards.
    """
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        resource_tracker.ensure_running()  # its start unblocks two of them; the fork server would do it later
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch_main_process(worker: int) -> None:
    """End the worker when the main process dies.

    The DataLoader's own watch looks at the parent, which is the fork server; and that one lives as long as a
    worker does.
    """
    main = multiprocessing.parent_process()
    assert main is not None

    def watch() -> None:
        main.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _kill(workers: Iterable[multiprocessing.process.BaseProcess]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.kill()
