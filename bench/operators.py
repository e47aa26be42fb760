"""Where the time of a training step goes: operators on a CPU, kernels and copies on a GPU, by torch's profiler.

    python bench/operators.py configs/kinetics/tsm_r50_8f.yaml scale.clips_per_gpu=4 precision=bf16
    python bench/operators.py SPEC [key=value ...] [--steps N] [--out FILE.png] [--json]

The step is `train`'s own, in one process on random clips. The profiler slows the host down, so `bench step` measures
the step and the best matrix product without it. Utilisation is also given as it would be if all but convolutions and
products took no time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from summit_train.core.comm import World
from summit_train.core.processes import answer
from summit_train.core.result import TextTable
from summit_train.core.text import share
from summit_train.data.batches.loader import MicroBatch
from summit_train.plan import make_plan
from summit_train.report.figures import PALETTE, drawable, drawn, wrapped
from summit_train.report.tables import machine_text
from summit_train.spec import load_spec
from summit_train.training.run import build_step, fresh_model
from summit_train.training.start import choose_device

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


class Span(NamedTuple):
    """Something that ran on the device from `begin` to `end`, in seconds."""

    begin: float
    end: float
    name: str
    kind: str  # kernel, gpu_memcpy, gpu_memset


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", metavar="SPEC")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=3, help="profiled steps [3]")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="draw the shares")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    words = [args.spec, *args.overrides, "scale.gpus=1"]
    command = [sys.executable, "-m", "summit_train", "bench", "step", *words, "--synthetic", "--json"]
    values = with_utilisation(profiled(words, args.steps), answer(command, timeout=600))
    if args.out is not None:
        draw(args.out, values)
    print(json.dumps(values) if args.json else as_text(values))
    return 0


def profiled(words: Sequence[str], steps: int) -> Values:
    """Profile steps of a spec on one rank; return seconds of a step by group and by name."""
    spec, world = load_spec(words[0], words[1:]), World()
    plan, device = make_plan(spec, 1, spec.scale.clips_per_gpu), choose_device(world)
    step = build_step(spec, plan, world, fresh_model(spec, device), device)
    shape = (plan.clips_per_gpu, *spec.data.input.clip_shape(spec.data.num_frames, spec.data.crop))
    labels = torch.arange(plan.clips_per_gpu) % spec.model.num_classes
    batch = MicroBatch(0, 0, torch.randint(256, shape, dtype=torch.uint8), labels, labels)
    on_gpu = device.type == "cuda"
    batches = [batch.pin_memory() if on_gpu else batch]
    for _ in range(4):
        step(batches, 0.0).read(plan.global_batch, 1, 1)
    # The first profile loads CUPTI, and on a CPU the heap makes room for the profiler's notes.
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as profiler:
            for _ in range(steps):
                step(batches, 0.0)
            if on_gpu:
                torch.cuda.synchronize(device)
    if not on_gpu:
        return by_group({event.key: event.self_cpu_time_total / 1e6 / steps for event in profiler.key_averages()})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        spans = spans_of(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
    if not spans:
        sys.exit("the profiler saw no kernels; CUPTI may lack permission on this machine")
    return of_kernels(spans, steps)


def spans_of(events: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Return what ran on the GPU, from a trace in Chrome's format."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = (event for event in events if event.get("ph") == "X" and event.get("cat") in kinds)
    return [Span(1e-6 * e["ts"], 1e-6 * (e["ts"] + e["dur"]), e["name"], e["cat"]) for e in found]


def of_kernels(spans: Sequence[Span], steps: int) -> Values:
    """Return seconds by group and name, the time in which anything ran, and copies from the host, of one step."""
    seconds = Counter[str]()
    for span in spans:
        seconds[span.name] += (span.end - span.begin) / steps  # type: ignore[assignment]
    copies = [span for span in spans if span.kind == "gpu_memcpy" and "HtoD" in span.name]
    kernels = [span for span in spans if span.kind == "kernel"]
    return by_group(seconds) | {
        "busy_s": covered(spans) / steps,
        "copies_s": covered(copies) / steps,
        "bare_copies_s": (covered([*copies, *kernels]) - covered(kernels)) / steps,  # under no kernel
        "pinned": all("Pinned" in copy.name for copy in copies if copy.end - copy.begin > 1e-4),
    }


def by_group(seconds: Mapping[str, float]) -> Values:
    """Return seconds by name as those of GROUPS and of the longest names, longest first."""
    groups = Counter[str]()
    for name, own in seconds.items():
        groups[group_of(name)] += own  # type: ignore[assignment]
    return {"groups": dict(groups.most_common()), "top": dict(Counter(seconds).most_common(TOP))}


def group_of(name: str) -> str:
    """Return the group of an operator or kernel by its name."""
    return next((group for group, parts in GROUPS.items() if any(p in name.lower() for p in parts.split())), OTHER)


def covered(spans: Iterable[Span]) -> float:
    """Return the length of the union of some spans."""
    length, reached = 0.0, float("-inf")
    for span in sorted(spans):
        length += max(0.0, span.end - max(span.begin, reached))
        reached = max(reached, span.end)
    return length


def with_utilisation(values: Values, bench: Mapping[str, Any]) -> Values:
    """Add what `bench step` measured: the step without the profiler, and its utilisation."""
    (step,), (peak,) = bench["specs"], bench["peaks"]
    rate, convolutions = peak["multiply_adds_per_second"], values["groups"].get(CONVOLUTIONS)
    alone = step["multiply_adds_per_step"] / convolutions / rate if convolutions else None
    about = {"environment": bench["environment"], "spec": step, "step_s": step["step_s"]["median"]}
    use = {"utilisation": step["mfu"]["median"], "utilisation_of_convolutions_alone": alone}
    return about | values | {"peak_multiply_adds_per_second": rate} | use


def title(values: Values) -> str:
    """Return what was measured, and where."""
    spec = values["spec"]
    clips = f"{spec['clips_per_gpu']} clips of {spec['frames']} x {spec['crop']}^2, {spec['precision']}"
    return f"{spec['name']}, {clips}: {1e3 * values['step_s']:.4g} ms a step on {machine_text(values['environment'])}"


def as_text(values: Values) -> str:
    total, alone = sum(values["groups"].values()), values["utilisation_of_convolutions_alone"]
    rows = [(name, f"{own:.4f} s", share(own / total)) for name, own in (values["groups"] | {"all": total}).items()]
    limit = "" if alone is None else f"; if all but {CONVOLUTIONS} took no time: {share(alone)}"
    lines = [title(values), "a step as the profiler sees it:", str(TextTable(rows, indent="  "))]
    if "busy_s" in values:
        busy, bare = (share(values[name] / values["step_s"]) for name in ("busy_s", "bare_copies_s"))
        lines.append(f"the GPU is busy in {busy} of a step; copies from the host that no kernel hides: {bare}")
    return "\n".join([*lines, f"utilisation: {share(values['utilisation'])}{limit}"])


def draw(path: Path, values: Values) -> None:
    """Draw the shares of the groups, and the names that take longest."""
    total, groups = sum(values["groups"].values()), list(values["groups"])
    with drawn(path, wrapped(title(values)), (13.0, 5.6)) as figure:
        for axes, name in zip(figure.subplots(1, 2, width_ratios=(2, 3)), ("groups", "top"), strict=True):
            shares = [100 * own / total for own in values[name].values()]
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
