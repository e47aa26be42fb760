"""What `bench step` does once torch is loaded: open the ranks, measure, and give rank 0 the values."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from summit_train.comm import World
from summit_train.commands.start import choose_device, manifest_of, session, this_launch, watched
from summit_train.data.manifest import Manifest
from summit_train.data.quarantine import kept_clips
from summit_train.network import count_network
from summit_train.plan import Plan, make_plan
from summit_train.scaling.measure import in_turn, training_multiply_adds
from summit_train.scaling.memory import peak_memory
from summit_train.scaling.peak import measure_peak, network_shapes
from summit_train.scaling.step_times import StepTimes, step_values, work_of
from summit_train.scaling.steps import StepBench, repeats_alone, turn
from summit_train.spec import Spec, load_spec
from summit_train.training.environment import environment

Seconds = dict[str, float]
Peaks = dict[str, dict[str, Any] | None]  # by precision


@dataclass(frozen=True)
class Subject:
    """A spec that is measured, on the ranks that there are; manifest None: random clips."""

    spec: Spec
    plan: Plan
    manifest: Manifest | None

    def values(self) -> dict[str, Any]:
        """What is measured, as a JSON object."""
        model, data, plan = self.spec.model, self.spec.data, self.plan
        return {
            "name": self.spec.name,
            "arch": model.arch,
            "backbone": model.backbone,
            "frames": data.num_frames,
            "crop": data.crop,
            "precision": self.spec.precision,
            "ranks": plan.ranks,
            "accumulation": plan.accumulation,
            "clips_per_gpu": plan.clips_per_gpu,
            "global_batch": plan.global_batch,
            "gradient_bytes": plan.gradient_bytes,
            "synthetic": self.manifest is None,
            "clips": None if self.manifest is None else self.spec.data.train,
            "workers": 0 if self.manifest is None else self.spec.data.workers,
        }


def read_subject(path: str, overrides: Sequence[str], ranks: int, *, synthetic: bool) -> Subject:
    """Read the spec and, without `synthetic`, its training manifest. Raises ValueError for any mistake in them."""
    spec = load_spec(path, overrides)
    manifest = None if synthetic else manifest_of(spec, "train")
    clips = (spec.scale.gpus or ranks) * spec.scale.clips_per_gpu  # of one step
    if manifest is not None:
        clips = len(kept_clips(spec.data, manifest))
    return Subject(spec, make_plan(spec, ranks, clips), manifest)


def measure_steps(paths: Sequence[str], args: argparse.Namespace) -> dict[str, Any] | None:
    """What `bench step` prints as JSON, of one spec or of several in turn, on rank 0; None elsewhere."""
    launch = this_launch()
    subjects = [read_subject(path, args.overrides, launch.size, synthetic=args.synthetic) for path in paths]
    with session(launch) as world:
        device = choose_device(world)
        by_precision = {subject.spec.precision: subject for subject in subjects}
        peaks: Peaks = {}
        for precision, subject in by_precision.items():
            peaks[precision] = peak_values(subject.spec, subject.plan.clips_per_gpu, args.peak, world, device)
        repeats: list[list[Seconds]] = [[] for _ in subjects]
        with watched(world, subjects[0].spec.watch.stall_seconds) as watchdog:
            benches = [StepBench(s.spec, s.plan, world, device, s.manifest, watchdog) for s in subjects]
            for i, seconds in _repeats(benches, args):
                repeats[i].append(seconds)
                turns = f"turn {len(repeats[i])} of {args.repeats}"
                say(world, f"{subjects[i].spec.name}, {turns}: {sum(seconds.values()):.3f} s a step")
        measured = [
            _values(subject, world.gather(times), world.gather(bench.activation_bytes), peaks[subject.spec.precision])
            for subject, bench, times in zip(subjects, benches, repeats, strict=True)
        ]
        about = _about(world, device, args, len(subjects))
    return _result(about, peaks, measured) if world.rank == 0 else None


def say(world: World, text: str) -> None:
    """Let rank 0 tell a person who waits how far it is."""
    if world.rank == 0:
        print(text, file=sys.stderr, flush=True)


def _repeats(benches: Sequence[StepBench], args: argparse.Namespace) -> Iterator[tuple[int, Seconds]]:
    """(which bench, seconds of each phase) as they are measured."""
    if len(benches) == 1:
        for seconds in repeats_alone(benches[0], args.warm_up, args.steps, args.repeats):
            yield 0, seconds
        return
    turns = {str(i): turn(bench, args.warm_up, args.steps) for i, bench in enumerate(benches)}
    for name, seconds in in_turn(turns, args.repeats):
        yield int(name), seconds


def peak_values(
    spec: Spec, clips: int, given: float | None, world: World, device: torch.device
) -> dict[str, Any] | None:
    """The peak of all ranks, which measure at the same time, with the threads and the precision that they train with.

    given: of each rank, instead of measuring; 0: None, nobody asks.
    """
    if given == 0:
        return None
    rate, shape, tried = given, None, []
    if rate is None:
        say(world, f"measuring the peak of matrix products in {spec.precision}")
        world.barrier()
        peak = measure_peak(spec.precision, device, network_shapes(count_network(spec), clips))
        rate, shape, tried = peak.multiply_adds_per_second, peak.shape, [asdict(product) for product in peak.tried]
    rates = world.gather(rate) or []
    return {"precision": spec.precision, "multiply_adds_per_second": sum(rates), "shape": shape, "tried": tried}


def _values(
    subject: Subject, ranks: list[list[Seconds]] | None, activations: list[int] | None, peak: dict[str, Any] | None
) -> tuple[dict[str, Any], StepTimes] | None:
    """One spec's values and times; None where rank 0 has gathered them."""
    if ranks is None or activations is None:
        return None
    times = StepTimes(tuple(map(tuple, ranks)))
    rate = None if peak is None else peak["multiply_adds_per_second"]
    work = work_of(subject.plan, training_multiply_adds(count_network(subject.spec)), rate)
    return subject.values() | step_values(times, work) | {"activation_bytes": max(activations)}, times


def _about(world: World, device: torch.device, args: argparse.Namespace, num_specs: int) -> dict[str, Any]:
    hosts, peaks = world.gather(world.host), world.gather(peak_memory(device))
    of = "tensors on the GPU" if device.type == "cuda" else "the whole process, Python and torch with it"
    return {
        "bench": "step",
        "environment": environment(world, device, hosts or []),
        "settings": {"repeats": args.repeats, "steps": args.steps, "warm_up": args.warm_up},
        "peak_memory_bytes": max(peaks or [0]),
        "peak_memory_of": f"{of}, highest of all ranks" + (", all specs at once" if num_specs > 1 else ""),
    }


def _result(
    about: dict[str, Any], peaks: Peaks, measured: Sequence[tuple[dict[str, Any], StepTimes] | None]
) -> dict[str, Any]:
    found = [pair for pair in measured if pair is not None]
    ratios = None
    if len(found) == 2:
        ratios = {name: ratio.values() for name, ratio in found[0][1].ratios(found[1][1]).items()}
    return about | {
        "peaks": [peak for peak in peaks.values() if peak is not None],
        "specs": [values for values, _ in found],
        "ratios": ratios,
    }
