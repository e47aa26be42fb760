"""`summit-train bench loader SPEC`: the loader's clips per second, where a clip's time goes, cores a rank needs."""

from __future__ import annotations

import argparse
import cProfile
import math
import os
import pstats
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from summit_train.bench.measure import Turns, Values, add_spec, in_turn, open_context, spread, spread_text
from summit_train.bench.steps import experiment_of, measure_steps
from summit_train.cluster.estimate import estimate
from summit_train.cluster.site import Site, load_site
from summit_train.core.machine import num_cpus
from summit_train.core.pages import Page
from summit_train.core.result import TextTable, tell
from summit_train.core.session import check_single
from summit_train.core.text import counted
from summit_train.data.batches.loader import Batches, MicroBatch, TrainingClips
from summit_train.data.batches.order import Order
from summit_train.data.batches.stores import FlowStore, open_store
from summit_train.data.dataset import Dataset
from summit_train.data.loading import Store
from summit_train.data.manifest import Manifest, read_manifest, write_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.packed.format import OPTIONS, Packing
from summit_train.data.packed.pack import pack_set
from summit_train.data.packed.read import ShardStore
from summit_train.plan import make_plan
from summit_train.spec import DataSpec, Spec, load_spec

_WARM_UP = 3  # batches of each worker before the clock starts
# The parts of a clip's time. A function belongs to the first part that names its file or itself; its time includes
# that of the compiled functions it calls.
PARTS = {
    "read": ("core/files.py:", "video/source.py:", "packed/read.py:"),
    "open": ("decode.py:open_video",),
    "decode": ("decode.py:_jumped", "decode.py:every_frame", "pictures.py:decode_picture"),
    "demux": ("video/decode.py:",),
    "scale": ("render.py:_scaled",),
    "crop": ("render.py:", "augment.py:cut"),
    "sample": ("core/rng.py:", "video/augment.py:"),
    "collate": ("clips.py:read", "loader.py:_padded"),
    "share": ("core/workers.py:", "core/pages.py:"),
}


@dataclass
class Subject:
    """Clips to measure: raw, or packed in one of the kinds. step: the next clip in the order of training."""

    name: str
    data: DataSpec
    store: Store
    seed: int
    step: int = 0

    def next_batches(self, count: int, workers: int) -> Batches[MicroBatch]:
        """Return the next `count` batches of a training, of one clip each."""
        num_clips = len(self.store.manifest)
        data = self.data.model_copy(update={"workers": workers, "on_bad_clip": "fail"})
        order = Order(num_clips, self.seed, virtual_gpus=1, clips_per_gpu=1, steps_per_epoch=num_clips)
        steps = range(self.step, self.step + count)
        self.step = steps.stop
        read = TrainingClips(data, self.store, self.seed, tuple(data.open_augment()))
        return read.batches(order, rank=0, ranks=1, steps=steps)

    def seconds(self, count: int, workers: int = 0) -> float:
        """Return the seconds of the next `count` clips of a training, in this process or by workers that are warm."""
        warm_up = _WARM_UP * workers
        with self.next_batches(warm_up + -(-count // self.data.repeats), workers) as batches:
            for _ in range(warm_up):
                next(batches)
            began = time.perf_counter()
            for _ in batches:
                pass
            return time.perf_counter() - began


def subject_of(data: DataSpec, manifest: Manifest, seed: int) -> Subject:
    """Open the clips of a manifest or a packed set. Raises UserError where that is damaged or does not fit."""
    store = open_store(data, manifest)
    files = store.pictures if isinstance(store, FlowStore) else store
    name = f"packed {files.pack.packing.kind}" if isinstance(files, ShardStore) else "raw"
    return Subject(name, data, store, seed)


def sampled(subject: Subject, clips: int, folder: Path) -> Iterator[Subject]:
    """Yield clips from all over a raw set, as they are and packed into `folder` in each kind. Raises DecodeError."""
    store = subject.store
    manifest = subject.store.manifest
    assert isinstance(store, FileStore)
    num_clips = min(clips, len(manifest))
    ids = [i * len(manifest) // num_clips for i in range(num_clips)]
    rows = [replace(manifest.row(clip), path=os.path.abspath(store.path(clip))) for clip in ids]
    write_manifest(folder / "sample.csv", rows)
    sample = FileStore(read_manifest(folder / "sample.csv"), "/", store.limits)
    yield replace(subject, store=sample)
    for kind in OPTIONS:
        pack_set(sample, folder / kind, Packing(kind), 1 << 30)
        yield subject_of(subject.data, read_manifest(folder / kind), subject.seed)


def measure(subjects: Sequence[Subject], clips: int, workers: int, repeats: int) -> list[Values]:
    """Measure all subjects in turn, `clips` clips a turn, at least 4 a worker. Raises DecodeError for a bad clip.

    Each gets clips_per_second of one core (this process) and of `workers` processes, as spreads, and its parts_ms.
    """
    for subject in subjects:
        subject.seconds(min(2, clips))
    kinds: list[Values] = [{"kind": subject.name, "clips": len(subject.store.manifest)} for subject in subjects]
    for way, count, own in (("core", clips, 0), ("all", max(clips, 4 * workers), workers)):
        rates: list[list[float]] = [[] for _ in subjects]
        turns = {i: partial(subject.seconds, count, own) for i, subject in enumerate(subjects)}
        for i, seconds in in_turn(turns, repeats):
            rates[i].append(count / seconds)
            by = counted(own, "worker") if own else "one core"
            tell(f"{subjects[i].name}, {by}: {rates[i][-1]:.1f} clips/s")
        for kind, rate in zip(kinds, rates, strict=True):
            kind[f"clips_per_second_{way}"] = spread(rate)
    for kind, subject in zip(kinds, subjects, strict=True):
        kind["parts_ms"] = parts(subject, clips)
    return kinds


def parts(subject: Subject, clips: int) -> dict[str, float]:
    """Return the milliseconds of a clip by part, including the profiler's own; `other` is the rest, `sum` the total."""
    page = Page()
    found = dict.fromkeys((*PARTS, "other"), 0.0)

    def part_of(file: str, function: str) -> str:
        whole = f"{file}:{function}"
        return next((part for part, names in PARTS.items() if any(name in whole for name in names)), "other")

    def share(count: int) -> None:
        for batch in subject.next_batches(count, 0):
            page.write([batch.clips.numpy(), batch.labels.numpy(), batch.ids.numpy()])

    share(1)  # allocates the shared memory
    with cProfile.Profile() as profile:
        share(clips)
    page.close()
    # For each function: its file ("~" if it is compiled), line and name; its own time in all, and by caller.
    for (file, _, name), (_, _, own, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        for (whose, _, caller), (_, _, its, _) in callers.items() if file == "~" else ():
            found[part_of(whose, caller)] += its
            own -= its
        found[part_of(file, name)] += own
    found["sum"] = sum(found.values())
    return {of: 1000 * seconds / clips for of, seconds in found.items()}


def verdict(core_clips_per_second: float, gpu_clips_per_second: float, cores_per_rank: int | None) -> Values:
    """Count the cores that a rank needs so that its network never waits, and compare them with the site's.

    cores_per_rank: of the site, its training process included; None without a site. gpu_clips_per_second: what a rank
    trains on. In the values `cores_per_gpu` are the loader's (data.workers); `cores_per_rank` has one more, to train.
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


def gpu_speed(spec: Spec, site: Site | None, args: argparse.Namespace) -> tuple[float | None, str | None]:
    """Return the clips/s that a rank trains on and where the figure is from, or None twice."""
    if args.measure:
        check_single("bench loader --measure")
        alone = spec.model_copy(update={"scale": spec.scale.model_copy(update={"gpus": 1})})
        with open_context() as context:
            values = measure_steps([experiment_of(alone, 1, synthetic=True)], Turns(args.repeats, 2, 2), {}, context)
        assert values is not None, "one rank"
        return values["specs"][0]["clips_per_second"]["max"], f"measured here, {context.device.type}"
    if args.rate is not None:
        return args.rate, "--rate"
    if site is None:
        return None, None
    batch = (spec.scale.gpus or site.ranks) * spec.scale.clips_per_gpu
    found = estimate(site, make_plan(spec, site.ranks, batch))
    return found.clips_per_second, found.source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_spec(parser)
    parser.add_argument("--clips", type=int, default=16, metavar="N", help="clips of a measurement [16]")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measurements [5]")
    parser.add_argument("--workers", type=int, default=num_cpus(), metavar="N", help="processes [one a CPU]")
    demand = parser.add_mutually_exclusive_group()
    demand.add_argument("--measure", action="store_true", help="measure the spec's network here, on one rank")
    demand.add_argument("--rate", type=float, metavar="X", help="a rank trains at X clips/s [the site's figure]")
    parser.add_argument("--site", metavar="NAME", help="site (name or YAML file): its cores, its GPUs' speed")


def run(args: argparse.Namespace) -> Values:
    """Measure the spec's clips as they are and, where they are videos, packed; optical flow only as it is.

    Raises UserError for a wrong spec or option, and for a clip that cannot be read. A core counts with what it gives
    alone, or with its part of what all workers give, if that is less: they share memory and caches.
    """
    spec = load_spec(args.spec, args.overrides)
    site = None if args.site is None else load_site(args.site)
    cores = None if site is None else site.cores_per_rank
    speed, source = gpu_speed(spec, site, args)
    torch.set_num_threads(1)
    subjects = [subject_of(spec.data, Dataset.open(spec, "train").manifest, spec.seed)]
    with tempfile.TemporaryDirectory() as folder:
        if subjects[0].name == "raw" and spec.data.modality != "flow":
            subjects = list(sampled(subjects[0], args.clips, Path(folder)))
        kinds = measure(subjects, args.clips, args.workers, args.repeats)
    for kind in kinds:
        alone, together = (kind[f"clips_per_second_{way}"]["median"] for way in ("core", "all"))
        core = kind["clips_per_second_per_core"] = min(alone, together / min(args.workers, num_cpus()))
        kind["verdict"] = None if speed is None else verdict(core, speed, cores)
    return {
        "network": spec.model.title,
        "settings": {"clips": args.clips, "repeats": args.repeats, "workers": args.workers, "cores": num_cpus()},
        "gpu": {"clips_per_second": speed, "source": source, "site": None if site is None else site.name},
        "kinds": kinds,
    }


def as_text(values: Values) -> str:
    settings = values["settings"]
    kinds = values["kinds"]
    gpu = values["gpu"]
    rows = [("clips/s", "one core", counted(settings["workers"], "worker"))]
    rows += [(k["kind"], *(spread_text(k[f"clips_per_second_{of}"], ".1f") for of in ("core", "all"))) for k in kinds]
    split = [("ms per clip", *kinds[0]["parts_ms"])]
    split += [(kind["kind"], *(f"{ms:.2f}" for ms in kind["parts_ms"].values())) for kind in kinds]
    measured = f"{counted(settings['repeats'], 'measurement')} of {counted(settings['clips'], 'clip')}"
    lines = [f"median (min .. max) of {measured}; cores here: {settings['cores']}", f"{TextTable(rows, indent='  ')}\n"]
    lines.append(f"{TextTable(split, indent='  ')}\n")
    if gpu["clips_per_second"] is None:
        per_core = "{kind}: a core for each {clips_per_second_per_core:.4g} clips/s of a rank"
        lines += [per_core.format(**kind) for kind in kinds]
        return "\n".join([*lines, "add --measure, --rate or --site to get the cores of a rank"])
    lines.append(f"a rank trains {values['network']} at {gpu['clips_per_second']:.4g} clips/s ({gpu['source']})")
    for kind in kinds:
        found = kind["verdict"]
        needed = found["cores_per_gpu"]
        cores = counted(found["cores_per_rank"], "core")
        line = f"{kind['kind']}: {cores} a rank, {needed} for the loader (data.workers={needed})"
        if found["cores_there"] is not None:
            word = "keeps up" if found["keeps_up"] else "THE GPU WAITS"
            line += f"; {gpu['site']} has {found['cores_there']} for it: {word}"
        lines.append(line)
    return "\n".join(lines)
