from __future__ import annotations

import json
import subprocess
import sys

import pytest

from summit_train.core.errors import UserError
from summit_train.report.records import RunRecord, read_observed, read_runs


def test_a_whole_run_is_read(write_run):
    run = RunRecord(write_run("tsm"))
    assert run.label == "tsm" and run.missing == [] and run.notes == []
    assert [step.step for step in run.steps] == list(range(1, 41)) and run.last_step == 40
    assert [validation.epoch for validation in run.evals] == [1, 2, 3, 4]
    assert run.evals[-1].of("top1") == pytest.approx(97)
    assert run.final is not None and run.final.of("top1_mean") == 96.875 and run.final.checkpoints[1].step == 40
    assert run.starts[0].ranks == 2 and len(run.checkpoints) == 4
    assert run.steps_per_epoch == 10
    assert run.data_wait_share == pytest.approx(10.0)
    assert run.seconds == pytest.approx(sum(step.step_s for step in run.steps) + 4 * 0.25)


def test_median_throughput_ignores_a_slow_start(write_run, run_records):
    lines = run_records()
    rates = [line["clips_per_second"] for line in lines if line["kind"] == "step"]
    lines[1]["clips_per_second"] = 0.01
    assert min(rates) <= RunRecord(write_run(lines=lines)).clips_per_second <= max(rates)


def test_missing_files_are_named(write_run):
    run = RunRecord(write_run("one", leave_out=("eval.json", "plan.json", "environment.json")))
    assert run.missing == ["plan.json", "eval.json", "environment.json"]
    assert run.final is None and run.plan == {} and len(run.steps) == 40
    run = RunRecord(write_run("spec alone", leave_out=("metrics.jsonl", "eval.json")))
    assert run.steps == [] and run.last_step == 0
    assert run.clips_per_second is None and run.data_wait_share is None and run.seconds == 0


def test_without_a_plan_steps_per_epoch_come_from_the_records(write_run, run_records):
    assert RunRecord(write_run("all", leave_out=("plan.json",))).steps_per_epoch == 10
    first_epoch = [line for line in run_records() if line["step"] < 10]
    assert RunRecord(write_run("one", lines=first_epoch, leave_out=("plan.json",))).steps_per_epoch is None


TORN, AGAIN = '{"kind": "step", "step": 6, "epo', json.dumps({"kind": "start", "step": 4, "ranks": 1, "time": None})


@pytest.mark.parametrize(
    ("last", "steps", "starts"),
    [
        (TORN, [1, 2, 3, 4, 5], [0]),
        (f"{TORN}{AGAIN}\n", [1, 2, 3, 4], [0, 4]),  # the next start appended its record
        (AGAIN, [1, 2, 3, 4], [0, 4]),  # lacks only its end of line
    ],
)
def test_a_torn_last_line_is_left_out_and_named(write_run, run_records, last, steps, starts):
    path = write_run(lines=run_records()[:6])
    with (path / "metrics.jsonl").open("a") as file:
        file.write(last)
    run = RunRecord(path)
    assert [step.step for step in run.steps] == steps and [start.step for start in run.starts] == starts
    assert ["line 7 is left out: torn" in note for note in run.notes] == [True] * ("epo" in last)


def test_lines_that_are_no_records_are_named_and_the_rest_is_read(tmp_path):
    log = tmp_path / "metrics.jsonl"
    good = b'{"kind": "checkpoint", "step": 1, "seconds": 0.5}\n'
    bad = [
        b"\xff\xfe\x00\n",
        b"[1, 2]\n",
        b'{"kind": "step", "step": 1}\n',
        b'{"step": 1}\n',
        b'{"kind": "checkpoint", "step": 1e999, "seconds": 1}\n',
        b"[" * 200_000 + b"}\n",
        b"\n",
    ]
    (tmp_path / "eval.json").write_text("[" * 200_000)
    log.write_bytes(good + b"".join(bad) + good)
    read = RunRecord(tmp_path)
    assert len(read.checkpoints) == 2
    first, *notes = read.notes
    assert first == "eval.json: unreadable, left out (its values are nested too deeply)"
    assert [note.split(" is left out")[0] for note in notes] == [f"metrics.jsonl, line {i}" for i in range(2, 8)]
    assert "unreadable, no 'epoch'" in notes[2] and "unreadable, its values are nested too deeply" in notes[5]
    (tmp_path / "observed.json").write_text("[" * 200_000)
    with pytest.raises(UserError, match="is not what `summit-train eval SPEC --observed` writes"):
        read_observed(tmp_path)


def test_a_repeated_step_keeps_its_last_record(write_run, run_records):
    lines = run_records()
    again = {**lines[5], "loss": 123.0}
    run = RunRecord(write_run(lines=[*lines, again]))
    assert len(run.steps) == 40 and run.steps[again["step"] - 1].loss == 123.0


def test_a_resume_replaces_what_it_does_again(write_run, run_records):
    steps = run_records()
    killed = [line for line in steps if line["step"] <= 25]
    resumed = [{**line, "loss": 7.0} for line in steps if 20 < line["step"] <= 23 and line["kind"] == "step"]
    lines = [*killed, {"kind": "start", "step": 20, "ranks": 1, "time": "later"}, *resumed]
    run = RunRecord(write_run(lines=lines))
    # Steps 24 and 25 of the killed process are no part of the weights that the run has now.
    assert run.last_step == 23 and [step.loss for step in run.steps[20:]] == [7.0] * 3
    assert [start.steps_again for start in run.starts] == [0, 5]
    assert [validation.step for validation in run.evals] == [10, 20]
    assert RunRecord(write_run("fresh", lines=[{"kind": "start", "step": 20, "ranks": 1, "time": 0}])).last_step == 20
    spent = [line["step_s"] for line in lines if line["kind"] == "step"]
    assert run.seconds == pytest.approx(sum(spent) + 2 * 0.25)


def test_skipped_steps_and_losses_that_are_no_numbers(write_run, run_records):
    lines = run_records()
    lines[3].update(loss=float("nan"), skipped=1)
    lines[4].update(loss=None, skipped=True, step_s=float("inf"))
    run = RunRecord(write_run(lines=lines))
    assert run.skipped_steps == [3, 4] and run.data_wait_share == pytest.approx(10.0)
    assert 0 < run.seconds < 60


COUNTS = ({"train": {"a": 1}}, {"train": {"a": "x"}, "val": {}}, [1], "x")


@pytest.mark.parametrize(
    ("file", "content", "note"),
    [
        *((name, "{'a: [\x00", name) for name in ("plan.json", "eval.json", "environment.json", "spec.yaml")),
        ("eval.json", '{"videos": 3, "checkpoints": []}', "eval.json: has wrong values, left out (no 'top1_mean')"),
        ("observed.json", '{"name": "run"}', "observed.json: has wrong values"),
        *(("plan.json", json.dumps({"clips_per_class": n}), "plan.json: clips_per_class: has wrong") for n in COUNTS),
    ],
)
def test_a_broken_file_is_named_and_the_rest_is_read(write_run, file, content, note):
    path = write_run()
    (path / file).write_text(content)
    run = RunRecord(path)
    assert len(run.steps) == 40 and run.clips_per_class is None and run.notes[0].startswith(note)


def test_labels_differ_and_a_run_given_twice_counts_once(write_run):
    first, other, same_name = write_run("a", name="x"), write_run("b"), write_run("c", name="x")
    runs = read_runs([first, other, same_name, first / ".." / "a"])
    assert [run.path for run in runs] == [first, other, same_name]
    assert [run.label for run in runs] == [f"x ({first})", "b", f"x ({same_name})"]


def test_what_is_no_run_is_refused_with_what_would_be_right(write_run, tmp_path):
    run = write_run("runs/mine")
    with pytest.raises(UserError, match="nowhere: no such directory"):
        RunRecord(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"spec\.yaml: not a directory"):
        RunRecord(run / "spec.yaml")
    with pytest.raises(UserError, match=f"give the runs within it: {run}"):
        RunRecord(run.parent)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"neither spec\.yaml nor metrics\.jsonl"):
        RunRecord(tmp_path / "empty")


def test_the_report_imports_no_torch():
    code = "import sys, summit_train.report.page, summit_train.cli.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
