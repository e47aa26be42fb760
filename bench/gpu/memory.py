"""The memory of a training step against the plan's estimate, memory_bytes_per_rank.

    python bench/gpu/memory.py --out memory.json
    python bench/gpu/memory.py --out memory.json --device cpu --small

The peak is that of the tensors, torch.cuda.max_memory_allocated, over steps after the first two; what the caching
allocator and the driver hold beside them is told as `reserved`. The values say what the estimate consists of: weights,
gradients and solver's state (`state_bytes`), and what autograd keeps (`activation_bytes`, of the plan), beside what
autograd did keep (`kept_bytes`, counted by the tensors' own addresses, without autocast's copies of the weights).
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from outcome import Check, Outcome, fact, free, run_part

from summit_train.bench.steps import Experiment, StepBench, peak_memory
from summit_train.core.comm import World
from summit_train.core.watch import Watchdog
from summit_train.models.precision import AUTOCAST
from summit_train.plan import make_plan
from summit_train.spec import Spec, load_spec
from summit_train.spec.source import shipped

TOLERANCE = 0.15  # of the estimate
RECOMPUTED = ("execution.recompute=true",)
# name -> spec below configs/kinetics, overrides
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "tsm, fp32": ("tsm_r50_8f", ("precision=fp32",)),
    "tsm, fp16": ("tsm_r50_8f", ("precision=fp16",)),
    "tsm, bf16": ("tsm_r50_8f", ("precision=bf16",)),
    "tsn, fp32": ("tsn_r50_8f", ("precision=fp32",)),
    "i3d_3x3x3, fp32": ("i3d_3x3x3_r50_16f", ("precision=fp32",)),
    "tsm mobilenet_v2, fp32": ("tsm_mobilenet_v2_8f", ("precision=fp32",)),
    "tsm, fp32, recomputed blocks": ("tsm_r50_8f", ("precision=fp32", *RECOMPUTED)),
    "tsm, bf16, recomputed blocks": ("tsm_r50_8f", ("precision=bf16", *RECOMPUTED)),
}
LARGE = ("scale.gpus=1", "scale.clips_per_gpu=8")
SMALL = (*LARGE[:1], "scale.clips_per_gpu=2", "data.crop=64", "data.short_side=[64,64]", "model.width=0.25")


def part(args: argparse.Namespace, device: torch.device, outcome: Outcome) -> None:
    """Measure every case."""
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    outcome.values |= {"rows": rows, "skipped": skipped}
    if device.type != "cuda":
        skipped["peaks of memory"] = "a process on a CPU has no count of its tensors; what autograd keeps is counted"
    for name, (file, words) in CASES.items():
        if args.small and "fp16" in name:
            skipped[name] = "fp16 takes a CPU minutes"
            continue
        if time.monotonic() - began > args.seconds:
            skipped[name] = f"the {args.seconds:g} s were over"
            continue
        sizes = SMALL if args.small else LARGE
        spec = load_spec(shipped("configs/kinetics") / f"{file}.yaml", [*sizes, *words])
        try:
            row = {"network": name, **step_memory(spec, device)}
        except torch.cuda.OutOfMemoryError as error:
            row = {"network": name, "out_of_memory": str(error)}
        rows.append(row)
        judge(row, outcome)
    left_out = [name for name, reason in skipped.items() if name in CASES and "over" in reason]
    outcome.add(fact("every case was measured", not left_out, "; ".join(left_out)))


def step_memory(spec: Spec, device: torch.device) -> dict[str, Any]:
    """Return estimate, peak, what was reserved, and what autograd kept, in bytes.

    Bytes that are in use before the network is built, such as those of another network, are taken off the peak.
    """
    world = World()
    # Of a step alone: the plan's estimate is that of the final evaluation where its views need more.
    spec = spec.model_copy(update={"evaluate": spec.evaluate.model_copy(update={"short_side": 32})})
    plan = make_plan(spec, 1, (spec.scale.gpus or 1) * spec.scale.clips_per_gpu)
    free(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with Watchdog(world, None) as watchdog:
        bench = StepBench(Experiment(spec, plan, None), world, device, watchdog)
        bench.warm_up(2)  # autograd's tensors are counted in the first step
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        bench.repeat(2)
        peak = peak_memory(device) - before if device.type == "cuda" else None
        reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    state = (2 + spec.optimizer.states) * plan.parameters * spec.weight_bytes
    # Autocast's copies of the weights, which autograd keeps too. At full size they are 2 % of a step's memory.
    copies = 2 * plan.parameters if spec.precision in AUTOCAST else 0
    return {
        "estimate": plan.memory_bytes_per_rank,
        "state_bytes": state,
        "activation_bytes": plan.memory_bytes_per_rank - state,
        "kept_bytes": bench.activation_bytes - copies,
        "peak": peak,
        "reserved": reserved,
        "before": before,
    }


def judge(row: dict[str, Any], outcome: Outcome) -> None:
    """Check the peak, and what autograd kept, against the estimate, both ways."""
    name = row["network"]
    if "out_of_memory" in row:
        outcome.add(fact(f"{name}: fits", False, row["out_of_memory"]))
        return
    found = {} if row["peak"] is None else {"peak of a step": (row["peak"], row["estimate"])}
    if "recomputed" not in name:  # the hooks of recomputed blocks stand before these
        found["what autograd keeps"] = (row["kept_bytes"], row["activation_bytes"])
    for what, (measured, estimated) in found.items():
        ratio, note = measured / estimated, f"{measured / 1e6:,.0f} MB, estimated {estimated / 1e6:,.0f} MB"
        outcome.add(Check(f"{name}: {what} / estimate", ratio, 1 + TOLERANCE, note=note))
        outcome.add(Check(f"{name}: {what} / estimate", ratio, 1 - TOLERANCE, at_least=True, note=note))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the part's own arguments."""
    parser.add_argument("--seconds", type=float, default=60, help="no case begins after these [60]")


if __name__ == "__main__":
    sys.exit(run_part(__doc__, part, add_arguments))
