"""Which operators a training step spends its time in, and what utilisation is left if all but convolutions took none.

    python bench/operators.py configs/kinetics/tsm_r50_8f.yaml scale.clips_per_gpu=4 precision=bf16
    python bench/operators.py SPEC [key=value ...] [--steps N] [--json]

The step is `train`'s own, in one process on random clips. torch's profiler gives each operator's own time on the CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from torch.profiler import ProfilerActivity, profile

from summit_train.bench.benches import measure_peaks
from summit_train.bench.commands.arguments import Values, add_output, add_spec, experiment_of, open_place, show
from summit_train.bench.measure import training_multiply_adds
from summit_train.bench.steps import StepBench
from summit_train.core.text import share, table
from summit_train.core.watch import Watchdog
from summit_train.models.network import count_network
from summit_train.report.tables import machine_text
from summit_train.spec import load_spec
from summit_train.training.environment import environment

# The first group with a part of the operator's name takes it. A shift that is fused into its convolution counts there.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "convolutions and products": ("conv", "Convolution", "addmm", "aten::mm"),
    "normalisation, with sum and relu": ("batch_norm", "_Normalise", "relu", "clamp_min", "threshold"),
    "other sums": ("aten::add",),
    "copies": ("copy_", "clone", "fill_", "zero_", "_foreach_copy"),
}
OTHER = "other"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_spec(parser)
    parser.add_argument("--steps", type=int, default=3, help="profiled steps [3]")
    add_output(parser, figure=False)
    return show(parser.parse_args(), measure, as_text)


def measure(args: argparse.Namespace) -> Values:
    """Profile steps of the spec on one rank; return the seconds of each group as JSON values."""
    experiment = experiment_of(load_spec(args.spec, [*args.overrides, "scale.gpus=1"]), 1, synthetic=True)
    with open_place() as place, Watchdog(place.world, None) as watchdog:
        if place.device.type != "cpu":
            sys.exit("bench/operators.py: operators are timed on CPUs alone; hide the GPU (CUDA_VISIBLE_DEVICES=)")
        (peak,) = measure_peaks([experiment.spec], None, place).values()
        bench = StepBench(experiment, place.world, place.device, watchdog)
        bench.warm_up(4)
        for _ in range(2):  # the first time the heap makes room for the profiler's notes, between the activations
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                bench.repeat(args.steps)
        about = environment(place.world, place.device, [place.world.host])
    seconds = dict.fromkeys((*GROUPS, OTHER), 0.0)
    for event in profiler.key_averages():
        group = next((group for group, parts in GROUPS.items() if any(part in event.key for part in parts)), OTHER)
        seconds[group] += event.self_cpu_time_total / 1e6 / args.steps
    work = experiment.plan.clips_per_gpu * training_multiply_adds(count_network(experiment.spec))
    rate = peak["multiply_adds_per_second"]
    return {
        "environment": about,
        "spec": experiment.values(),
        "seconds": seconds,
        "peak_multiply_adds_per_second": rate,
        "utilisation": work / sum(seconds.values()) / rate,
        "utilisation_of_convolutions_alone": work / seconds["convolutions and products"] / rate,
    }


def as_text(values: Values) -> str:
    """Return the shares for people."""
    spec, seconds = values["spec"], values["seconds"]
    total = sum(seconds.values())
    rows = [(name, f"{own:.3f} s", share(own / total)) for name, own in (seconds | {"all": total}).items()]
    clip = f"{spec['clips_per_gpu']} clips of {spec['frames']} x {spec['crop']}^2"
    return "\n".join([
        f"machine: {machine_text(values['environment'])}",
        f"{spec['name']}, {spec['precision']}, {clip}, a step as the profiler sees it:",
        table(rows),
        f"peak: {values['peak_multiply_adds_per_second'] / 1e9:.1f} G multiply-adds/s",
        f"utilisation: {share(values['utilisation'])}; "
        f"if all but convolutions took no time: {share(values['utilisation_of_convolutions_alone'])}",
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
