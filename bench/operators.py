"""Where the time of a training step goes: operators on a CPU, kernels and copies on a GPU, by torch's profiler.

    python bench/operators.py configs/kinetics/tsm_r50_8f.yaml scale.clips_per_gpu=4 precision=bf16
    python bench/operators.py SPEC [key=value ...] [--steps N] [--out FILE.png] [--json]

The step is `train`'s own, in one process on random clips. As the profiler slows the host down, step and best matrix
product are measured before. Utilisation is also given as it would be if all but convolutions and products took no time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from summit_train.bench.measure import Context, Turns, open_context
from summit_train.bench.peak import measure_peaks
from summit_train.bench.steps import Experiment, StepBench, experiment_of, measure_steps
from summit_train.core.result import TextTable
from summit_train.core.text import share
from summit_train.core.watch import Watchdog
from summit_train.report.figures import PALETTE, drawable, drawn, wrapped
from summit_train.report.tables import machine_text
from summit_train.spec import load_spec

Values = dict[str, Any]
TOP = 15  # kernels by name
CONVOLUTIONS, OTHER = "convolutions and products", "other"
# The first group with a part of the name, in small letters, takes it. Kernels of cuDNN and cuBLAS are named after what
# they compute (fprop, dgrad, wgrad; gemm, nvjet), PyTorch's after operators. Copies come before elementwise kernels, as
# a copy is an elementwise kernel with "copy" in its name. A shift that is fused into its convolution counts there.
GROUPS: Mapping[str, str] = {
    "optimizer and gradient norm": "multi_tensor fusedsgd fused_sgd lpnorm _foreach aten::_fused vector_norm",
    "normalisation, with sum and relu": "batch_norm batchnorm bn_fw bn_bw welford _normalise relu clamp threshold",
    CONVOLUTIONS: "fprop dgrad wgrad conv winograd implicit_gemm nchwtonhwc nhwctonchw gemm gemv nvjet cublas cutlass "
    "splitk addmm aten::mm aten::bmm",
    "casts": "float16_copy_kernel float16tofloat32_copy_kernel",
    "copies, fills and the shift": "copy memcpy memset fill catarray aten::cat aten::clone aten::zero aten::empty",
    "pooling": "pool",
    "loss": "softmax nll_loss cross_entropy",
    "elementwise and sums": "elementwise reduce_kernel aten::add aten::mul aten::div aten::sum aten::mean",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", metavar="SPEC")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=3, help="profiled steps [3]")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="draw the shares")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    experiment = experiment_of(load_spec(args.spec, [*args.overrides, "scale.gpus=1"]), 1, synthetic=True)
    with open_context() as context:
        measured = measure_steps([experiment], Turns(5, 2, 4), measure_peaks([experiment.spec], None, context), context)
        assert measured is not None, "this is the only rank"
        values = with_utilisation(measured, *profiled(experiment, args.steps, context))
    if args.out is not None:
        draw(args.out, values)
    print(json.dumps(values) if args.json else as_text(values))
    return 0


def profiled(experiment: Experiment, steps: int, context: Context) -> tuple[dict[str, float], float | None]:
    """Return a step's seconds by operator, or GPU kernel and copy, and those in which any ran (None on a CPU)."""
    on_gpu = context.device.type == "cuda"
    with Watchdog(context.world, experiment.spec.watch.stall_seconds) as watchdog:
        bench = StepBench(experiment, context.world, context.device, watchdog)
        bench.repeat(4)
        # The first profile loads CUPTI, and on a CPU the heap makes room for the profiler's notes.
        for _ in range(2):
            with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as profiler:
                bench.repeat(steps)
    if not on_gpu:
        return {event.key: event.self_cpu_time_total / 1e6 / steps for event in profiler.key_averages()}, None
    seconds, busy = of_kernels(profiler.events(), steps)
    if not seconds:
        sys.exit("the profiler saw no kernels; CUPTI may lack permission on this machine")
    return seconds, busy


def of_kernels(events: Iterable[FunctionEvent], steps: int) -> tuple[dict[str, float], float]:
    """Return the seconds of one step by kernel and copy, and the union of their spans: streams overlap."""
    seconds, busy, reached = Counter[str](), 0.0, float("-inf")
    # The operators' own events repeat the time of their kernels, and so do annotations such as "Optimizer.step".
    ran = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    for event in sorted(ran, key=lambda event: event.time_range.start):
        begin, end = event.time_range.start, event.time_range.end
        seconds[event.name] += (end - begin) / 1e6 / steps
        busy += max(0.0, end - max(begin, reached)) / 1e6 / steps
        reached = max(reached, end)
    return dict(seconds), busy


def group_of(name: str) -> str:
    return next((group for group, parts in GROUPS.items() if any(p in name.lower() for p in parts.split())), OTHER)


def with_utilisation(measured: Values, seconds: Mapping[str, float], busy_s: float | None) -> Values:
    """Put together what `bench step` measured without the profiler, and what `profiled` did: groups, longest names."""
    (step,), (peak,) = measured["specs"], measured["peaks"]
    groups = Counter[str]()
    for name, own in seconds.items():
        groups[group_of(name)] += own  # type: ignore[assignment]
    rate = peak["multiply_adds_per_second"]
    return {
        "environment": measured["environment"],
        "spec": step,
        "step_s": step["step_s"]["median"],
        "profiled_s": sum(seconds.values()),
        "busy_s": busy_s,
        "groups": dict(groups.most_common()),
        "top": dict(Counter(seconds).most_common(TOP)),
        "peak_multiply_adds_per_second": rate,
        "utilisation": step["mfu"]["median"],
        "utilisation_of_convolutions_alone": step["multiply_adds_per_step"] / groups[CONVOLUTIONS] / rate,
    }


def title(values: Values) -> str:
    spec = values["spec"]
    size = f"{spec['frames']} x {spec['height']} x {spec['width']}"
    clips = f"{spec['clips_per_gpu']} clips of {size}, {spec['precision']}"
    return f"{spec['name']}, {clips}: {1e3 * values['step_s']:.4g} ms a step on {machine_text(values['environment'])}"


def as_text(values: Values) -> str:
    total = values["profiled_s"]
    rows = [(name, f"{own:.4f} s", share(own / total)) for name, own in (values["groups"] | {"all": total}).items()]
    alone = share(values["utilisation_of_convolutions_alone"])
    limit = f"utilisation: {share(values['utilisation'])}; if all but {CONVOLUTIONS} took no time: {alone}"
    busy = values["busy_s"]
    lines = [] if busy is None else [f"the GPU is busy in {share(busy / values['step_s'])} of a step"]
    return "\n".join(
        [title(values), "a step as the profiler sees it:", str(TextTable(rows, indent="  ")), *lines, limit]
    )


def draw(path: Path, values: Values) -> None:
    """Draw the shares of the groups, and the names that take longest."""
    groups = list(values["groups"])
    with drawn(path, wrapped(title(values)), (13.0, 5.6)) as figure:
        for axes, name in zip(figure.subplots(1, 2, width_ratios=(2, 3)), ("groups", "top"), strict=True):
            shares = [100 * own / values["profiled_s"] for own in values[name].values()]
            owners = groups if name == "groups" else map(group_of, values[name])
            colours = [PALETTE[groups.index(group) % len(PALETTE)] for group in owners]
            bars = axes.barh(range(len(shares)), shares, color=colours)
            axes.bar_label(bars, [f" {part:.1f} %" for part in shares], fontsize=8)
            labels = [drawable(label.removeprefix("void ").replace("at::native::", ""), 56) for label in values[name]]
            axes.set_yticks(range(len(shares)), labels, fontsize=8, parse_math=False)
            axes.invert_yaxis()
            axes.grid(visible=False, axis="y")
            axes.set_xlim(0, 1.25 * max(shares))
            axes.set_xlabel("% of the time of all")


if __name__ == "__main__":
    sys.exit(main())
