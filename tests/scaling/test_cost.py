"""The cost of a step and a run: sums by hand, bounds, and how it moves with nodes, batch and network."""

from __future__ import annotations

import math
from typing import Any

import pytest

from summit_train.core.errors import UserError
from summit_train.plan import make_plan
from summit_train.scaling.collectives import allreduce_seconds
from summit_train.scaling.cost import (
    ScaledJob,
    evaluation_seconds,
    expected_maximum,
    forecast,
    gradient_element_bytes,
    seconds_per_clip,
    step_time,
    steps_per_epoch,
)
from summit_train.scaling.machines import Machine, find_rate, load_machine
from summit_train.spec import Spec, load_spec
from tests.detectors import detector_spec
from tests.worlds import ROOT

PATH = ROOT / "configs/kinetics/tsm_r50_8f_1536gpu.yaml"
SPEC = load_spec(PATH)
SUMMIT = load_machine("summit")
TSM_RATE = find_rate(SUMMIT, "tsm", "fp32").clips_per_second


def _job(nodes: int, spec: Spec = SPEC, machine: Machine = SUMMIT, **more: Any) -> ScaledJob:
    return ScaledJob(spec, machine, nodes, 240_000, 20_000, **more)


def _machine(**keys: str) -> Machine:
    return load_machine("summit", [f"{key.replace('__', '.')}={value}" for key, value in keys.items()])


def test_expected_maximum_of_normal_numbers() -> None:
    # David and Nagaraja, "Order Statistics", table of means of normal order statistics.
    for count, mean in {1: 0.0, 2: 1 / math.sqrt(math.pi), 3: 0.84628, 10: 1.53875, 100: 2.50759}.items():
        assert expected_maximum(count) == pytest.approx(mean, abs=2e-4)


def test_parts_add_up_and_a_run_is_steps_times_epochs() -> None:
    row = forecast(_job(256))
    shown = ("compute_s", "communication_s", "stragglers_s", "data_s")
    assert row.step_s == pytest.approx(sum(row.parts[name] for name in shown))
    assert (row.gpus, row.global_batch, row.steps_per_epoch, row.total_steps) == (1536, 12_288, 20, 2000)
    assert row.run_s == pytest.approx(2000 * row.step_s)
    assert row.node_hours == pytest.approx(256 * row.run_s / 3600)
    assert row.clips_per_second == pytest.approx(12_288 / row.step_s)
    assert row.parts["compute_s"] == pytest.approx(SUMMIT.compute.step_overhead_s + 8 / TSM_RATE)


def test_a_clip_takes_time_by_its_multiply_adds() -> None:
    half = load_spec(PATH, ["data.num_frames=4"])
    # The classifier works on every frame, too, so half the frames are half the work exactly.
    assert seconds_per_clip(half, SUMMIT) == pytest.approx(seconds_per_clip(SPEC, SUMMIT) / 2)


def test_one_rank_waits_for_nobody() -> None:
    alone = _machine(gpus_per_node="1")
    step = step_time(_job(1, machine=alone))
    assert (step.communication_s, step.stragglers_s) == (0, 0)
    assert forecast(_job(1, machine=alone)).efficiency == 1


def test_rounding_at_the_epochs_edge() -> None:
    assert steps_per_epoch(240_000, 18_432, "keep") == 14
    planned = make_plan(load_spec(PATH, ["scale.gpus=2304"]), 2304, 240_000)
    assert steps_per_epoch(240_000, 18_432, "drop") == planned.steps_per_epoch
    assert steps_per_epoch(96, 48, "keep") == steps_per_epoch(96, 48, "drop") == 2
    with pytest.raises(UserError, match="47 clips do not fill"):
        steps_per_epoch(47, 48, "keep")


def test_gradients_in_fp16_are_half_as_large() -> None:
    assert gradient_element_bytes(load_spec(PATH, ["optimizer.compression=fp16"])) == 2
    assert gradient_element_bytes(SPEC) == 4


def test_a_slow_file_system_is_waited_for_under_all_else() -> None:
    slow = _machine(shared__frames_per_second_per_node="384")
    step = step_time(_job(1, machine=slow))
    # 48 clips of 8 frames at 384 frames a second: a second in all, what the GPUs do is under it.
    assert step.step_s == pytest.approx(1.0)
    assert step.data_s == pytest.approx(1.0 - step.compute_s - step.communication_s - step.stragglers_s)
    assert step_time(_job(1, machine=slow.model_copy(update={"shared": None}))).data_s == 0


def test_a_fixed_batch_accumulates_and_reduces_as_often_as_before() -> None:
    whole, quarter = step_time(_job(256, virtual_gpus=1536)), step_time(_job(64, virtual_gpus=1536))
    assert quarter.compute_s == pytest.approx(4 * whole.compute_s)
    assert quarter.communication_s < 1.1 * whole.communication_s
    # Four passes: their deviations add up as squares.
    ratio = expected_maximum(384) / expected_maximum(1536)
    assert quarter.stragglers_s == pytest.approx(2 * ratio * whole.stragglers_s)
    assert forecast(_job(64, virtual_gpus=1536)).global_batch == 12_288
    with pytest.raises(UserError, match=r"scale\.gpus must be at least the 1,542 ranks of 257 nodes, got 1,536; "):
        forecast(_job(257, virtual_gpus=1536))


def test_the_largest_share_decides() -> None:
    """1,536 on 30 ranks: 24 ranks have 51, 6 have 52. The fullest of 5 nodes reads 308 micro-batches."""
    machine = _machine(shared__frames_per_second_per_node="384")
    row, one = forecast(_job(5, machine=machine, virtual_gpus=1536)), step_time(_job(256))
    assert row.accumulation == 52
    assert row.parts["compute_s"] == pytest.approx(52 * one.compute_s)
    deviation_s = one.stragglers_s / expected_maximum(1536) * math.sqrt(52)
    assert row.parts["stragglers_s"] == pytest.approx(deviation_s * expected_maximum(6))
    assert row.step_s == pytest.approx(308 * 8 * 8 / 384)


EARLY_STOP = "schedule.early_stop={measure: top1, epochs: 1}"
SEVERAL = ["evaluate.last_checkpoints=4", "evaluate.precise_bn=30", "ema.decay=0.9", "evaluate.every_epochs=0"]


@pytest.mark.parametrize(
    ("keys", "views"),
    [
        # 10 validations of a view, 2 x 10 x 3 views at the end.
        (["evaluate.crops=3", "evaluate.every_epochs=10", "evaluate.last_checkpoints=2"], 14 * (10 + 60)),
        # 4 checkpoints' 2 networks with 10 views, and 30 steps of 8 clips for each of the 8 networks.
        (SEVERAL, 14 * 4 * 2 * 10 + 4 * 2 * 30 * 8),
        # The last 5 of 3 checkpoints, after epochs 40, 80 and 100.
        (["evaluate.every_epochs=0", "checkpoint.every_epochs=40"], 14 * 3 * 10),
        (["evaluate.every_epochs=0", "checkpoint.every_epochs=100", "ema.decay=0.9"], 14 * 2 * 10),
        # A run that may stop early saves a checkpoint with each validation, after epochs 30, 60, 90 and 100.
        (["evaluate.every_epochs=30", "checkpoint.every_epochs=100", EARLY_STOP], 14 * (4 + 4 * 10)),
        (["evaluate.every_epochs=30", "checkpoint.every_epochs=100"], 14 * (4 + 10)),
        (["evaluate.every_epochs=30", "evaluate.mode=stream", "model.shift_direction=past"], 14 * (4 * 10 + 5 * 10)),
    ],
)
def test_evaluation_by_hand(keys: list[str], views: int) -> None:
    """20,000 videos on 1,536 GPUs: the fullest has 14, each with 10 clips, of the last 5 checkpoints of 100 epochs."""
    spec = load_spec(PATH, ["evaluate.short_side=224", "evaluate.crops=1", *keys])
    machine = SUMMIT.model_copy(update={"shared": None})
    assert evaluation_seconds(_job(256, spec, machine)) == pytest.approx(views / 3 / TSM_RATE)


def test_the_evaluation_of_whole_frames_does_not_depend_on_the_size_of_those_trained_on() -> None:
    seconds = []
    for data in ({}, {"long_side": 128}):
        spec = detector_spec(precision="fp32", model={"arch": "tsm", "shift_direction": "past"}, data=data)
        seconds.append(evaluation_seconds(_job(1, spec, SUMMIT.model_copy(update={"shared": None}))))
    assert seconds[1] == pytest.approx(seconds[0])


def test_several_nodes_without_a_link_are_refused() -> None:
    single = SUMMIT.model_copy(update={"network": SUMMIT.network.model_copy(update={"inter": None})})
    with pytest.raises(UserError, match=r"network\.inter"):
        forecast(_job(2, machine=single))


def _averaging(**keys: Any) -> Spec:
    return load_spec(PATH, ["parallel.method=averaging", *(f"parallel.{key}={value}" for key, value in keys.items())])


def test_an_average_is_an_allreduce_of_weights_and_momentum_that_nothing_hides() -> None:
    """256 nodes: 20 steps an epoch. Two tensors of 24,327,632 floats once an epoch, or seven times: a period of 3."""
    whole = allreduce_seconds(SUMMIT.network, 256, 6, 2 * 4 * 24_327_632)
    once = step_time(_job(256, _averaging()))
    assert once.communication_s == pytest.approx(whole / 20)
    assert step_time(_job(256, _averaging(period=3))).communication_s == pytest.approx(7 * whole / 20)
    assert step_time(_job(256, _averaging(period=30))).communication_s == once.communication_s
    weights = allreduce_seconds(SUMMIT.network, 256, 6, 4 * 24_327_632)
    local = step_time(_job(256, _averaging(period=1, optimizer_state="local")))
    assert local.communication_s == pytest.approx(weights)
    assert once.compute_s == step_time(_job(256)).compute_s and once.stragglers_s == step_time(_job(256)).stragglers_s
