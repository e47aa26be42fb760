from __future__ import annotations

import subprocess
import sys

import pytest

from summit_train.core.errors import UserError
from summit_train.report.records import RunRecord, read_runs
from summit_train.report.results import read_observed
from tests.run_directories import whole_log


def test_a_whole_run_is_read(write_run):
    run = RunRecord(write_run("tsm"))
    assert run.label == "tsm" and run.missing == [] and run.notes == [] and run.is_done
    assert run.data_wait_share == pytest.approx(10.0)
    assert run.log.seconds == pytest.approx(sum(step.step_s for step in run.log.steps) + 4 * 0.25)


def test_median_throughput_ignores_a_slow_start(write_run):
    lines = whole_log()
    rates = [line["clips_per_second"] for line in lines if line["kind"] == "step"]
    lines[1]["clips_per_second"] = 0.01
    assert min(rates) <= RunRecord(write_run(lines=lines)).clips_per_second <= max(rates)


def test_without_a_plan_steps_per_epoch_come_from_the_records(write_run):
    assert RunRecord(write_run("all", leave_out=("plan.json",))).steps_per_epoch == 10
    first_epoch = [line for line in whole_log() if line["step"] < 10]
    assert RunRecord(write_run("one", lines=first_epoch, leave_out=("plan.json",))).steps_per_epoch is None


def test_lines_of_the_log_that_cannot_be_read_come_after_the_other_notes(write_run):
    path = write_run()
    (path / "eval.json").write_text("[" * 200_000)
    (path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + (path / "metrics.jsonl").read_bytes())
    run = RunRecord(path)
    assert run.log.last_step == 40
    assert run.notes == [
        "eval.json: unreadable, left out (its values are nested too deeply)",
        "metrics.jsonl, line 1 is left out: unreadable, no 'kind'",
    ]
    (path / "observed.json").write_text("[" * 200_000)
    with pytest.raises(UserError, match="is not what `summit-train eval SPEC --observed` writes"):
        read_observed(path)


def test_a_file_is_read_when_it_is_needed(write_run):
    run = RunRecord(write_run())
    (run.path / "metrics.jsonl").unlink()
    (run.path / "plan.json").write_text("{}")
    assert run.missing == [] and run.log.steps == [] and run.plan == {} and run.notes == []


def test_labels_differ_and_a_run_given_twice_counts_once(write_run):
    first, other, same_name = write_run("a", name="x"), write_run("b"), write_run("c", name="x")
    runs = read_runs([first, other, same_name, first / ".." / "a"])
    assert [run.path for run in runs] == [first, other, same_name]
    assert [run.label for run in runs] == [f"x ({first})", "b", f"x ({same_name})"]


def test_what_is_no_run_is_refused_with_what_would_be_right(write_run, tmp_path):
    run = write_run("runs/mine")
    (tmp_path / "empty").mkdir()
    neither = r"neither spec\.yaml nor metrics\.jsonl; give"
    for path, reason in (
        (tmp_path / "nowhere", "nowhere: no such directory"),
        (run / "spec.yaml", r"spec\.yaml: not a directory"),
        (run.parent, f"{neither} the runs within it: {run}"),
        (tmp_path / "empty", f"{neither} run_dir/name of a spec"),
    ):
        with pytest.raises(UserError, match=reason):
            RunRecord(path)


def test_the_report_imports_no_torch():
    code = "import sys, summit_train.report.page, summit_train.cli.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_lists_are_settings_to_their_last_digit_and_item(write_run):
    spec = {
        "loss": {"class_weights": [1] * 24 + [0.1234567891]},
        "data": {"augment": ["crop", {"kind": "dim"}], "mix": {}},
    }
    settings = dict(RunRecord(write_run(spec=spec)).settings())
    assert settings["loss.class_weights"] == "1, " * 24 + "0.1234567891"
    assert (settings["data.augment"], settings["data.mix"]) == ('crop, {"kind": "dim"}', "none")
