"""What failures cost: by hand, and against runs that fail at random."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from summit_train.plan import make_plan
from summit_train.scaling.cost import ScaledJob, forecast
from summit_train.scaling.failures import daly_interval, goodput, losses, young_interval
from summit_train.scaling.machines import load_machine
from summit_train.spec import load_spec

SPEC = Path(__file__).resolve().parents[2] / "configs/kinetics/tsm_r50_8f_1536gpu.yaml"


@pytest.fixture
def job() -> ScaledJob:
    """The paper's run on 256 nodes of Summit: 1,536 GPUs."""
    return ScaledJob(load_spec(SPEC, []), load_machine("summit"), 256, 240_000, 20_000)


def test_the_intervals_by_hand() -> None:
    assert young_interval(2, 100) == 20
    # 20 (1 + 0.1 / 3 + 0.01 / 9) - 2
    assert daly_interval(2, 100) == pytest.approx(18.6888889)
    assert daly_interval(200, 100) == daly_interval(500, 100) == 100


def test_the_goodput_by_hand() -> None:
    # e^0.2 = 1.22140276, e^0.1 = 1.10517092
    assert goodput(18, 2, 100, 0) == pytest.approx(18 / 22.140276)
    assert goodput(18, 2, 100, 10) == pytest.approx(18 / 22.140276 / 1.10517092)
    assert goodput(1e6, 1, 1, 1) == 0.0


def _simulated(interval: float, stall: float, mtbf: float, restart: float, late: float, failures: int) -> float:
    """The goodput of a run that fails at random; a checkpoint can be used `late` seconds after the steps go on."""
    chance, clock, counted = random.Random(1), 0.0, 0.0
    for _ in range(failures):
        ends, now = clock + chance.expovariate(1 / mtbf), clock + restart
        unsaved, usable = 0.0, list[tuple[float, float]]()
        while now < ends:
            now += interval
            unsaved += interval
            now += stall
            usable.append((now + late, unsaved))
        counted += max((work for at, work in usable if at <= ends), default=0.0)
        clock = ends
    return counted / clock


CASES = [(10.0, 3600.0, 60.0, 0.0), (30.0, 600.0, 20.0, 0.0), (1.0, 3600.0, 60.0, 20.0)]


@pytest.mark.parametrize(("stall", "mtbf", "restart", "late"), CASES)
def test_dalys_interval_is_the_best_of_simulated_runs(stall: float, mtbf: float, restart: float, late: float) -> None:
    best = daly_interval(stall, mtbf)
    found = {f: _simulated(f * best, stall, mtbf, restart, late, 4000) for f in (0.25, 0.5, 0.8, 1.0, 1.25, 2, 4)}
    assert found[1.0] >= max(found.values()) - 0.003
    assert found[1.0] > found[0.25] + 0.01 and found[1.0] > found[4] + 0.01
    for factor, value in found.items():
        assert goodput(factor * best, stall, mtbf, restart + late) == pytest.approx(value, rel=0.01)


def test_1536_gpus_fail_once_in_33_hours(job: ScaledJob) -> None:
    found = losses(job, row := forecast(job))
    assert found.mtbf_s / 3600 == pytest.approx(33.0, rel=1e-3) and job.gpus == 1536
    assert found.failures == pytest.approx(row.run_s / found.mtbf_s)
    fragile = job.machine.failures.model_copy(update={"gpu_hours": 7440.0})
    machine = job.machine.model_copy(update={"failures": fragile})
    assert losses(replace(job, machine=machine), row).mtbf_s == pytest.approx(7440 * 3600 / 1536)


def test_a_checkpoint_costs_its_bytes_and_in_the_background_a_copy(job: ScaledJob) -> None:
    size = make_plan(job.spec, 1536, 240_000).checkpoint_bytes
    row, rates = forecast(job), job.machine.failures
    copy_s, write_s = size / rates.copy_bytes_per_second, size / rates.write_bytes_per_second
    found = losses(job, row)
    assert found.stall_s == pytest.approx(copy_s + write_s)
    assert found.daly_s == pytest.approx(daly_interval(copy_s + write_s, found.mtbf_s))
    assert found.goodput == goodput(found.daly_s, found.stall_s, found.mtbf_s, rates.restart_s)
    checkpoint = job.spec.checkpoint.model_copy(update={"background": True})
    beside = losses(replace(job, spec=job.spec.model_copy(update={"checkpoint": checkpoint})), row)
    assert beside.stall_s == pytest.approx(copy_s)
    assert beside.goodput == goodput(beside.daly_s, copy_s, found.mtbf_s, rates.restart_s + write_s) > found.goodput


def test_the_specs_own_interval_is_an_epoch_or_some_minutes(job: ScaledJob) -> None:
    row = forecast(job)
    found = losses(job, row)
    assert found.own_interval_s == pytest.approx(20 * row.step_s)
    assert found.own_goodput < found.goodput
    checkpoint = job.spec.checkpoint.model_copy(update={"every_epochs": 100, "every_minutes": 2.0})
    timed = losses(replace(job, spec=job.spec.model_copy(update={"checkpoint": checkpoint})), row)
    assert timed.own_interval_s == 120 and math.isclose(timed.daly_s, found.daly_s)
