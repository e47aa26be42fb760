"""What a recorder hears from a step, and that hearing it changes nothing."""

from __future__ import annotations

import time

import pytest
import torch

from summit_train.data.batches.loader import MicroBatch
from summit_train.models import build_model
from summit_train.training.timer import PHASES, UNTIMED, Mark, Recorder, Stopwatch
from tests.training.test_step import _step

CPU = torch.device("cpu")


def _weights_after_a_step(stopwatch: Stopwatch = UNTIMED) -> torch.Tensor:
    model = build_model("tsm", "resnet18", 2, 3, width=0.125, generator=torch.Generator().manual_seed(1))
    step = _step(model, 2, "fp32")
    frames = torch.arange(2 * 2 * 16 * 16 * 3).reshape(2, 2, 16, 16, 3).remainder(256).to(torch.uint8)
    labels, ids = torch.tensor([0, 2]), torch.arange(2)
    step([MicroBatch(0, number, frames, labels, ids) for number in range(2)], 0.1, stopwatch=stopwatch)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_step_names_its_phases_in_their_order_and_computes_the_same() -> None:
    recorder = Recorder(CPU)
    alone = _weights_after_a_step()
    recorder.begin_step(1, Mark(CPU))
    assert torch.equal(_weights_after_a_step(recorder), alone)
    (step,) = recorder.take()
    work = [phase for phase, _ in step.laps if phase != "other"]
    assert work == [""] + ["forward", "backward"] * 2 + ["allreduce"] * 2 + ["update"]
    recorder.begin_step(2, Mark(CPU))
    _weights_after_a_step(recorder)
    (seconds,) = recorder.read()
    assert set(seconds) == set(PHASES) and seconds["data_wait"] == 0
    assert all(seconds[phase] > 0 for phase in PHASES if phase != "data_wait")


def test_the_laps_of_a_step_leave_no_time_between_them() -> None:
    recorder = Recorder(CPU)
    began = Mark(CPU)
    recorder.begin_step(1, Mark(CPU))
    time.sleep(0.02)
    recorder.lap("data_wait")
    recorder.lap("forward")
    time.sleep(0.01)
    recorder.lap("data_wait")
    recorder.begin_step(2, Mark(CPU))
    recorder.lap("update")
    first, second = recorder.read()
    assert first["data_wait"] >= 0.03 and first["forward"] < first["data_wait"]
    assert sum(first.values()) + sum(second.values()) <= began.seconds_to(Mark(CPU))
    assert second["data_wait"] == 0 and recorder.read() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recording_on_a_gpu_does_not_wait_for_it() -> None:
    device = torch.device("cuda", 0)
    recorder, x = Recorder(device), torch.zeros(2048, 2048, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        recorder.begin_step(1, Mark(device))
        x @ x
        recorder.lap("forward")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert recorder.read()[0]["forward"] > 0
