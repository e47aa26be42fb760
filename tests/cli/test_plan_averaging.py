"""`summit-train plan` of model averaging: the averages of an epoch, their bytes, the ladder of a growing batch."""

from __future__ import annotations

import json

import pytest

from summit_train.__main__ import main
from tests.conftest import WriteSpec
from tests.worlds import main_said

GROWING = {"method": "averaging", "grow_batch": {"factor": 2}}


def test_the_plan_shows_averages_ladder_and_both_extremes(
    write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    """80 clips, 4 learners of 2: 20 each. Two epochs, so no decision can grow the batch before the last one."""
    spec = str(write_spec(parallel=GROWING, evaluate={"every_epochs": 1}))
    assert main(["plan", spec, "--json", "schedule.epochs=4"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["averaging_bytes"] == 2 * 4 * plan["parameters"]  # SGD's momentum
    assert [rung["clips_per_gpu"] for rung in plan["ladder"]] == [2, 4, 8, 16, 20]
    assert (plan["total_steps"], plan["fewest_updates"]) == (40, 10 + 10 + 5 + 2)
    assert main(["plan", spec, "schedule.epochs=4"]) == 0
    output = capsys.readouterr().out
    megabytes = f"{plan['averaging_bytes'] / 1e6:,.1f}"
    assert f"4 learners; 1 average an epoch of {megabytes} MB of weights and solver state" in output
    assert "2, 4, 8, 16, 20 clips of a learner: 10, 5, 2, 1, 1 steps an epoch" in output
    assert "40 if it never grows, 27 if each decision grows it" in output
    assert "through the allreduce" not in output


def test_a_period_makes_more_averages_and_a_local_state_smaller_ones(
    write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = str(write_spec(parallel={"method": "averaging", "period": 4, "optimizer_state": "local"}))
    assert main(["plan", spec, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["averaging_bytes"] == 4 * plan["parameters"] and len(plan["ladder"]) == 1
    assert plan["checkpoint_bytes"] == (1 + 4) * 2 * 4 * plan["parameters"]  # each learner's beside the average
    assert main(["plan", spec]) == 0
    assert "4 learners; 3 averages an epoch of " in capsys.readouterr().out


def test_beside_a_synchronous_plan_each_has_its_rows(write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write_spec("one"), write_spec("other", parallel={"method": "averaging"})
    assert main(["plan", str(one), "--compare", str(other)]) == 0
    lines = capsys.readouterr().out.splitlines()
    gradients, averaging = (next(line for line in lines if f"│ {name} " in line) for name in ("gradients", "averaging"))
    assert gradients.rstrip(" │").endswith("—") and "4 learners" in averaging


def test_memory_has_every_learner_of_a_rank(write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]) -> None:
    """SGD with momentum: 2 tensors a learner, the gradients of one, the average, and the buffer of an average."""
    spec, found = str(write_spec(parallel={"method": "averaging"})), {}
    for ranks in (1, 4):
        assert main(["plan", spec, "--json", "--ranks", str(ranks)]) == 0
        found[ranks] = json.loads(capsys.readouterr().out)
    three_more = found[1]["memory_bytes_per_rank"] - found[4]["memory_bytes_per_rank"]
    assert three_more == 3 * 2 * 4 * found[1]["parameters"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "parallel.grow_batch.max=21",
            "grow_batch.max: 21 clips do not fit a learner's epoch: 4 learners have 20 of the",
        ),
        ("parallel.grow_batch.max=1", "parallel.grow_batch.max: 1 clips are fewer than scale.clips_per_gpu, 2"),
        ("parallel.grow_batch.factor=1", "parallel.grow_batch.factor: Input should be greater than or equal to 2"),
        ("evaluate.every_epochs=0", "parallel.grow_batch: validations decide it; set evaluate.every_epochs"),
        ("parallel.period=0", "parallel.period: must be epoch or a number of steps from 1 to 1,000,000, got 0"),
        (
            "parallel.period=epochs",
            "parallel.period: must be epoch or a number of steps from 1 to 1,000,000, got 'epochs'",
        ),
        ("parallel.method=synchronous", "parallel.grow_batch: method synchronous does not read it"),
        ("ema.decay=0.9", "ema.decay: it averages the weights of one network"),
        ("optimizer.compression=fp16", "optimizer.compression: averaging sends weights"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    write_spec: WriteSpec, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    spec = write_spec(parallel=GROWING, evaluate={"every_epochs": 1})
    status, output, error = main_said(capsys, "plan", spec, override)
    assert (status, output) == (2, "") and message in error and len(error.splitlines()) == 1


def test_learners_that_the_ranks_do_not_divide_are_refused(
    write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, error = main_said(
        capsys, "plan", write_spec(parallel=GROWING, evaluate={"every_epochs": 1}), "--ranks", 3
    )
    assert status == 2 and "scale.gpus is 4, which 3 ranks do not divide" in error
