"""What a step records on a device: nothing waits for it, and its slices lie on the host's clock, in their order."""

from __future__ import annotations

import time

import pytest
import torch

from summit_train.training.timer import StepTimer, idle_mark
from summit_train.training.trace import slices_of
from tests.gpu.devices import on_devices, random_batch
from tests.gpu.networks import CLASSES
from tests.gpu.test_steps import LR, SMALL, VIRTUAL_GPUS, train_step
from tests.gpu.test_syncs import waits_forbidden
from tests.worlds import take_step

CLIPS = 2


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
