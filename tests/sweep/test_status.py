"""What became of a sweep, read from run directories as runs and killed runs leave them."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from summit_train.spec import dump_spec, spec_from_values
from summit_train.spec.source import SpecError
from summit_train.sweep.grid import Reference, ReferencePoint, Sweep, load_sweep
from summit_train.sweep.points import as_values
from summit_train.sweep.status import JobState, as_csv, read_rows, table, to_start

BASE = {
    "model": {"arch": "tsm", "backbone": "resnet18", "num_classes": 4},
    "data": {"train": "train.csv", "val": "val.csv"},
    "scale": {"clips_per_gpu": 4},
    "schedule": {"epochs": 4, "warmup_epochs": 1},
}


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Four runs of 1, 2, 4 and 8 virtual GPUs of 4 clips, below tmp_path/study; none was begun."""
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE | {"run_dir": str(tmp_path)}))
    path = tmp_path / "sweep_file.yaml"
    path.write_text("name: study\nbase: base.yaml\ngrid: {scale.gpus: [1, 2, 4, 8]}\nnodes: 2\n")
    return load_sweep(path)


@pytest.fixture
def begin(sweep, write_run):
    """Writes run number i as write_run does, with the sweep's own spec of it."""

    def one(i: int, **options) -> Path:
        run = sweep.runs[i]
        path = write_run(str(run.spec.run_path), **options)
        (path / "spec.yaml").write_text(dump_spec(run.spec))
        return path

    return one


def states(sweep: Sweep, **jobs: JobState) -> list[str]:
    return [row.state for row in read_rows(sweep, {name.replace("_", "-"): job for name, job in jobs.items()})]


def test_a_run_that_was_never_begun_is_missing_and_known_by_its_spec(sweep):
    row = read_rows(sweep)[3]
    assert (row.state, row.name, row.nodes, row.virtual_gpus, row.global_batch) == ("missing", "gpus-8", 2, 8, 32)
    assert row.frames_per_batch == 32 * 8
    assert (row.ranks, row.top1, row.training_top1, row.seconds, row.final) == (None, None, None, None, False)


def test_a_run_is_done_when_the_final_evaluation_has_its_last_step(sweep, begin):
    done, early, whole = begin(0), begin(1), begin(2, leave_out=("eval.json",))
    # `summit-train eval` in mid-training, of an older checkpoint
    result = json.loads((early / "eval.json").read_text())
    (early / "eval.json").write_text(json.dumps(result | {"checkpoints": result["checkpoints"][:1]}))
    assert states(sweep) == ["done", "failed", "failed", "missing"]
    rows = read_rows(sweep)
    assert (rows[0].top1, rows[0].top1_std, rows[0].top5, rows[0].final) == (96.875, 0.5, 100.0, True)
    assert (rows[2].top1, rows[2].top1_std, rows[2].final) == (97.0, None, False)  # the last validation in training
    assert rows[0].node_hours == pytest.approx(2 * rows[0].seconds / 3600)
    assert {done.name, whole.name} == {"gpus-1", "gpus-4"}


def test_the_training_accuracy_is_the_mean_over_the_last_epoch(sweep, begin, run_records):
    lines = run_records()
    begin(0, lines=lines)
    last = [line["top1"] for line in lines if line["kind"] == "step" and line["epoch"] == 3]
    assert len(last) == 10
    assert read_rows(sweep)[0].training_top1 == pytest.approx(sum(last) / 10)


def test_a_run_that_failed_before_it_wrote_anything_is_no_missing_one(sweep):
    folder = sweep.runs[1].spec.run_path / "job"
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_text(dump_spec(sweep.runs[1].spec))
    assert states(sweep) == ["missing", "failed", "missing", "missing"]


def test_the_scheduler_is_believed_of_what_is_not_done(sweep, begin):
    begin(0)
    begin(1, leave_out=("eval.json",))
    jobs = {"gpus_1": JobState("7_1", "running"), "gpus_2": JobState("7_2", "running")}
    jobs |= {"gpus_4": JobState("7_3", "queued"), "gpus_8": JobState("7_4", "unknown")}
    assert states(sweep, **jobs) == ["done", "running", "queued", "unknown"]
    gone = {name: JobState(job.id, "gone") for name, job in jobs.items()}
    assert states(sweep, **gone) == ["done", "failed", "failed", "failed"]


def test_a_run_whose_directory_somebody_holds_is_running(sweep, begin):
    path = begin(0, leave_out=("eval.json",))
    program = (
        "import sys, pathlib\nfrom summit_train.core.files import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()\n"
    )
    root = Path(__file__).resolve().parents[2]
    words = [sys.executable, "-c", program, str(path / "lock")]
    with subprocess.Popen(words, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        assert states(sweep)[0] == "running"
        holder.kill()
    assert states(sweep)[0] == "failed"


def test_only_failed_and_missing_runs_are_started(sweep, begin):
    begin(0)
    begin(1, leave_out=("eval.json",))
    rows = read_rows(sweep, {"gpus-8": JobState("9", "queued")})
    assert to_start(rows) == ["gpus-2", "gpus-4"]


def test_a_run_of_another_spec_is_neither_a_result_nor_started_again(sweep, begin):
    path = begin(0)
    spec = yaml.safe_load((path / "spec.yaml").read_text())
    spec["optimizer"]["base_lr"] = 0.5
    spec["data"]["root"] = "elsewhere"  # where data lie makes no other experiment
    (path / "spec.yaml").write_text(yaml.safe_dump(spec))
    row = read_rows(sweep)[0]
    assert (row.state, row.note) == ("changed", "optimizer.base_lr was 0.5, the sweep has 0.00125")
    with pytest.raises(SpecError, match=r"gpus-1: optimizer\.base_lr was 0\.5.*; give the sweep another name"):
        to_start(read_rows(sweep))


def test_a_run_without_the_sweeps_growing_batch_is_changed(sweep, begin):
    path = begin(0)
    averaging = {"method": "averaging", "grow_batch": {"factor": 2}}
    with_growth = sweep.runs[0].spec.model_dump(mode="json") | {"parallel": averaging}
    run = dataclasses.replace(sweep.runs[0], spec=spec_from_values(with_growth, "here"))
    note = read_rows(dataclasses.replace(sweep, runs=(run,)))[0].note
    assert "parallel.grow_batch was None, the sweep has {'factor': 2" in note
    (path / "spec.yaml").write_text(yaml.safe_dump(with_growth))
    assert "parallel.grow_batch was {'factor': 2" in read_rows(sweep)[0].note


def test_a_stop_on_request_is_told(sweep, begin):
    (begin(0, leave_out=("eval.json",)) / "stopped").write_text("")
    assert (read_rows(sweep)[0].state, read_rows(sweep)[0].note) == ("failed", "stopped on request")


def test_published_figures_stand_beside_the_batch_that_they_are_of(sweep):
    points = (ReferencePoint(global_batch=16, top1=70.0, top1_std=0.5), ReferencePoint(global_batch=9, top1=1.0))
    with_points = dataclasses.replace(sweep, reference=Reference(label="X", points=points))
    rows = read_rows(with_points)
    assert [(row.reference_top1, row.reference_top1_std) for row in rows] == [
        (None, None), (None, None), (70.0, 0.5), (None, None),
    ]  # fmt: skip


def test_the_table_leaves_out_what_nobody_knows(sweep, begin):
    header = table(read_rows(sweep)).splitlines()[0].split()
    assert header == ["run", "state", "nodes", "GPUs", "batch", "frames"]
    begin(2)
    lines = table(read_rows(sweep)).splitlines()
    assert lines[0].split("  ")[0] == "run" and "train top-1" in lines[0] and "published" not in lines[0]
    assert "40 of 40" in lines[3] and "96.88 ± 0.50 %" in lines[3]


def test_top5_is_in_the_table_of_more_than_five_classes_alone(sweep, begin):
    begin(2)
    rows = read_rows(sweep)
    assert "top-5" not in table(rows) and rows[2].top5 == 100.0
    assert "top-5" in table([dataclasses.replace(row, num_classes=6) for row in rows])


def test_csv_and_json_have_all_columns(sweep, begin):
    begin(0)
    rows = read_rows(sweep)
    read = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert [(line["name"], line["state"]) for line in read][:2] == [("gpus-1", "done"), ("gpus-2", "missing")]
    assert read[0]["top1"] == "96.875" and read[1]["top1"] == ""
    values = json.loads(json.dumps(as_values(sweep, rows)))
    assert values["states"]["done"] == 1 and values["states"]["missing"] == 3
    assert values["runs"][0] == {field: getattr(rows[0], field) for field in read[0]}
