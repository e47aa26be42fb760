"""Early stop: a run that ends so, on any ranks, after kills, and how it continues."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from summit_train.core.errors import UserError
from summit_train.core.run_folder import find_checkpoints, step_of
from summit_train.plan import is_due
from summit_train.report.records import RunRecord
from summit_train.report.tables import notes_of
from summit_train.spec import load_spec
from tests.conftest import WriteSpec, made_once, spec_writer
from tests.runs import load_any, records, rewound, steps_of
from tests.worlds import command, needs_ranks, train


@pytest.mark.parametrize(
    ("sections", "wrong"),
    [
        ({}, r"schedule\.early_stop: must be null if evaluate\.every_epochs is 0"),
        (
            {"schedule": {"early_stop": {"measure": "top5", "epochs": 2}}, "evaluate": {"every_epochs": 1}},
            r"schedule\.early_stop\.measure: must be top1 or val_loss with loss\.kind softmax, got top5",
        ),
        (
            {"loss": {"kind": "binary"}, "evaluate": {"every_epochs": 1}},
            r"schedule\.early_stop\.measure: must be map or val_loss with loss\.kind binary, got top1",
        ),
    ],
)
def test_what_no_validation_can_decide_is_refused(write_spec: WriteSpec, sections: dict[str, Any], wrong: str) -> None:
    schedule = {"early_stop": {"measure": "top1", "epochs": 2}}
    with pytest.raises(UserError, match=wrong):
        load_spec(write_spec(**{"schedule": schedule, **sections}))


# The LR is next to nothing and no statistic moves, so that every validation is as good as the first one.
SECTIONS: dict[str, Any] = {
    "scale": {"gpus": 6, "clips_per_gpu": 2},
    "optimizer": {"base_lr": 1e-12, "freeze": ["*bn*", "*downsample.1*"]},
    "schedule": {"epochs": 6, "early_stop": {"measure": "top1", "epochs": 2}},
    "evaluate": {"every_epochs": 1, "last_checkpoints": 2},
    "checkpoint": {"every_epochs": 5},
}


@pytest.fixture(scope="module")
def stopped(motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of at most 6 epochs of 6 steps, which stops after 3."""

    def make(folder: Path) -> None:
        out = train(0, spec_writer(motion_set, folder)("whole", **SECTIONS))
        best = "without improvement: the best top1, "
        assert f"epoch 3: stops early, 2 epochs {best}" in out and "whole: done in" in out

    return made_once(tmp_path_factory, "early_stopped", make) / "runs/whole"


def test_a_run_that_stops_early_is_a_finished_run(stopped: Path) -> None:
    assert steps_of(stopped) == list(range(1, 19))
    (record,) = records(stopped, "early_stop")
    first = records(stopped, "eval")[0]["top1"]
    about = {"epoch": 3, "step": 18, "measure": "top1", "best": first, "best_epoch": 1}
    assert {key: record[key] for key in about} == about
    # each validated epoch has a checkpoint, and the last two are in the mean
    assert [step_of(path) for path in find_checkpoints(stopped)] == [6, 12, 18]
    assert [row["step"] for row in json.loads((stopped / "eval.json").read_text())["checkpoints"]] == [12, 18]
    run = RunRecord(stopped)
    assert run.is_done and run.log.early_stop is not None
    note = f"Stopped early after epoch 3, step 18 of at most 36: no better top1 in 2 epochs than the {first:.4g} of "
    assert f"{note}epoch 1" in notes_of(run) and not any("Unfinished" in one for one in notes_of(run))


def test_checkpoints_of_validated_epochs_are_due(stopped: Path) -> None:
    spec = load_spec(stopped / "spec.yaml", ["evaluate.every_epochs=4"])
    assert [epoch for epoch in range(1, 7) if is_due(spec, epoch)] == [4, 5, 6]
    without = spec.model_copy(update={"schedule": spec.schedule.model_copy(update={"early_stop": None})})
    assert [epoch for epoch in range(1, 7) if is_due(without, epoch)] == [5, 6]


def _without_last_validation(run: Path) -> None:
    """As if the run had been killed in its last validation."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if '"eval"' in line)
    (run / "metrics.jsonl").write_text("".join(lines[:last]))
    (run / "eval.json").unlink()
    (run / "checkpoints/step_00000018.measures.json").unlink()


@needs_ranks
def test_a_run_killed_in_the_validation_that_ends_it_stops_there_on_other_ranks(stopped: Path) -> None:
    """Nothing is trained again. From an earlier checkpoint: "early stop, keep best" of test_golden_runs.py."""
    again = rewound(stopped, "again", 24)
    _without_last_validation(again)
    out = train(2, again)
    assert "step_00000018.pt" in out and "epoch 3: stops early" in out
    assert steps_of(again) == list(range(1, 19))
    assert records(again, "early_stop")[-1]["step"] == 18 and RunRecord(again).is_done
    states = [load_any(run / "checkpoints/step_00000018.pt") for run in (stopped, again)]
    assert states[0]["early_stop"] == states[1]["early_stop"]


def test_more_epochs_continue_from_the_stop_and_may_stop_again(stopped: Path) -> None:
    """1 more than the 3 that were trained; then 5 more, of which 2 are trained: patience begins at the 4th."""
    run = rewound(stopped, "more", 99)
    assert "more epochs: 4 instead of 3; LR continues at" in train(0, run, "--more-epochs", "1")
    assert steps_of(run) == list(range(1, 25)) and (run / "evals/epochs-3/eval.json").exists()
    found = RunRecord(run)
    assert found.is_done and found.log.early_stop is None
    assert [row["step"] for row in json.loads((run / "eval.json").read_text())["checkpoints"]] == [24]
    out = train(0, run, "--more-epochs", "5")
    assert "more epochs: 9 instead of 4" in out and "epoch 6: stops early, 2 epochs without improvement" in out
    assert "is that of epoch 4" in out and steps_of(run) == list(range(1, 37))
    # The result is there, so that the same command adds its epochs to the 6 that were trained.
    status, out = command(0, "train", str(run), "--more-epochs", "5", "--trace", "99:99")
    assert status == 2 and "at most 100 of the steps 1 to 66" in out


def test_more_epochs_up_to_the_length_before_the_stop_are_trained(stopped: Path) -> None:
    """3 more than the 3 that were trained are the 6 of the spec; also after a kill before the first checkpoint."""
    run = rewound(stopped, "same", 99)
    out = train(0, run, "--more-epochs", "3")
    assert "more epochs: 6 instead of 3" in out and "epoch 5: stops early" in out and "is that of epoch 3" in out
    assert steps_of(run) == list(range(1, 31))
    for later in [path for step in (24, 30) for path in (run / "checkpoints").glob(f"step_{step:08d}*")]:
        later.unlink()
    assert "more epochs: 6 instead of 3" in train(0, run) and steps_of(run)[30:] == list(range(19, 31))
    assert "more epochs:" not in train(0, run) and len(steps_of(run)) == 42  # it has stopped, and stays so


def test_the_validation_loss_decides_the_less_the_better(write_spec: WriteSpec, tmp_path: Path) -> None:
    keys = {**SECTIONS, "model": {}, "optimizer": {"base_lr": 0.1}}
    train(0, write_spec(**keys | {"schedule": {"epochs": 9, "early_stop": {"measure": "val_loss", "epochs": 1}}}))
    losses = [record["val_loss"] for record in records(tmp_path / "runs/run", "eval")]
    assert 1 < len(losses) < 9 and losses[-1] >= losses[-2]
    assert all(after < before for before, after in pairwise(losses[:-1]))
