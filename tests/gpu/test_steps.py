"""Whole training steps against the same in double precision on the CPU: accumulation, BN's statistics, loss scale.

Four virtual GPUs as one rank of four micro-batches, three steps of a small TSM in fp32 without TF32. Errors of weights
and running statistics are relative to how far the three steps moved them, so a step that does nothing has the error 1.
Bounds: a gradient in fp32 has an error up to some 1e-3 where roundings change the sign of an activation, and three
steps add theirs; statistics and losses see no more than the roundings and the weights' error times the LR.

What a step records on a device: nothing waits for it, and its slices lie on the host's clock, in their order.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from summit_train.core.comm import World
from summit_train.models.fast import accelerate
from summit_train.spec.keys import OptimizerSpec
from summit_train.training.build import build_train_step
from summit_train.training.running_statistics import RunningStatistics
from summit_train.training.step import StepSettings, TrainStep
from summit_train.training.timer import StepTimer, idle_mark
from summit_train.training.trace import slices_of
from summit_train.training.vote import Vote
from tests.gpu.devices import CPU, flat, on_devices, random_batch, relative_error, tf32
from tests.gpu.networks import CLASSES, Case, build
from tests.gpu.test_shipped import waits_forbidden
from tests.worlds import take_step

VIRTUAL_GPUS, CLIPS, STEPS = 4, 2, 3
LR = 0.05
BOUNDS = {"weights": 3e-2, "statistics": 3e-3, "average": 3e-2}
LOSS = 1e-3
# name -> solver, settings of the step beside accumulation and precision
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sgd": ({}, {}),
    "sgd, clipped, EMA": ({}, {"clip_norm": 0.5, "ema_decay": 0.5}),
    "adam, noise measured": ({"name": "adam", "eps": 1e-3}, {"noise_every": 1}),
    "lars": ({"trust_ratio": {"kind": "lars", "coefficient": 0.01}}, {}),
}
SMALL = Case("tsm", "resnet18", frames=4, crop=32, width=0.125)


def train_step(
    case: Case, device: torch.device, precision: str, run: tuple[dict[str, Any], dict[str, Any]]
) -> TrainStep:
    """The step of one rank of four virtual GPUs; in double precision of the plain network, else accelerated."""
    model = build(case)
    if precision != "fp64":
        model = model.to(device=device, dtype=torch.float32)
        accelerate(model)
    spec = OptimizerSpec.model_validate({"weight_decay": 1e-3, **run[0]})
    return build_train_step(
        spec, StepSettings(seed=0, virtual_gpus=VIRTUAL_GPUS, precision=precision, **run[1]), World(), model, device, {}
    )


def take(step: TrainStep, case: Case, number: int) -> Vote:
    shape = (CLIPS, case.frames, case.crop, case.crop, 3)
    batches = [random_batch(number, virtual_gpu, shape, CLASSES) for virtual_gpu in range(VIRTUAL_GPUS)]
    return take_step(step, batches, LR).read(VIRTUAL_GPUS * CLIPS, VIRTUAL_GPUS, 1)


def state(step: TrainStep) -> dict[str, torch.Tensor]:
    """All weights, all running statistics, and the average of the weights if there is one."""
    model: nn.Module = step.model
    found = {"weights": flat(model.parameters())}
    found["statistics"] = flat(buffer for name, buffer in model.named_buffers() if "running" in name)
    if step.average is not None:
        average = step.average.state_dict()["model"]
        found["average"] = flat(average[name] for name, _ in model.named_parameters())
    return found


def problems(name: str, device: torch.device) -> list[str]:
    """Run three steps on the device and in double precision; return what differs."""
    case = SMALL if device.type == "cpu" else Case("tsm", "resnet50", frames=8, crop=64, width=0.25)
    reference = train_step(case, CPU, "fp64", RUNS[name])
    before = state(reference)
    expected = [take(reference, case, number) for number in range(STEPS)]
    with tf32(allowed=False):
        step = train_step(case, device, "fp32", RUNS[name])
        votes = [take(step, case, number) for number in range(STEPS)]
    own, theirs = state(step), state(reference)
    errors = {kind: relative_error(own[kind] - before[kind], theirs[kind] - before[kind]) for kind in before}
    found = [f"{kind}: {error:.2g} of their way off" for kind, error in errors.items() if not error <= BOUNDS[kind]]
    for vote, other in zip(votes, expected, strict=True):
        if vote.skipped or not abs(vote.loss - other.loss) <= LOSS * other.loss:
            found.append(f"loss {vote.loss}, expected {other.loss}")
    single, other_single = votes[0].squares, expected[0].squares
    if single is not None and other_single is not None and abs(single.single / other_single.single - 1) > 3e-2:
        found.append(f"squared gradient norm {single.single}, expected {other_single.single}")
    return found


@pytest.mark.parametrize(("name", "device"), on_devices(RUNS, rehearsed=RUNS))
def test_three_steps_are_those_of_double_precision(name: str, device: torch.device) -> None:
    assert problems(name, device) == []


def test_statistics_of_the_last_micro_batch_alone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RunningStatistics.end_pass

    def wrong(self: RunningStatistics) -> None:
        if self._norms[0].weight.dtype != torch.float64:
            self._moved.zero_()
        honest(self)

    monkeypatch.setattr(RunningStatistics, "end_pass", wrong)
    (problem,) = problems("sgd", CPU)
    assert problem.startswith("statistics: ")


def test_an_overflow_in_fp16_skips_the_step_and_halves_the_scale(device: torch.device) -> None:
    step = train_step(SMALL, device, "fp16", ({}, {"clip_norm": 1.0, "ema_decay": 0.5}))
    step.loss_scale.scale.fill_(2.0**40)
    before, vote = state(step), take(step, SMALL, 0)
    assert vote.skipped and not vote.broken
    assert float(step.loss_scale.scale) == 2.0**39
    assert all(torch.equal(before[kind], value) for kind, value in state(step).items()), "it changed in a skipped step"
    step.loss_scale.scale.fill_(2.0**8)
    assert not take(step, SMALL, 0).skipped
    after = state(step)
    assert not torch.equal(before["weights"], after["weights"])
    assert all(bool(torch.isfinite(values).all()) for values in after.values())


@pytest.mark.parametrize(("name", "device"), on_devices(["traced"], rehearsed=["traced"]))
def test_slices_lie_on_the_hosts_clock_and_recording_waits_for_nothing(name: str, device: torch.device) -> None:
    step = train_step(SMALL, device, "fp32", ({}, {}))
    shape = (CLIPS, SMALL.frames, SMALL.crop, SMALL.crop, 3)
    batches = [random_batch(0, virtual_gpu, shape, CLASSES) for virtual_gpu in range(VIRTUAL_GPUS)]
    for _ in range(2):  # the first ones allocate and choose algorithms
        take_step(step, batches, LR)
    before = idle_mark(device).host_time(idle_mark(device))
    with waits_forbidden(device):
        timer = StepTimer(device, 1)
        timer.lap("data_wait")
        take_step(step, batches, LR, timer=timer)
    now = idle_mark(device)
    after = time.perf_counter()
    whole, *phases = slices_of(timer, now, 0.0)
    slack = 1e-3 if device.type == "cuda" else 0.0  # between an event and the host's reading
    assert before - slack <= whole.start < whole.end <= after + slack
    assert [one.start for one in phases[1:]] == [one.end for one in phases[:-1]]
    assert (phases[0].start, phases[-1].end) == (whole.start, whole.end)
    passes = [one for one in phases if one.name in ("forward", "backward")]
    assert len(passes) == 2 * VIRTUAL_GPUS and all(one.end > one.start for one in passes)
