"""Where the time of a training step goes: kernels by share of the GPU's time, gaps between them, copies of clips.

    python bench/gpu/kernels.py --out kernels.json                       TSM, bf16, 16 clips
    python bench/gpu/kernels.py --out kernels.json --device cpu --small  a rehearsal: operators in place of kernels

torch's profiler writes the step as a trace. Its kernels have names and times; its host events are not used, as the
profiler slows the host down. The share of a step in which the GPU is busy is therefore the kernels' time over that of a
step without the profiler.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from outcome import Check, Outcome, fact, run_part
from rows import Row
from subjects import Timed
from torch.profiler import ProfilerActivity, profile

from summit_train.core.comm import World
from summit_train.training.environment import environment

STEPS, TURNS, TOP = 5, 5, 15
MOST_EXPOSED, MOST_OTHER, LEAST_BUSY = 0.02, 0.1, 0.95  # wanted, as shares of a step or of the GPU's time
OTHER = "other"
# The first group with a part of the kernel's name, in small letters, takes it. Kernels of cuDNN and cuBLAS are named
# after what they compute (fprop, dgrad, wgrad; gemm, nvjet: a 1x1 convolution may be one), PyTorch's after operators.
# Copies come before elementwise kernels, as a copy is one with a copy in its name. The shift is zeros_like and slice
# copies, so it counts as copies and fills; casts between types have names of their own. aten:: is of the rehearsal.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "optimizer and gradient norm": (
        "multi_tensor",
        "fusedsgd",
        "fused_sgd",
        "lpnorm",
        "_foreach",
        "aten::_fused",
        "vector_norm",
    ),
    "normalisation": ("batch_norm", "batchnorm", "bn_fw", "bn_bw", "welford", "_normalise"),
    "convolution": ("fprop", "dgrad", "wgrad", "conv", "winograd", "implicit_gemm", "nchwtonhwc", "nhwctonchw"),
    "matrix product": ("gemm", "gemv", "nvjet", "cublas", "cutlass", "splitk", "addmm", "aten::mm", "aten::bmm"),
    "casts": ("float16_copy_kernel", "float16tofloat32_copy_kernel"),
    "shift, copies and fills": (
        "copy",
        "memcpy",
        "memset",
        "fill",
        "catarray",
        "aten::cat",
        "aten::zero",
        "aten::empty",
    ),
    "pooling": ("pool",),
    "loss": ("softmax", "nll_loss", "cross_entropy"),
    "elementwise and sums": (
        "elementwise",
        "reduce_kernel",
        "aten::add",
        "aten::mul",
        "aten::sub",
        "aten::div",
        "relu",
        "clamp",
        "threshold",
        "aten::sum",
        "aten::mean",
    ),
}


@dataclass(frozen=True)
class Kernel:
    """One kernel or copy on the device; begin and end in microseconds. kind: kernel, gpu_memcpy or gpu_memset."""

    name: str
    kind: str
    stream: int
    begin: float
    end: float


def part(args: argparse.Namespace, device: torch.device, outcome: Outcome) -> None:
    """Time steps, profile some, and say where their time goes."""
    world, row = World(), Row("tsm", "train", "bf16", 2 if args.small else 16)
    outcome.values |= {"environment": environment(world, device, [world.host]), "row": row.name, "skipped": {}}
    step = Timed(row, device, small=args.small)
    step_s = median(step.seconds(STEPS) for _ in range(1 if args.small else TURNS))
    if device.type != "cuda":
        outcome.values["skipped"] = {"kernels": "no GPU: CPU operators stand in for them"}
    profiled(step, device, 1)  # the first profile loads CUPTI and is slow
    found = kernels_of(profiled(step, device, STEPS), device.type)
    if not found:
        outcome.values["skipped"] = {"kernels": "the profiler saw none; CUPTI may lack permission here"}
        return
    outcome.values |= {"step_s": step_s, "steps": STEPS} | summary(found, step_s, STEPS)
    for check in checks_of(outcome.values):
        outcome.add(check)


def profiled(step: Timed, device: torch.device, steps: int) -> Sequence[Mapping[str, Any]]:
    """Return the events of a trace (Chrome's format) of so many steps."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    with profile(activities=activities) as profiler:
        step.seconds(steps)  # waits for the device
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: Sequence[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def kernels_of(events: Iterable[Mapping[str, Any]], device_type: str) -> list[Kernel]:
    """Return what ran on the GPU, by its begin; on a CPU operators, each as long as it runs itself."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if device_type == "cuda" else ("cpu_op",)
    found = [
        Kernel(e["name"], e["cat"], int(e.get("args", {}).get("stream", e["tid"])), e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("ph") == "X" and e.get("cat") in kinds
    ]
    found.sort(key=lambda kernel: (kernel.begin, -kernel.end))
    return found if device_type == "cuda" else own_times(found)


def own_times(found: Sequence[Kernel]) -> list[Kernel]:
    """Return the events of threads, sorted by begin, each shortened by what it calls."""
    called: dict[int, float] = {}
    open_calls: dict[int, list[tuple[int, Kernel]]] = {}
    for number, kernel in enumerate(found):
        stack = open_calls.setdefault(kernel.stream, [])
        while stack and stack[-1][1].end <= kernel.begin:
            stack.pop()
        if stack:
            called[stack[-1][0]] = called.get(stack[-1][0], 0.0) + kernel.end - kernel.begin
        stack.append((number, kernel))
    return [replace(kernel, end=kernel.end - called.get(number, 0.0)) for number, kernel in enumerate(found)]


def group_of(name: str) -> str:
    """Return the group of a kernel's name."""
    small = name.lower()
    return next((group for group, parts in GROUPS.items() if any(part in small for part in parts)), OTHER)


def summary(found: Sequence[Kernel], step_s: float, steps: int) -> dict[str, Any]:
    """Return where the time of `steps` steps went, in seconds of a step and in shares, as JSON values.

    busy: time in which anything runs on the GPU, over that of a step without the profiler. gaps: the rest of the
    profiled time, which holds the profiler's own delays.
    """
    by_group, by_name, calls = Counter[str](), Counter[str](), Counter[str]()
    for kernel in found:
        microseconds = kernel.end - kernel.begin
        by_group[group_of(kernel.name)] += microseconds  # type: ignore[assignment]
        by_name[kernel.name] += microseconds  # type: ignore[assignment]
        calls[kernel.name] += 1
    total, running = sum(by_group.values()), covered((kernel.begin, kernel.end) for kernel in found)
    span = max(kernel.end for kernel in found) - min(kernel.begin for kernel in found)
    per_step = 1e-6 / steps
    return {
        "groups": [{"group": g, "seconds": s * per_step, "share": s / total} for g, s in by_group.most_common()],
        "top": [
            {"name": n, "group": group_of(n), "seconds": s * per_step, "share": s / total, "calls": calls[n] / steps}
            for n, s in by_name.most_common(TOP)
        ],
        "kernels_per_step": len(found) / steps,
        "kernel_s": total * per_step,
        "busy": running * per_step / step_s,
        "busy_when_profiled": running / span,
        "copies": copies_to_device(found, step_s * steps),
    }


def copies_to_device(found: Sequence[Kernel], seconds: float) -> dict[str, Any]:
    """Return what copies from the host to the device take of `seconds`, and what of them no kernel hides."""
    copies = [kernel for kernel in found if kernel.kind == "gpu_memcpy" and "HtoD" in kernel.name]
    kernels = [(kernel.begin, kernel.end) for kernel in found if kernel.kind == "kernel"]
    spans = [(kernel.begin, kernel.end) for kernel in copies]
    copied, hidden = covered(spans), covered(spans) + covered(kernels) - covered([*spans, *kernels])
    return {
        "number": len(copies),
        "longest": max(copies, key=lambda kernel: kernel.end - kernel.begin).name if copies else None,
        "streams": sorted({kernel.stream for kernel in copies}),
        "kernel_streams": sorted({kernel.stream for kernel in found if kernel.kind == "kernel"}),
        "share": copied * 1e-6 / seconds,
        "exposed_share": (copied - hidden) * 1e-6 / seconds,
        "overlapped": hidden / copied if copied else None,
    }


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of some spans."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


def checks_of(values: Mapping[str, Any]) -> list[Check]:
    """Return what should hold: the table of names knows the kernels, the GPU is busy, copies hide or are short."""
    shares, copies = {group["group"]: group["share"] for group in values["groups"]}, values["copies"]
    checks = [Check("GPU time of kernels in no group", shares.get(OTHER, 0.0), MOST_OTHER, wanted=True)]
    if "kernels" in values["skipped"]:
        return checks
    paths = f"streams of copies {copies['streams']}, of kernels {copies['kernel_streams']}"
    return [
        *checks,
        fact("clips are copied from page-locked memory", "Pinned" in (copies["longest"] or ""), str(copies["longest"])),
        Check("share of a step in which the GPU is busy", values["busy"], LEAST_BUSY, at_least=True, wanted=True),
        Check("share of a step in bare copies", copies["exposed_share"], MOST_EXPOSED, wanted=True, note=paths),
    ]


if __name__ == "__main__":
    sys.exit(run_part(__doc__, part))
