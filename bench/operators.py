"""Which operators a training step spends its time in, and what utilisation is left if all but convolutions took none.

    python bench/operators.py configs/kinetics/tsm_r50_8f.yaml scale.clips_per_gpu=4 precision=bf16
    python bench/operators.py SPEC [--steps N] [--json] [key=value ...]

The step is `train`'s own, in one process on random clips; torch's profiler gives each operator's own time on the CPU.
Shifts that are copies, and conversions between channels-last and plain layout, would stand under copies; conversions
of activations are counted by themselves, with every operator's input and result looked at. What oneDNN reorders within
a convolution is part of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from summit_train.commands.bench.arguments import machine_text, share, table
from summit_train.commands.bench.measuring import peak_values, read_subject
from summit_train.commands.start import choose_device, session, this_launch, watched
from summit_train.scaling.cost import structure_of
from summit_train.scaling.measure import training_multiply_adds
from summit_train.scaling.steps import StepBench
from summit_train.training.environment import environment

# The first group with a part of the operator's name takes it.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "convolutions and products": ("conv", "addmm", "aten::mm"),
    "normalisation, with sum and relu": ("batch_norm", "_Normalise", "relu", "clamp_min", "threshold", "_Join"),
    "other sums": ("aten::add",),
    "moves in time": ("_BesideProjection", "_OfPlain"),
    "copies": ("copy_", "clone", "fill_", "zero_", "_foreach_copy"),
}
OTHER = "other"


class Conversions(TorchDispatchMode):
    """Counts operators that read an activation in one of the two layouts and write it in the other."""

    def __init__(self, frames: int) -> None:
        super().__init__()
        self._frames = frames
        self.found: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        activations = [x for x in (*args, *results) if is_activation(x, self._frames)]
        if len({x.untyped_storage().data_ptr() for x in activations}) == 1:
            return result  # A view moves nothing.
        if len({layout(x) for x in activations}) > 1:
            self.found[str(func)] = self.found.get(str(func), 0) + 1
        return result


def is_activation(x: Any, frames: int) -> bool:
    """Whether `x` has so many frames, of more than a channel and a pixel, whole in memory in one of the two layouts."""
    if not (isinstance(x, torch.Tensor) and x.dim() == 4 and x.shape[0] == frames and min(x.shape[1:3]) > 1):
        return False
    return x.is_contiguous() != x.is_contiguous(memory_format=torch.channels_last)


def layout(x: torch.Tensor) -> str:
    """Of an activation."""
    return "plain" if x.is_contiguous() else "channels-last"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=3, help="profiled steps [3]")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    subject = read_subject(args.spec, [*args.overrides, "scale.gpus=1"], 1, synthetic=True)
    with session(this_launch()) as world, watched(world, None) as watchdog:
        device = choose_device(world)
        if device.type != "cpu":
            sys.exit("bench/operators.py: operators are timed on CPUs alone; hide the GPU (CUDA_VISIBLE_DEVICES=)")
        peak = peak_values(subject.spec, subject.plan.clips_per_gpu, None, world, device)
        bench = StepBench(subject.spec, subject.plan, world, device, None, watchdog)
        bench.warm_up(3)
        frames = subject.plan.clips_per_gpu * subject.spec.data.num_frames
        with Conversions(frames) as conversions:
            bench.repeat(1)
        for _ in range(2):  # the first time the heap makes room for the profiler's notes, between the activations
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                bench.repeat(args.steps)
        about = environment(world, device, [world.host])
    assert peak is not None
    seconds = by_group((event.key, event.self_cpu_time_total / 1e6 / args.steps) for event in profiler.key_averages())
    work = subject.plan.clips_per_gpu * training_multiply_adds(structure_of(subject.spec))
    rate = peak["multiply_adds_per_second"]
    values = {
        "environment": about,
        "spec": subject.values(),
        "seconds": seconds,
        "peak_multiply_adds_per_second": rate,
        "utilisation": work / sum(seconds.values()) / rate,
        "utilisation_of_convolutions_alone": work / seconds["convolutions and products"] / rate,
        "layout_conversions": conversions.found,
    }
    print(json.dumps(values) if args.json else as_text(values))
    return 0


def by_group(operators: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Seconds of each group."""
    seconds = dict.fromkeys((*GROUPS, OTHER), 0.0)
    for name, own in operators:
        seconds[next((group for group, parts in GROUPS.items() if any(part in name for part in parts)), OTHER)] += own
    return seconds


def as_text(values: Mapping[str, Any]) -> str:
    """For people."""
    spec, seconds = values["spec"], values["seconds"]
    total = sum(seconds.values())
    rows = [(name, f"{own:.3f} s", share(own / total)) for name, own in (seconds | {"all": total}).items()]
    clip = f"{spec['clips_per_gpu']} clips of {spec['frames']} x {spec['crop']}^2"
    conversions = ", ".join(f"{name} ({count})" for name, count in values["layout_conversions"].items()) or "none"
    return "\n".join([
        f"machine: {machine_text(values['environment'])}",
        f"{spec['name']}, {spec['precision']}, {clip}, a step as the profiler sees it:",
        table(rows),
        f"peak: {values['peak_multiply_adds_per_second'] / 1e9:.1f} G multiply-adds/s",
        f"utilisation: {share(values['utilisation'])}; "
        f"if all but convolutions took no time: {share(values['utilisation_of_convolutions_alone'])}",
        f"conversions of activations between layouts: {conversions}",
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
