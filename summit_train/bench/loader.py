"""The loader, measured: clips a second of one core and of all workers, and where the time of a clip goes."""

from __future__ import annotations

import cProfile
import math
import os
import pstats
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from summit_train.bench.measure import in_turn, spread
from summit_train.data.batches.loader import MicroBatch, training_batches
from summit_train.data.batches.order import Order
from summit_train.data.batches.stores import FlowStore, Store, open_store
from summit_train.data.batches.workers import Batches
from summit_train.data.manifest import Manifest, read_manifest, write_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.packed.format import Packing
from summit_train.data.packed.pack import pack_set
from summit_train.data.packed.read import ShardStore
from summit_train.spec import DataSpec

# A stage -> parts of the file and function names, as the profiler writes them, whose own time it is. The first match.
STAGES: Mapping[str, tuple[str, ...]] = {
    "read": ("posix.", "_io.", "zlib.crc32", "sha256", "data/packed/", "genericpath"),
    "open": ("av.container", "av.codec.context.create", "context.py"),
    "seek": ("decode.py:demuxed", "_held", "decode.py:__init__", "decode.py:spans", "flush_buffers", "video/source.py"),
    "decode": ("'decode' of 'av.", "video/decode.py", "video/pictures.py"),
    "resize": ("'reformat' of 'av.", "render.py", "to_ndarray"),
    "augment": ("augment.py", "rng.py"),
}
OTHER, TRANSFER = "other", "transfer"
_SHARD_BYTES = 1 << 30
_WARM_UP = 3  # batches of each worker before the clock starts


@dataclass
class Subject:
    """Clips to measure: raw, packed bytes or packed JPEG. `step` counts the clips taken by `next_batches`."""

    name: str
    data: DataSpec
    store: Store
    seed: int
    step: int = 0

    @property
    def clips(self) -> int:
        """Return the number of clips."""
        return len(self.store.manifest)

    def next_batches(self, count: int, workers: int) -> Batches[MicroBatch]:
        """Return the next `count` training batches of one clip each, in the order of training, with their own draws."""
        data = self.data.model_copy(update={"workers": workers, "on_bad_clip": "fail"})
        order = Order(self.clips, self.seed, virtual_gpus=1, clips_per_gpu=1, steps_per_epoch=self.clips)
        self.step += count
        steps = range(self.step - count, self.step)
        return training_batches(data, self.store, order, rank=0, ranks=1, steps=steps)


def subject_of(data: DataSpec, manifest: Manifest, seed: int) -> Subject:
    """Open the clips of a manifest or a packed set. Raises PackError where that is damaged or does not fit."""
    store = open_store(data, manifest)
    files = store.pictures if isinstance(store, FlowStore) else store
    name = f"packed {files.pack.packing.kind}" if isinstance(files, ShardStore) else "raw"
    return Subject(name, data, store, seed)


def sampled(subject: Subject, clips: int, folder: Path) -> Iterator[Subject]:
    """Yield clips from all over a raw set, as they are, and packed into `folder` in both ways.

    Raises DecodeError for a clip that cannot be packed.
    """
    store, manifest = subject.store, subject.store.manifest
    assert isinstance(store, FileStore)
    num_clips, rows = min(clips, subject.clips), []
    for clip in (place * subject.clips // num_clips for place in range(num_clips)):
        rows.append(replace(manifest.row(clip), path=os.path.abspath(store.path(clip))))
    write_manifest(folder / "sample.csv", rows)
    sample = FileStore(read_manifest(folder / "sample.csv"), "/", store.limits)
    yield Subject("raw", subject.data, sample, subject.seed)
    for kind in ("bytes", "jpeg"):
        pack_set(sample, folder / kind, Packing(kind), _SHARD_BYTES)
        yield subject_of(subject.data, read_manifest(folder / kind), subject.seed)


def measure(subjects: Sequence[Subject], clips: int, workers: int, repeats: int) -> list[dict[str, Any]]:
    """Measure all subjects in turn, `clips` clips a turn. Raises DecodeError for a bad clip.

    Each gets clips_per_second of one core (this process) and of `workers` processes, as spreads, and stages_ms of a
    clip, whose sum is profiled_ms: own times under a profiler, which itself takes a few percent. The transfer from a
    worker, and to the GPU where there is one, is timed apart.
    """
    for subject in subjects:
        _read(subject.next_batches(min(2, clips), 0))
    ways = {"core": partial(_one_core, clips=clips), "all": partial(_all_workers, clips=clips, workers=workers)}
    speeds: dict[str, list[list[float]]] = {way: [[] for _ in subjects] for way in ways}
    for way, take in ways.items():
        for i, rate in in_turn({i: partial(take, subject) for i, subject in enumerate(subjects)}, repeats):
            speeds[way][i].append(rate)
    return [
        {"kind": subject.name, "clips": subject.clips}
        | {f"clips_per_second_{way}": spread(rates[i]) for way, rates in speeds.items()}
        | _stages(subject, clips)
        for i, subject in enumerate(subjects)
    ]


def _one_core(subject: Subject, clips: int) -> float:
    """Return the clips a second of this process."""
    return clips / _read(subject.next_batches(clips, 0))


def _all_workers(subject: Subject, clips: int, workers: int) -> float:
    """Return the clips a second of all workers, once they are under way."""
    warm_up, count = _WARM_UP * workers, max(clips, 4 * workers)
    with subject.next_batches(warm_up + count, workers) as batches:
        for _ in range(warm_up):
            next(batches)
        return count / _read(batches)


def _stages(subject: Subject, clips: int) -> dict[str, Any]:
    """Return the milliseconds of a clip by stage."""
    batches = subject.next_batches(clips, 0)
    with cProfile.Profile() as profile:
        taken = list(batches)
    found = dict.fromkeys((*STAGES, OTHER, TRANSFER), 0.0)
    # pstats knows the functions; each value begins with (calls, calls not from itself, own seconds).
    for (file, _, function), values in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        found[stage_of(file, function)] += values[2]
    found[TRANSFER] = sum(_handed_over(batch) for batch in taken)
    stages = {stage: 1000 * seconds / clips for stage, seconds in found.items()}
    return {"stages_ms": stages, "profiled_ms": sum(stages.values())}


def stage_of(file: str, function: str) -> str:
    """Return the stage of a function's own time; `file` and `function` as the profiler names them."""
    name = f"{file}:{function}"
    return next((stage for stage, parts in STAGES.items() if any(part in name for part in parts)), OTHER)


def _read(batches: Batches[MicroBatch]) -> float:
    began = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - began


def _handed_over(batch: MicroBatch) -> float:
    """Return the seconds to put a clip into shared memory, as a worker does, and from there onto the GPU."""
    clips = batch.clips.clone()
    began = time.perf_counter()
    clips.share_memory_()  # type: ignore[no-untyped-call]
    if torch.cuda.is_available():
        clips.to("cuda")
        torch.cuda.synchronize()
    return time.perf_counter() - began


def core_rate(alone: float, together: float, cores: int) -> float:
    """Return the clips a second that a rank can count on for each core of its loader.

    That is what one core gives `alone`, or its part of what workers on `cores` cores give `together`: they share memory
    and caches, and hand their clips over.
    """
    return min(alone, together / cores)


def verdict(core_clips_per_second: float, gpu_clips_per_second: float, cores_per_rank: int | None) -> dict[str, Any]:
    """Return how many cores a rank needs so that its network never waits; whether the site has them, None without one.

    cores_per_rank: of the site, its training process included. gpu_clips_per_second: what a rank trains on.
    The values: `cores_per_gpu` are the loader's, as many as data.workers; `cores_per_rank` are these and one for the
    training process.
    """
    needed = math.ceil(gpu_clips_per_second / core_clips_per_second)
    there = None if cores_per_rank is None else cores_per_rank - 1
    return {
        "gpu_clips_per_second": gpu_clips_per_second,
        "cores_per_gpu": needed,
        "cores_per_rank": needed + 1,
        "cores_there": there,
        "keeps_up": None if there is None else needed <= there,
    }
