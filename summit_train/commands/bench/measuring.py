"""What the benches do once torch is loaded: open the ranks, measure, and give rank 0 the values."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from summit_train.comm import World
from summit_train.commands.start import choose_device, manifest_of, session, this_launch, watched
from summit_train.data.manifest import Manifest
from summit_train.plan import Plan, make_plan
from summit_train.scaling.cost import structure_of
from summit_train.scaling.measure import in_turn, training_multiply_adds
from summit_train.scaling.memory import peak_memory
from summit_train.scaling.peak import Peak, Shape, measure_peak, network_shapes
from summit_train.scaling.step_times import StepTimes, step_values, work_of
from summit_train.scaling.steps import StepBench, repeats_alone, turn
from summit_train.spec import Spec, load_spec
from summit_train.training.environment import environment


@dataclass(frozen=True)
class Subject:
    """A spec that is measured, on the ranks that there are; manifest None: random clips."""

    spec: Spec
    plan: Plan
    manifest: Manifest | None

    def values(self) -> dict[str, Any]:
        """What was measured, as a JSON object."""
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
            "synthetic": self.manifest is None,
            "clips": None if self.manifest is None else self.spec.data.train,
            "workers": 0 if self.manifest is None else self.spec.data.workers,
        }


def read_subject(path: str, overrides: Sequence[str], ranks: int, *, synthetic: bool) -> Subject:
    """Read the spec and, without `synthetic`, its training manifest. Raises ValueError for any mistake in them."""
    spec = load_spec(path, overrides)
    manifest = None if synthetic else manifest_of(spec, "train")
    one_batch = (spec.scale.gpus or ranks) * spec.scale.clips_per_gpu
    return Subject(spec, make_plan(spec, ranks, one_batch if manifest is None else len(manifest)), manifest)


def measure_steps(args: argparse.Namespace) -> dict[str, Any] | None:
    """`bench step`: what it prints as JSON, on rank 0; None elsewhere."""
    launch = this_launch()
    paths = [args.spec] if args.compare is None else [args.spec, args.compare]
    subjects = [read_subject(path, args.overrides, launch.size, synthetic=args.synthetic) for path in paths]
    with session(launch) as world:
        return _measure_on(world, subjects, args)


def _measure_on(world: World, subjects: Sequence[Subject], args: argparse.Namespace) -> dict[str, Any] | None:
    device = choose_device(world)
    peak = None if args.peak is not None else _peak_of(subjects, device, world)
    benches = [StepBench(subject.spec, subject.plan, world, device, subject.manifest) for subject in subjects]
    repeats: list[list[dict[str, float]]] = [[] for _ in benches]
    with watched(world, max(subject.spec.watch.stall_seconds or 0 for subject in subjects) or None) as watchdog:
        watchdog.at("warming up", waits=world.size > 1)
        if len(benches) == 1:
            timed = ((0, seconds) for seconds in repeats_alone(benches[0], args.warm_up, args.steps, args.repeats))
        else:
            turns = {str(i): turn(bench, args.warm_up, args.steps) for i, bench in enumerate(benches)}
            timed = ((int(name), seconds) for name, seconds in in_turn(turns, args.repeats))
        for i, seconds in timed:
            repeats[i].append(seconds)
            watchdog.at(f"after repeat {len(repeats[i])} of {subjects[i].spec.name}", waits=world.size > 1)
            if world.rank == 0:
                _say(f"{subjects[i].spec.name}: {sum(seconds.values()):.3f} s a step ({len(repeats[i])})")
        memory = world.gather(peak_memory(device))
        activations = [world.gather(bench.activation_bytes()) for bench in benches]
    return _values(world, device, subjects, args, peak, repeats, memory, activations)
