"""The networks that the paper compares, as specs, and their forward passes measured in turn."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from summit_train.cluster.site import shipped
from summit_train.commands.bench.measuring import peak_values, say
from summit_train.commands.start import choose_device, session, this_launch
from summit_train.network import count_network
from summit_train.scaling.inference import InferenceBench
from summit_train.scaling.measure import MeasureError, in_turn, pair_ratios, positive, spread
from summit_train.scaling.published import SLOWEST, TABLE_1, Network
from summit_train.spec import Spec, load_spec
from summit_train.training.environment import environment

PAPERS = ("i3d_3x3x3_r50_16f", "i3d_3x1x1_r50_32f", "tsm_r50_8f")  # configs/kinetics, in the order of Table 1


@dataclass(frozen=True)
class Subject:
    """One network of the comparison: the spec's path, the spec with all overrides."""

    path: str
    spec: Spec

    @property
    def label(self) -> str:
        """I3D 3x3x3, 16 frames."""
        arch = self.spec.model.arch
        name = {"tsm": "TSM", "tsn": "TSN"}.get(arch) or arch.replace("i3d_", "I3D ")
        return f"{name}, {self.spec.data.num_frames} frames"

    @property
    def published(self) -> Network | None:
        """Table 1's row, where the spec is that network."""
        model, data = self.spec.model, self.spec.data
        row = TABLE_1.get(model.arch)
        same = row is not None and (model.backbone, model.width, data.num_frames, data.crop) == (
            "resnet50", 1.0, row.frames, 224,
        )  # fmt: skip
        return row if same else None


def add_networks(parser: argparse.ArgumentParser, batch: int, batch_help: str) -> None:
    """The options that say which networks and how many clips."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override, in all specs")
    parser.add_argument("--specs", nargs="+", metavar="SPEC", help="other specs than the paper's three")
    parser.add_argument("--batch", type=int, default=batch, metavar="N", help=f"{batch_help} [{batch}]")


def read_networks(args: argparse.Namespace) -> list[Subject]:
    """The specs, one rank a virtual GPU of --batch clips. Raises ValueError for a mistake in them."""
    paths = args.specs or [str(shipped("configs/kinetics") / f"{name}.yaml") for name in PAPERS]
    words = batch_words(args)
    return [Subject(path, load_spec(path, words)) for path in paths]


def batch_words(args: argparse.Namespace) -> list[str]:
    """All overrides of these benches, --batch with them."""
    return [*args.overrides, "scale.gpus=null", f"scale.clips_per_gpu={positive(args.batch, '--batch')}"]


def measure_inference(subjects: Sequence[Subject], args: argparse.Namespace) -> dict[str, Any]:
    """Cost, throughput and utilisation of each network's forward pass, in turn: Table 1 and Figure 3a."""
    launch = this_launch()
    if launch.size > 1:
        raise MeasureError(f"{launch.size} ranks were started: this bench measures one device, start it alone")
    with session(launch) as world:
        device = choose_device(world)
        by_precision = {subject.spec.precision: subject.spec for subject in subjects}
        peaks = {name: peak_values(spec, args.batch, args.peak, world, device) for name, spec in by_precision.items()}
        benches = {str(i): InferenceBench(s.spec, device, args.batch) for i, s in enumerate(subjects)}
        for bench in benches.values():
            bench.repeat(args.warm_up)
        seconds: list[list[float]] = [[] for _ in subjects]
        turns = {name: (lambda bench=bench: bench.repeat(args.steps)) for name, bench in benches.items()}
        for name, found in in_turn(turns, args.repeats):
            seconds[int(name)].append(found)
            say(world, f"{subjects[int(name)].label}: {found:.3f} s a forward pass of {args.batch} clips")
        machine = environment(world, device, [world.host])
    rows = [
        _row(subject, times, args.batch, peaks[subject.spec.precision])
        for subject, times in zip(subjects, seconds, strict=True)
    ]
    _relate(rows, seconds, subjects)
    settings = {name: getattr(args, name) for name in ("batch", "repeats", "steps", "warm_up")}
    found_peaks = [peak for peak in peaks.values() if peak is not None]
    return {"environment": machine, "settings": settings, "peaks": found_peaks, "rows": rows}


def _row(subject: Subject, seconds: Sequence[float], batch: int, peak: dict[str, Any] | None) -> dict[str, Any]:
    network, spec = count_network(subject.spec), subject.spec
    rates = [batch * network.multiply_adds / s for s in seconds]
    published = subject.published
    utilisation = None if peak is None else spread([rate / peak["multiply_adds_per_second"] for rate in rates]).values()
    return {
        "label": subject.label,
        "name": spec.name,
        "arch": spec.model.arch,
        "backbone": spec.model.backbone,
        "precision": spec.precision,
        "frames": spec.data.num_frames,
        "crop": spec.data.crop,
        "parameters": network.parameters,
        "multiply_adds": network.multiply_adds,
        "input_bytes": network.input_bytes,
        "compute_io": network.compute_io,
        "pass_s": spread(seconds).values(),
        "clips_per_second": spread([batch / s for s in seconds]).values(),
        "multiply_adds_per_second": spread(rates).values(),
        "utilisation": utilisation,
        "published": None if published is None else _published(published),
    }


def _published(row: Network) -> dict[str, Any]:
    """Table 1's row with its throughput in multiples of the slowest network's, as the table has it too."""
    return asdict(row) | {"relative_throughput": row.clips_per_second / TABLE_1[SLOWEST].clips_per_second}


def _relate(rows: Sequence[dict[str, Any]], seconds: Sequence[Sequence[float]], subjects: Sequence[Subject]) -> None:
    """Add the throughput and the multiply-adds a second in multiples of I3D 3x1x1's, else of the last network's."""
    archs = [subject.spec.model.arch for subject in subjects]
    base = archs.index(SLOWEST) if SLOWEST in archs else len(archs) - 1
    for row, times in zip(rows, seconds, strict=True):
        faster = pair_ratios(seconds[base], times)
        work = row["multiply_adds"] / rows[base]["multiply_adds"]
        row["relative_to"] = rows[base]["label"]
        row["relative_throughput"] = spread(faster).values()
        row["relative_utilisation"] = spread([work * ratio for ratio in faster]).values()
