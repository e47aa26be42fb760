"""Every network of the catalog against double precision on the CPU: logits and gradients, in each precision.

    python bench/gpu/precision.py --out precision.json
    python bench/gpu/precision.py --out precision.json --device cpu --small

The reference is the plain network with the same weights and clips, in training mode. An error is ||x - ref|| / ||ref||,
of the logits and of all gradients as one vector. Bounds, by what sets the error:

- Logits: the roundings of the activations, 2^-24 (fp32), 2^-11 (TF32, fp16), 2^-8 (bf16), some ten times larger after
  50 layers.
- Gradients: a rounding that changes the sign of an activation switches its gradient on or off. A part e of the signs
  changes where the activations have an error of e, and the gradient's error is about its square root. So it is large
  however good the arithmetic is: in bf16 PyTorch's own autocast has 0.4 and more. A wrong gradient has 1 or 1.4.
- Therefore, too: no execution may be far worse than the plain network in the same precision on the same device.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from networks import CASES, Case, build, clips_and_labels, gradients, relative_error, tf32
from outcome import Check, Outcome, fact, free, run_part
from torch.nn import functional

from summit_train.models import VideoNetwork
from summit_train.models.fast import accelerate
from summit_train.models.precision import mixed_precision
from summit_train.models.shift import temporal_shift
from summit_train.training.step import LossScale

# precision: largest error of the logits, of the gradients
BOUNDS = {"fp32": (1e-4, 3e-2), "tf32": (3e-2, 0.5), "fp16": (3e-2, 0.5), "bf16": (0.15, 0.9)}
# The other networks: few values per channel in their normalisations, or single channels in their convolutions.
LOOSE = {"fp32": (1e-3, 5e-2), "tf32": (0.1, 1.5), "fp16": (0.1, 1.5), "bf16": (0.6, 5.0)}
STRICT = ("tsm", "tsn")
RATIO = 1.5  # to the plain network in the same precision: other kernels round in another order
FLOOR = 0.2  # of the bound, which is always allowed: a ratio of two tiny errors says nothing
MAIN = ("tsm", "tsn", "i3d_3x3x3")  # which run in every execution
TWO_FRAMES = ("i3d_3x3x3", "i3d_3x1x1", "eco_lite", "ir_csn")  # somewhere in them; see training/arithmetic.py
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
SEED = 3  # of a network's draws


Errors = tuple[float, float]  # of the logits, of the gradients


@dataclass(frozen=True)
class Execution:
    """How a network runs. fast: accelerated; channels_last: the clips' order in memory, as the loader's."""

    precision: str
    fast: bool
    channels_last: bool

    def __str__(self) -> str:
        return f"{self.precision} {'fast' if self.fast else 'plain'} {'NHWC' if self.channels_last else 'NCHW'}"


@dataclass(frozen=True)
class Answer:
    """What a network said: logits and the gradients of all parameters, in double precision on the CPU."""

    logits: torch.Tensor
    gradients: torch.Tensor

    def errors(self, reference: Answer) -> Errors:
        """Return the relative errors of logits and gradients."""
        parts = ((self.logits, reference.logits), (self.gradients, reference.gradients))
        logits, grads = (relative_error(*pair) for pair in parts)
        return logits, grads


def part(args: argparse.Namespace, device: torch.device, outcome: Outcome) -> None:
    """Check the shift, then each network."""
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    outcome.values |= {"rows": rows, "skipped": skipped, "bounds": BOUNDS, "loose_bounds": LOOSE}
    if device.type != "cuda":
        skipped["tf32"] = "a CPU has no TF32"
        skipped[f"bf16 of {', '.join(TWO_FRAMES)}"] = "oneDNN's weight gradients over two frames are wrong on some CPUs"
    check_shift(device, outcome)
    for name, case in CASES.items():
        if time.monotonic() - began > args.seconds:
            skipped[name] = f"the {args.seconds:g} s were over"
            continue
        check_network(name, case.small() if args.small else case, device, outcome)
    left_out = sorted(name for name, reason in skipped.items() if name in CASES)
    outcome.add(fact("every network of the list was checked", not left_out, ", ".join(left_out)))


def check_shift(device: torch.device, outcome: Outcome) -> None:
    """Compare the shift and its gradient with indexing by hand, to the bit, in every type and both orders."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for direction in ("both", "past"):
            for memory in (torch.contiguous_format, torch.channels_last):
                generator = torch.Generator().manual_seed(2)
                x = torch.randn(12, 20, 5, 7, generator=generator).to(dtype)
                there = x.to(device).contiguous(memory_format=memory).requires_grad_()
                out = temporal_shift(there, 4, 0.125, direction)
                (grad,) = torch.autograd.grad(out, there, out.detach())
                wanted = shifted_by_hand(x, 4, direction, 1)
                same = torch.equal(out.detach().cpu(), wanted) and torch.equal(
                    grad.cpu(), shifted_by_hand(wanted, 4, direction, -1)
                )
                kept = out.is_contiguous(memory_format=memory)
                outcome.add(
                    fact(f"shift {direction}, {dtype}, {memory}: the bits and the order of indexing", same and kept)
                )


def shifted_by_hand(x: torch.Tensor, frames: int, direction: str, step: int) -> torch.Tensor:
    """Return frames `x` (N*T, C, H, W) with an eighth of the channels (each way) from frame t +- step, one by one."""
    fold, out = x.shape[1] // 8, x.clone()
    moves = [(0, fold, step), (fold, 2 * fold, -step)] if direction == "both" else [(0, fold, -step)]
    for begin, end, by in moves:
        for frame in range(len(x)):
            inside = 0 <= frame % frames + by < frames
            out[frame, begin:end] = x[frame + by, begin:end] if inside else 0
    return out


def check_network(name: str, case: Case, device: torch.device, outcome: Outcome) -> None:
    """Compare one network in all its executions with double precision."""
    began = time.monotonic()
    reference = answer(build(case), case, "fp64", channels_last=True)
    print(f"{name}: double precision took {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    plain: dict[str, Errors] = {}
    for execution in executions(name, device):
        row: dict[str, Any] = {"network": name, "execution": str(execution)}
        outcome.values["rows"].append(row)
        try:
            row["said"], found = run_once(case, execution, device)
        except torch.cuda.OutOfMemoryError as error:
            outcome.add(fact(f"{name}, {execution}", False, f"out of memory: {error}"))
            continue
        finally:
            free(device)
        errors = found.errors(reference)
        row |= {"logits": errors[0], "gradients": errors[1]}
        bounds = (BOUNDS if name in STRICT else LOOSE)[execution.precision]
        judge(f"{name}, {execution}", bounds, errors, plain.setdefault(execution.precision, errors), outcome)
        row["seconds"] = time.monotonic() - began


def run_once(case: Case, execution: Execution, device: torch.device) -> tuple[str, Answer]:
    """Return what the accelerated network says of itself, and its answer."""
    model = build(case).to(device=device, dtype=torch.float32)
    said = accelerate(model) if execution.fast else model.execution
    return said, answer(model, case, execution.precision, channels_last=execution.channels_last)


def executions(name: str, device: torch.device) -> Sequence[Execution]:
    """Return the executions of a network, for each precision a plain one first."""
    precisions = [p for p in PRECISIONS if p != "tf32" or (device.type == "cuda" and name in MAIN)]
    layouts = (False, True) if name in MAIN else (True,)
    chosen = [Execution(p, fast, last) for p in precisions for fast in (False, True) for last in layouts]
    if device.type == "cpu" and name in TWO_FRAMES:
        return [execution for execution in chosen if execution.precision != "bf16"]
    return chosen


def answer(model: VideoNetwork, case: Case, precision: str, *, channels_last: bool) -> Answer:
    """Run a network forward and backward once. fp16 with a loss scale, which halves until the gradient is finite."""
    parameter = next(model.parameters())
    clips, labels = clips_and_labels(case)
    clips = clips.to(parameter.device, parameter.dtype)
    clips = clips if channels_last else clips.contiguous()
    scale = LossScale(precision == "fp16", parameter.device)
    while True:
        model.zero_grad()
        model.reseed(SEED)
        with tf32(precision == "tf32"):
            with mixed_precision(precision, parameter.device):
                logits = model(clips)
            loss = functional.cross_entropy(logits, labels.to(parameter.device))
            torch.autograd.backward(loss * scale.scale)
        found = gradients(model) / float(scale.scale)
        if bool(torch.isfinite(found).all()) or float(scale.scale) <= 1:
            return Answer(logits.detach().double().cpu(), found)
        scale.update(torch.ones((), device=parameter.device))


def judge(name: str, bounds: Errors, errors: Errors, plain: Errors, outcome: Outcome) -> None:
    """Check the errors of logits and gradients against bounds, and against those of the plain network."""
    for what, error, beside, bound in zip(("logits", "gradients"), errors, plain, bounds, strict=True):
        allowed = min(bound, RATIO * beside + FLOOR * bound)
        outcome.add(Check(f"{name}: error of the {what}", error, allowed, note=f"plain {beside:.2g}, bound {bound:g}"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the part's own arguments."""
    parser.add_argument("--seconds", type=float, default=75, help="no network begins after these [75]")


if __name__ == "__main__":
    sys.exit(run_part(__doc__, part, add_arguments))
