"""The times of a step's phases."""

from __future__ import annotations

import time

import pytest
import torch

from summit_train.data.batches.loader import MicroBatch
from summit_train.models import build_model
from summit_train.training.timer import PHASES, StepTimer
from tests.training.test_step import _step
from tests.worlds import take_step

CPU = torch.device("cpu")


def test_a_step_names_its_phases_in_their_order() -> None:
    model = build_model("tsm", "resnet18", 2, 3, width=0.125, generator=torch.Generator().manual_seed(1))
    frames = torch.arange(2 * 2 * 16 * 16 * 3).reshape(2, 2, 16, 16, 3).remainder(256).to(torch.uint8)
    labels, ids = torch.tensor([0, 2]), torch.arange(2)
    batches = [MicroBatch(0, number, frames, labels, ids) for number in range(2)]
    timer = StepTimer(CPU, 1)
    take_step(_step(model, 2, "fp32"), batches, 0.1, timer=timer)
    work = [phase for phase, _ in timer.laps if phase != "other"]
    assert work == [""] + ["forward", "backward"] * 2 + ["allreduce", "update"]
    seconds = timer.seconds()
    assert set(seconds) == set(PHASES) and seconds["data_wait"] == 0
    assert all(seconds[phase] > 0 for phase in PHASES if phase != "data_wait")


def test_the_laps_of_a_step_leave_no_time_between_them() -> None:
    timer = StepTimer(CPU)
    time.sleep(0.02)
    timer.lap("data_wait")
    timer.lap("forward")
    time.sleep(0.01)
    timer.lap("data_wait")
    timer.lap("checkpoint")
    seconds = timer.seconds()
    assert seconds["data_wait"] >= 0.03 and seconds["forward"] < seconds["data_wait"]
    assert sum(seconds.values()) == pytest.approx(timer.start.seconds_to(timer.laps[-1][1]))
    assert set(seconds) == {*PHASES, "checkpoint"} and seconds["update"] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_timing_on_a_gpu_does_not_wait_for_it() -> None:
    device = torch.device("cuda", 0)
    x = torch.zeros(2048, 2048, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        timer = StepTimer(device)
        x @ x
        timer.lap("forward")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert timer.seconds()["forward"] > 0
