"""Runs for other programs: by hand for CSV; read by MLflow's own client, and from W&B's own files, where these are."""

from __future__ import annotations

import csv
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from summit_train.core.errors import UserError
from summit_train.report.records import RunRecord
from summit_train.report.sinks import history, write_csv, write_mlflow, write_wandb

LINES = [
    {"kind": "start", "step": 0, "ranks": 2, "time": 100.0},
    {"kind": "step", "step": 1, "epoch": 0, "loss": 2.0, "lr": 0.1, "time": 101.5},
    {"kind": "step", "step": 2, "epoch": 0, "loss": 9.0, "lr": 0.2, "time": 102.5},
    {"kind": "start", "step": 1, "ranks": 2, "time": 200.0},
    {"kind": "step", "step": 2, "epoch": 0, "loss": None, "lr": 0.2, "skipped": True, "time": 201.0},
    {"kind": "eval", "epoch": 1, "step": 2, "top1": 50.0, "top5": None, "time": 202.0},
]
FINAL = {"final/top1_mean": 96.875, "final/top1_std": 0.5**0.5, "final/top5_mean": 100.0, "final/top5_std": 0.0}
FINAL |= {"final/videos": 64.0, "final/clips": 10.0, "final/crops": 1.0}
ROWS = [
    {"step": 1, "time": 101.5, "step/epoch": 0.0, "step/loss": 2.0, "step/lr": 0.1},
    {"step": 2, "time": 201.0, "step/epoch": 0.0, "step/lr": 0.2, "eval/epoch": 1.0, "eval/top1": 50.0, **FINAL},
]


@pytest.fixture
def run(write_run) -> Path:
    return write_run("group/a b", name="tiny", lines=LINES)


def test_the_history_by_hand_takes_back_what_a_resume_repeats(run, write_run):
    assert history(RunRecord(run)) == ROWS
    only_final = RunRecord(write_run("final", leave_out=("metrics.jsonl",)))
    assert history(only_final) == [{"step": 0, "time": 0.0, **FINAL}]
    assert history(RunRecord(write_run("none", leave_out=("metrics.jsonl", "eval.json")))) == []


def test_records_without_a_time_have_that_of_their_file(write_run):
    lines = [{key: value for key, value in line.items() if key != "time"} for line in LINES]
    run = RunRecord(write_run(lines=lines))
    assert {row["time"] for row in history(run)} == {(run.path / "metrics.jsonl").stat().st_mtime}


def test_a_csv_for_each_run_has_a_row_for_each_step(run, write_run, tmp_path):
    other = write_run("other/a b", leave_out=("metrics.jsonl", "eval.json"))
    (path,) = map(Path, write_csv([RunRecord(run)], tmp_path / "csv"))
    assert path == tmp_path / "csv/a b.csv"
    first, second = csv.DictReader(path.open(newline=""))
    assert first["step/loss"] == "2.0" and first["eval/top1"] == "" and second["step/loss"] == ""
    assert (second["step"], second["time"], second["final/top1_mean"]) == ("2", "201.0", "96.875")
    paths = write_csv([RunRecord(run), RunRecord(other)], tmp_path / "csv")
    assert len(set(paths)) == 2 and all(Path(path).name.startswith("a b_") for path in paths)


def test_a_missing_package_is_named(run, tmp_path, monkeypatch):
    for write, package in ((write_mlflow, "mlflow"), (write_wandb, "wandb")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UserError, match=rf"--to {package} needs .*: pip install 'summit_train\[trackers\]'"):
            write([RunRecord(run)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_mlflow_reads_the_run_and_replaces_it_the_next_time(run, tmp_path):
    pytest.importorskip("mlflow", reason="needs mlflow: pip install mlflow")
    pytest.importorskip("sqlalchemy", reason="needs sqlalchemy: pip install mlflow")
    from mlflow.tracking import MlflowClient

    for _ in range(2):
        (uri,) = write_mlflow([RunRecord(run)], tmp_path / "out")
    client = MlflowClient(uri, uri)
    experiment = client.get_experiment_by_name("group")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("tiny", "FINISHED")
    assert (found.info.start_time, found.info.end_time) == (101_500, 201_000)
    assert found.data.params["model.num_classes"] == "12" and found.data.params["model.arch"] == "tsm"
    recorded = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    points = {name: [(one.step, one.timestamp, one.value) for one in points] for name, points in recorded.items()}
    assert points["step/loss"] == [(1, 101_500, 2.0)]
    assert points["step/lr"] == [(1, 101_500, 0.1), (2, 201_000, 0.2)] and points["eval/top1"] == [(2, 201_000, 50.0)]
    assert set(points) == {name for row in ROWS for name in row} - {"step", "time"}


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file: LevelDB's log of blocks of 32 KiB, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def test_wandb_writes_an_offline_run(run, tmp_path):
    pytest.importorskip("wandb", reason="needs wandb: pip install wandb")
    (folder,) = map(Path, write_wandb([RunRecord(run)], tmp_path / "out"))
    assert folder.parent == tmp_path / "out/wandb" and folder.name.startswith("offline-run-")
    (path,) = folder.glob("*.wandb")
    records = list(wandb_records(path))
    (started,) = (record.run for record in records if record.HasField("run"))
    assert (started.project, started.display_name) == ("group", "tiny")
    assert {item.key: json.loads(item.value_json) for item in started.config.update}["model.num_classes"] == 12
    rows = []
    for record in records:
        if record.HasField("history"):
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            row |= {"step": row.pop("_step"), "time": row.pop("_timestamp")}
            rows.append({name: value for name, value in row.items() if name != "_runtime"})
    assert rows == ROWS
