"""Whole steps of training against the same in double precision on the CPU: accumulation, BN's statistics, loss scale.

    python bench/gpu/accumulation.py --out accumulation.json
    python bench/gpu/accumulation.py --out accumulation.json --device cpu --small

Four virtual GPUs as one rank of four micro-batches, three steps of a small TSM in fp32 without TF32. Errors of weights
and running statistics are relative to how far the three steps moved them, so a step that does nothing has the error 1.
Bounds: a gradient in fp32 has an error up to some 1e-3 where roundings change the sign of an activation, and three
steps add theirs; statistics and losses see no more than the roundings and the weights' error times the LR.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from networks import CLASSES, Case, build, relative_error, tf32
from outcome import Check, Outcome, fact, run_part
from torch import nn

from summit_train.core.comm import World
from summit_train.data.batches.loader import MicroBatch
from summit_train.models.fast import accelerate
from summit_train.spec.optimizer import OptimizerSpec
from summit_train.training.run import drive_solver
from summit_train.training.step import StepSettings, TrainStep, Vote

VIRTUAL_GPUS, CLIPS, STEPS = 4, 2, 3
LR = 0.05
WEIGHTS, STATISTICS, LOSS = 3e-2, 3e-3, 1e-3  # largest relative errors
LARS = {"trust_ratio": {"kind": "lars", "coefficient": 0.01}}
# name -> solver, settings of the step beside accumulation and precision
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sgd": ({}, {}),
    "sgd, clipped, EMA": ({}, {"clip_norm": 0.5, "ema_decay": 0.5}),
    "adam, noise measured": ({"name": "adam", "eps": 1e-3}, {"noise_every": 1}),
    "lars": (LARS, {}),
}
CPU = torch.device("cpu")


def part(args: argparse.Namespace, device: torch.device, outcome: Outcome) -> None:
    """Check three steps of each run, and the overflow of fp16."""
    small = Case("tsm", "resnet18", frames=4, crop=32, width=0.125)
    case = small if args.small else Case("tsm", "resnet50", frames=8, crop=64, width=0.25)
    outcome.values["skipped"] = {} if device.type == "cuda" else {"TF32 off": "a CPU has no TF32"}
    for name, (solver, settings) in RUNS.items():
        with tf32(allowed=False):
            compare(name, case, device, solver, settings, outcome)
    overflow(small, device, outcome)


def compare(
    name: str, case: Case, device: torch.device, solver: dict[str, Any], settings: dict[str, Any], outcome: Outcome
) -> None:
    """Run three steps on the device and in double precision, and compare what they leave."""
    before = state(build(case))
    reference, wanted = trained(case, CPU, "fp64", solver, settings)
    step, found = trained(case, device, "fp32", solver, settings)
    for kind, bound in (("weights", WEIGHTS), ("statistics", STATISTICS)):
        ours, theirs, start = (moved[kind] for moved in (state(step.model), state(reference.model), before))
        error = relative_error(ours - start, theirs - start)
        outcome.add(Check(f"{name}: error of the {kind} after {STEPS} steps, of their way", error, bound))
    if step.average is not None:
        ours, theirs = averaged(step), averaged(reference)
        error = relative_error(ours - before["weights"], theirs - before["weights"])
        outcome.add(Check(f"{name}: error of the average of the weights, of its way", error, WEIGHTS))
    error = max(abs(a.loss - b.loss) / b.loss for a, b in zip(found, wanted, strict=True))
    outcome.add(Check(f"{name}: error of the losses", error, LOSS, note=", ".join(f"{v.loss:.5g}" for v in found)))
    if found[0].squares is not None and wanted[0].squares is not None:
        error = abs(found[0].squares.single / wanted[0].squares.single - 1)
        outcome.add(Check(f"{name}: error of the first squared gradient norm", error, WEIGHTS))
    outcome.add(fact(f"{name}: no step was skipped", not any(vote.skipped for vote in found)))


def trained(
    case: Case, device: torch.device, precision: str, solver: dict[str, Any], settings: dict[str, Any]
) -> tuple[TrainStep, list[Vote]]:
    """Return a step that has run three times, and the votes."""
    step = train_step(case, device, precision, solver, settings)
    results = [step(micro_batches(case, number), LR) for number in range(STEPS)]
    return step, [result.read(VIRTUAL_GPUS * CLIPS, VIRTUAL_GPUS, 1) for result in results]


def train_step(
    case: Case, device: torch.device, precision: str, solver: dict[str, Any], settings: dict[str, Any]
) -> TrainStep:
    """Return the step of one rank of four virtual GPUs; in double precision of the plain network, else accelerated."""
    model = build(case)
    if precision != "fp64":
        model = model.to(device=device, dtype=torch.float32)
        accelerate(model)
    spec = OptimizerSpec.model_validate({"weight_decay": 1e-3, **solver})
    chosen = StepSettings(0, VIRTUAL_GPUS, precision, **settings)
    return drive_solver(spec, chosen, World(), model, device, {})


def micro_batches(case: Case, step: int) -> list[MicroBatch]:
    """Return the clips of one step, of random bytes."""
    generator = torch.Generator().manual_seed(step)
    shape = (CLIPS, case.frames, case.crop, case.crop, 3)
    batches = []
    for number in range(VIRTUAL_GPUS):
        clips = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, CLASSES, (CLIPS,), generator=generator)
        batch = MicroBatch(step, number, clips, labels, torch.arange(CLIPS))
        batches.append(batch.pin_memory() if torch.cuda.is_available() else batch)
    return batches


def overflow(case: Case, device: torch.device, outcome: Outcome) -> None:
    """Plant an overflow of fp16: a skipped step, half the scale, the same weights and statistics; then it goes on."""
    step = train_step(case, device, "fp16", {}, {"clip_norm": 1.0, "ema_decay": 0.5})
    step.loss_scale.scale.fill_(2.0**40)
    before, average = state(step.model), averaged(step)
    vote = step(micro_batches(case, 0), LR).read(VIRTUAL_GPUS * CLIPS, VIRTUAL_GPUS, 1)
    after = state(step.model)
    outcome.add(fact("fp16, overflow: the step is skipped and not broken", vote.skipped and not vote.broken))
    outcome.add(fact("fp16, overflow: the scale halves", float(step.loss_scale.scale) == 2.0**39))
    same = all(torch.equal(before[kind], after[kind]) for kind in before)
    outcome.add(fact("fp16, overflow: weights and statistics stay, to the bit", same))
    same = torch.equal(average, averaged(step))
    outcome.add(fact("fp16, overflow: the average of the weights stays, to the bit", same))
    step.loss_scale.scale.fill_(2.0**8)
    vote = step(micro_batches(case, 0), LR).read(VIRTUAL_GPUS * CLIPS, VIRTUAL_GPUS, 1)
    after = state(step.model)
    went_on = not vote.skipped and not torch.equal(before["weights"], after["weights"])
    finite = all(bool(torch.isfinite(values).all()) for values in after.values())
    outcome.add(fact("fp16: the next step updates, finite", went_on and finite))


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all weights, and all running statistics, each as one vector in double precision on the CPU."""
    statistics = [buffer for name, buffer in model.named_buffers() if "running" in name]
    return {"weights": flat(list(model.parameters())), "statistics": flat(statistics)}


def averaged(step: TrainStep) -> torch.Tensor:
    """Return the average of the weights that the step keeps, as one vector."""
    assert step.average is not None
    average = step.average.state_dict()["model"]
    return flat([average[name] for name, _ in step.model.named_parameters()])


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors as one vector in double precision on the CPU, a copy."""
    return torch.cat([tensor.detach().double().cpu().flatten() for tensor in tensors])


if __name__ == "__main__":
    sys.exit(run_part(__doc__, part))
