"""`train RUN --from STEP`: bit-equal where nothing changes, other values recorded, what may not change is named."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from summit_train.plan import Plan, make_plan
from summit_train.spec import Spec, run_spec
from summit_train.training import validation
from summit_train.training.preflight import Files, read_files, start_notes
from tests.conftest import WriteSpec
from tests.runs import assert_bit_equal, difference, final_state, records, steps_of
from tests.worlds import Say, forked, main_without_reports, refused, succeed, train_signalled


@pytest.fixture(scope="module")
def old(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints after 10 and 20 updates."""
    return Path(shutil.copytree(trained_run, tmp_path_factory.mktemp("old") / "runs/run"))


def _contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    return [f"run_dir={tmp_path}"]


@pytest.mark.parametrize("ranks", [0, 3])
def test_a_run_from_a_checkpoint_ends_as_the_old_one_where_nothing_changes(
    old: Path, tmp_path: Path, keys: Sequence[str], ranks: int
) -> None:
    before = _contents(old)
    said = succeed(ranks, "train", str(old), "--from", "10", *keys)
    new = tmp_path / "run-from-10"
    assert f"begins with {old}/checkpoints/step_00000010.pt" in said
    assert steps_of(new) == list(range(11, 21))
    one, other = final_state(new), final_state(old)
    assert one.pop("line") == 10 and other.pop("line", 0) == 0
    if ranks == 0:  # as the old one
        assert_bit_equal(one, other)
        assert [row["loss"] for row in records(new, "step")] == [row["loss"] for row in records(old, "step")][10:]
    assert difference(one, other) < 1e-4
    assert _contents(old) == before
    assert json.loads((new / "origin.json").read_text()) == {
        "checkpoint": f"{old}/checkpoints/step_00000010.pt", "changes": {},
    }  # fmt: skip


def test_other_values_are_recorded_and_a_stopped_one_goes_on(old: Path, tmp_path: Path, keys: Sequence[str]) -> None:
    changes = ["optimizer.base_lr=0.05", "schedule.epochs=3", "loss.label_smoothing=0.1", "data.flip=false"]
    (tmp_path / "dim.py").write_text("def dim(clip, generator):\n    return clip // 2\n")
    changes += ["schedule.early_stop={measure: top1, epochs: 9}", "evaluate.every_epochs=1"]
    changes.append(f"data.augment=[scale_jitter, {tmp_path}/dim.py:dim]")
    words = [str(old), "--from", "10", *keys, *changes]
    succeed(0, "train", *words)
    new = tmp_path / "run-from-10"
    assert steps_of(new) == list(range(11, 31))
    found = json.loads((new / "origin.json").read_text())["changes"]
    assert set(found) == {*(word.partition("=")[0] for word in changes), "data.augment dim.py:dim (SHA-256)"}
    assert found["optimizer.base_lr"] == "optimizer.base_lr: the checkpoint has 0.005, this run 0.05"
    status, said = train_signalled(str(old), signal.SIGUSR2, 14, *words[1:], "name=stopped")
    assert status == 85, said
    succeed(0, "train", *words, "name=stopped")
    assert_bit_equal(final_state(new), final_state(tmp_path / "stopped"))
    assert json.loads((tmp_path / "stopped/origin.json").read_text())["changes"] == found


def test_one_that_is_stopped_before_its_first_checkpoint_begins_again(old: Path, tmp_path: Path) -> None:
    """It validates the checkpoint that it begins with. Once it has some of its own, it needs that one no longer."""
    source = Path(shutil.copytree(old, tmp_path / "source"))
    words = ["train", str(source), "--from", "10", f"run_dir={tmp_path}", "name=new", "evaluate.every_epochs=1"]
    words.append("schedule.early_stop={measure: top1, epochs: 9}")

    def signalled(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR2)
        return validate(*arguments)

    def work() -> int:
        validation.validate = signalled
        return main_without_reports(words)

    validate = validation.validate
    status, said = forked(0, work)
    first = source / "checkpoints/step_00000010.pt"
    assert status == 85 and f"resumes from {first} when started again" in said
    assert f"begins with {first}" in "".join(start_notes(*_plan(tmp_path / "new")))
    status, said = train_signalled(str(source), signal.SIGUSR2, 14, *words[2:])
    assert status == 85, said
    first.unlink()
    assert f"resumes from {tmp_path}/new/checkpoints/" in succeed(0, *words)


def _plan(run: Path) -> tuple[Spec, Plan, Files]:
    """What `plan` has of a run whose lists are not here."""
    spec = run_spec(run)
    return spec, make_plan(spec, 1, 80), read_files(spec, 80)


def test_a_refused_one_leaves_nothing_that_a_later_start_would_obey(old: Path, tmp_path: Path, say: Say) -> None:
    words = ["train", old, "--from", "10", f"run_dir={tmp_path}"]
    assert "must keep its network" in say(*words, "model.dropout=0.5")[2]
    assert not (tmp_path / "run-from-10/origin.json").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--from", "10", "optimizer.momentum=0"], "solver: optimizer.momentum: the checkpoint has 0.9, this run 0"),
        (["--from", "15"], "--from must be the step of a checkpoint of RUN, one of [10, 20], got 15"),
        (["--from", "20"], "--from must be before the last step, 20, got 20"),
        (["--from", "10", "name=run"], "--from must be used with another name, got run; try name=OTHER"),
        (["--from", "10", "--more-epochs", "1"], "--from must be used without --more-epochs; try schedule.epochs=N"),
        (
            ["--from", "10", "model.dropout=0.5", "optimizer.base_lr=1", "scale.gpus=2", "name=a"],
            "--from 10: must keep its network, data, batch and solver: model.dropout: the checkpoint has 0.2, this run "
            "0.5; scale.gpus: the checkpoint has 4, this run 2",
        ),
        (["--from", "10", "parallel.method=averaging", "name=b"], "parallel.method: the checkpoint has 'synchronous'"),
    ],
)  # fmt: skip
def test_what_cannot_begin_there(old: Path, say: Say, words: Sequence[str], line: str, tmp_path: Path) -> None:
    status, _, said = say("train", old, *words, *([] if "name=run" in words else [f"run_dir={tmp_path}"]))
    assert status == 2 and line.replace("RUN", str(old)) in said


def test_a_spec_or_a_folder_in_use_is_refused(old: Path, tmp_path: Path, write_spec: WriteSpec, say: Say) -> None:
    spec = write_spec()
    assert f"--from must be used with a run folder, got {spec}" in refused(say("train", spec, "--from", "10"))
    other = Path(shutil.copytree(old, tmp_path / "used"))
    said = refused(say("train", old, "--from", "10", f"run_dir={tmp_path}", "name=used"))
    assert f"{other} must not exist, or begin with {old}/checkpoints/step_00000010.pt; try name=OTHER" in said
