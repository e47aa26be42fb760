"""No step waits for the device: steps of training under torch.cuda.set_sync_debug_mode("error").

    python bench/gpu/syncs.py --out syncs.json
    python bench/gpu/syncs.py --out syncs.json --device cpu --small

In that mode PyTorch raises where the host would wait: item(), a copy that is not asynchronous, nonzero(). Every case is
a shipped spec made small, with noise measurement, an average of the weights, a clipped gradient and two virtual GPUs.
Two steps come before, as the first ones allocate and choose algorithms. That the mode works is checked by an item().
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from outcome import Check, Outcome, fact, free, run_part

from summit_train.bench.steps import random_batches
from summit_train.core.comm import World
from summit_train.plan import make_plan
from summit_train.spec import Spec, load_spec
from summit_train.spec.source import shipped
from summit_train.training.run import build_step, fresh_model
from summit_train.training.step import StepResult

COMMON = ("model.num_classes=16", "data.short_side=[64,64]", "data.crop=64", "scale.gpus=2", "scale.clips_per_gpu=2")
SMALL = ("model.width=0.125", "data.crop=32", "data.short_side=[32,32]", "precision=fp32")  # fp16 takes a CPU minutes
SYNCHRONOUS = ("noise_scale.every_steps=1", "ema.decay=0.9", "optimizer.clip_norm=1.0")
LARS = ("optimizer.trust_ratio.kind=lars",)
ADAM = ("optimizer.name=adam", "optimizer.momentum=null")
AVERAGING = ("parallel.method=averaging", "parallel.period=1")
FP16, BF16 = ("precision=fp16",), ("precision=bf16",)
# name -> spec below configs/kinetics, overrides
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "tsm, sgd, fp16": ("tsm_r50_8f", (*SYNCHRONOUS, *FP16)),
    "tsm, sgd, bf16": ("tsm_r50_8f", (*SYNCHRONOUS, *BF16)),
    "tsm, sgd, fp32": ("tsm_r50_8f", SYNCHRONOUS),
    "tsm, adam, fp16": ("tsm_r50_8f", (*SYNCHRONOUS, *ADAM, *FP16)),
    "tsm, lars, fp16": ("tsm_r50_8f", (*SYNCHRONOUS, *LARS, *FP16)),
    "tsm, dropout, recomputed blocks": (
        "tsm_r50_8f",
        (*SYNCHRONOUS, *FP16, "model.dropout=0.5", "execution.recompute=true"),
    ),
    "tsm, averaging, sgd, fp16": ("tsm_r50_8f", (*AVERAGING, *FP16)),
    "tsm, averaging, adam, bf16": ("tsm_r50_8f", (*AVERAGING, *ADAM, *BF16)),
    "tsn, sgd, fp16": ("tsn_r50_8f", (*SYNCHRONOUS, *FP16)),
    "tsm non-local, sgd, bf16": ("tsm_nl_r50_8f", (*SYNCHRONOUS, *BF16)),
    "tsm mobilenet_v2, sgd, fp16": ("tsm_mobilenet_v2_8f", (*SYNCHRONOUS, *FP16)),
    "i3d_3x3x3, sgd, fp16": ("i3d_3x3x3_r50_16f", (*SYNCHRONOUS, *FP16)),
    "slowfast, sgd, bf16": ("slowfast_r50_4x16", (*SYNCHRONOUS, *BF16)),
}


def part(args: argparse.Namespace, device: torch.device, outcome: Outcome) -> None:
    """Run every case, and the planted wait."""
    began = time.monotonic()
    skipped: dict[str, str] = {}
    outcome.values["skipped"] = skipped
    if device.type == "cuda":
        outcome.add(fact("the mode sees a wait: item() raises", item_raises(device)))
    else:
        skipped["the synchronisation debug mode"] = "CUDA's alone; the steps run without it"
    for name, (file, words) in CASES.items():
        if time.monotonic() - began > args.seconds:
            skipped[name] = f"the {args.seconds:g} s were over"
            continue
        sizes = SMALL if args.small else ("model.width=0.5",)
        spec = load_spec(shipped("configs/kinetics") / f"{file}.yaml", [*COMMON, *words, *sizes])
        outcome.add(no_wait(name, spec, device))
        free(device)
    left_out = [name for name in CASES if name in skipped]
    outcome.add(fact("every case ran", not left_out, "; ".join(left_out)))


def no_wait(name: str, spec: Spec, device: torch.device) -> Check:
    """Return the check that two steps of a spec do not wait, and compute finite numbers."""
    world = World()
    plan = make_plan(spec, 1, 2 * (spec.scale.gpus or 1) * spec.scale.clips_per_gpu)
    step = build_step(spec, plan, world, fresh_model(spec, device), device)
    batches = random_batches(spec, plan, world)
    results: list[StepResult] = [step(batches, 0.001) for _ in range(2)]
    finish(device)
    title = f"{name}: no step waits for the device"
    try:
        with waits_forbidden(device):
            results += [step(batches, 0.001) for _ in range(2)]
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return fact(title, False, f"{error} (in {where(error)})")
    votes = [result.read(plan.global_batch, plan.virtual_gpus, 1) for result in results]
    losses = ", ".join(f"{vote.loss:.3g}{' (skipped)' * vote.skipped}" for vote in votes)
    return fact(title, not any(vote.broken for vote in votes), f"losses {losses}")


@contextmanager
def waits_forbidden(device: torch.device) -> Iterator[None]:
    """Let PyTorch raise RuntimeError within the block where the host would wait for the GPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def item_raises(device: torch.device) -> bool:
    """Return whether a wait is noticed."""
    number = torch.ones((), device=device)
    finish(device)
    try:
        with waits_forbidden(device):
            number.item()
    except RuntimeError:
        return True
    return False


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def where(error: BaseException) -> str:
    """Return file and line of the innermost frame of an error that is this project's."""
    places: Sequence[str] = ["?"]
    trace = error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if "summit_train" in path:
            places = [*places, f"{path}:{trace.tb_lineno}"]
        trace = trace.tb_next
    return places[-1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the part's own arguments."""
    parser.add_argument("--seconds", type=float, default=60, help="no case begins after these [60]")


if __name__ == "__main__":
    sys.exit(run_part(__doc__, part, add_arguments))
