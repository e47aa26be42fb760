"""What became of a sweep, read from run directories as runs and killed runs leave them; points over seeds by hand."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from summit_train.cluster.site import load_site
from summit_train.core.errors import UserError
from summit_train.core.run_log import EvalRecord
from summit_train.data.manifest.clip import Clip
from summit_train.evaluation.scores import Scores, prediction_names
from summit_train.report import index
from summit_train.report.goodput import goodput_values
from summit_train.report.noise import Measured
from summit_train.spec import dump_spec, spec_from_values
from summit_train.spec.checks import RESERVED_NAMES
from summit_train.sweep.figure import clip_table, write_sweep
from summit_train.sweep.grid import Sweep
from summit_train.sweep.status import COLUMNS, SweepRow, as_values, read_jobs, read_rows, sweep_points, tables, to_start
from tests.killing import another_holds
from tests.runs import records

Make = Callable[..., Sweep]


@pytest.fixture
def sweep(make_sweep: Make) -> Sweep:
    """Four runs of 1, 2, 4 and 8 virtual GPUs of 4 clips; none was begun."""
    return make_sweep("grid: {scale.gpus: [1, 2, 4, 8]}\nnodes: 2\n")


@pytest.fixture
def begin(sweep, begin_of):
    return lambda i, **options: begin_of(sweep, i, **options)


@pytest.fixture
def begin_of(write_run):
    """Writes run number i of a sweep as write_run does, with the sweep's own spec of it."""

    def one(sweep: Sweep, i: int, **options) -> Path:
        run = sweep.runs[i]
        path = write_run(str(run.spec.run_path), **options)
        (path / "spec.yaml").write_text(dump_spec(run.spec))
        return path

    return one


def states(sweep: Sweep) -> list[str]:
    return [row.state for row in read_rows(sweep)]


BEGUN = ("eval.json",)  # what a run lacks that was begun and did not end
RESTART = "2026-11-26T15:00:00+0000 job 7: exit status 1; from step 2\n"


@pytest.mark.parametrize(
    ("lacks", "files", "job", "state", "note"),
    [
        (None, {}, None, "missing", ""),
        (None, {"spec.yaml": ""}, None, "missing", ""),  # the scheduler has refused its job
        (None, {"spec.yaml": "", "started": ""}, None, "failed", ""),
        (None, {}, "queued", "queued", ""),
        (None, {}, "gone", "failed", ""),
        ((), {}, None, "done", ""),
        ((), {}, "running", "done", ""),
        ((), {}, "gone", "done", ""),
        (BEGUN, {}, None, "failed", ""),
        (BEGUN, {}, "running", "running", ""),
        (BEGUN, {}, "unknown", "unknown", ""),
        (BEGUN, {}, "gone", "failed", ""),
        (BEGUN, {"../stopped": ""}, None, "failed", "stopped on request"),
        (BEGUN, {"restarts": RESTART}, None, "failed", "1 restart"),
        (BEGUN, {"../stopped": "", "restarts": 2 * RESTART}, None, "failed", "stopped on request; 2 restarts"),
    ],
)
def test_the_state_of_a_run(sweep, begin, lacks, files, job, state, note):
    """The scheduler is believed of what is not done. files: in RUN/job."""
    run = sweep.runs[1]
    if lacks is not None:
        begin(1, leave_out=lacks)
    for name, text in files.items():
        (run.spec.run_path / "job").mkdir(parents=True, exist_ok=True)
        (run.spec.run_path / "job" / name).write_text(text)
    row = read_rows(sweep, {run.name: ("7", job)} if job else {})[1]
    assert (row.state, row.note, row.job) == (state, note, "7" if job else None)


def test_a_run_that_was_never_begun_is_known_by_its_spec(sweep):
    path = str(sweep.runs[3].spec.run_path)
    known = {"nodes": 2, "virtual_gpus": 8, "global_batch": 32, "frames_per_batch": 32 * 8, "num_classes": 4}
    assert read_rows(sweep)[3] == SweepRow("gpus-8", run=path, **known)


@pytest.mark.parametrize(
    ("squeue", "last"),
    [
        ("7 RUNNING\n", ("7", "running")),
        ("7 RUNNING\n8 PENDING\n", ("7", "running")),
        ("9 RUNNING\n", ("8", "gone")),
        (None, ("8", "unknown")),
    ],
)
def test_the_job_of_a_run_is_the_one_that_is_there_else_the_last(sweep, standins, monkeypatch, squeue, last):
    run = sweep.runs[0]
    path = run.spec.run_path / "job/submitted.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps({"id": number, "scheduler": "slurm"}) + "\n" for number in ("7", "8")))
    if squeue is None:
        monkeypatch.setenv("STANDIN_REFUSES", "no contact with slurmctld")
    else:
        (standins.folder / "squeue").write_text(squeue)
    warnings = []
    assert read_jobs(sweep, load_site("slurm_generic"), warnings.append) == {run.name: last}
    assert bool(warnings) == (squeue is None)


def test_a_run_is_done_when_the_final_evaluation_has_its_last_step(sweep, begin):
    begin(0)
    early = begin(1)
    begin(2, leave_out=BEGUN)
    # `summit-train eval` in mid-training, of an older checkpoint
    result = json.loads((early / "eval.json").read_text())
    (early / "eval.json").write_text(json.dumps(result | {"checkpoints": result["checkpoints"][:1]}))
    assert states(sweep) == ["done", "failed", "failed", "missing"]
    assert to_start(read_rows(sweep, {"gpus-8": ("9", "queued")})) == ["gpus-2", "gpus-4"]
    rows = read_rows(sweep)
    assert (rows[0].top1, rows[0].top1_std, rows[0].top5, rows[0].final) == (96.875, 0.5**0.5, 100.0, True)
    assert (rows[2].top1, rows[2].top1_std, rows[2].final) == (97, None, False)  # the last validation in training
    assert rows[0].node_hours == pytest.approx(2 * rows[0].seconds / 3600)


def test_the_training_accuracy_is_the_mean_over_the_last_epoch(sweep, begin, run_records):
    lines = run_records()
    begin(0, lines=lines)
    last = [line["top1"] for line in lines if line["kind"] == "step" and line["epoch"] == 3]
    assert len(last) == 10
    assert read_rows(sweep)[0].training_top1 == pytest.approx(sum(last) / 10)


def test_a_run_whose_directory_another_process_holds_is_running(sweep, begin):
    with another_holds(begin(0, leave_out=BEGUN) / "lock"):
        assert states(sweep)[0] == "running"
    assert states(sweep)[0] == "failed"


def test_a_run_of_another_spec_is_neither_a_result_nor_started_again(sweep, begin):
    path = begin(0)
    spec = yaml.safe_load((path / "spec.yaml").read_text())
    spec["optimizer"]["base_lr"] = 0.5
    spec["data"]["root"] = "elsewhere"  # where data lie makes no other experiment
    (path / "spec.yaml").write_text(yaml.safe_dump(spec))
    row = read_rows(sweep)[0]
    assert (row.state, row.note) == ("changed", "optimizer.base_lr was 0.5, the sweep has 0.00125")
    with pytest.raises(UserError, match=r"gpus-1: optimizer\.base_lr was 0\.5.*; give the sweep another name"):
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


def test_the_table_leaves_out_columns_without_a_value_and_top5_of_few_classes(sweep, begin):
    header = tables(sweep, read_rows(sweep)).splitlines()[0].split()
    assert header == ["run", "state", "nodes", "GPUs", "batch", "frames"]
    begin(2)
    rows = read_rows(sweep)
    lines = tables(sweep, rows).splitlines()
    assert lines[0].split("  ")[0] == "run" and "train top-1" in lines[0]
    assert "4 = 2 x 2" in lines[3] and "40 of 40" in lines[3] and "96.88 ± 0.71 %" in lines[3]
    assert "top-5" not in lines[0] and rows[2].top5 == 100.0
    assert "top-5" in tables(sweep, [dataclasses.replace(row, num_classes=6) for row in rows])
    assert "4 = 3 x 1.33" in tables(sweep, [dataclasses.replace(row, ranks=row.ranks and 3) for row in rows])


def test_csv_and_json_have_all_columns(sweep, begin):
    begin(0)
    rows = write_sweep(sweep, {})
    read = list(csv.DictReader(io.StringIO((sweep.folder / "table.csv").read_text())))
    assert [(line["name"], line["state"]) for line in read][:2] == [("gpus-1", "done"), ("gpus-2", "missing")]
    assert read[0]["top1"] == "96.875" and read[1]["top1"] == ""
    values = json.loads(json.dumps(as_values(sweep, rows)))
    assert values["states"]["done"] == 1 and values["states"]["missing"] == 3
    assert values["runs"] == [row.values() for row in rows]
    assert list(read[0]) == list(rows[0].values()) == list(COLUMNS)


def test_the_csv_has_the_measures_of_every_run(sweep, begin):
    """A run that was begun with another task has others than the sweep."""
    path = begin(1)
    spec = yaml.safe_load((path / "spec.yaml").read_text())
    (path / "spec.yaml").write_text(yaml.safe_dump(spec | {"loss": {"kind": "detection"}}))
    rows = write_sweep(sweep, {})
    header, *lines = csv.reader((sweep.folder / "table.csv").read_text().splitlines())
    assert header == list(rows[1].values()) and set(header) > set(rows[0].values())
    assert {len(line) for line in lines} == {len(header)}


SEEDS = "presets: {a: {optimizer.base_lr: 0.1}, b: {}}\ngrid: {scale.gpus: [2, 4], seed: [0, 1, 2]}\n"


def _done(rows: list[SweepRow], **values: list[Any]) -> list[SweepRow]:
    """The rows, the first of them done with these values."""
    changed = [dict(zip(values, of_row, strict=True)) for of_row in zip(*values.values(), strict=True)]
    done = [dataclasses.replace(row, state="done", **new) for row, new in zip(rows, changed, strict=False)]
    return done + rows[len(changed) :]


def test_runs_that_differ_in_their_seed_alone_are_a_point(make_sweep: Make) -> None:
    sweep = make_sweep(SEEDS)
    points = sweep_points(sweep, read_rows(sweep))
    assert [(one["curve"], one["global_batch"], one["runs"], one["done"]) for one in points] == [
        ("a", 8, 3, 0), ("a", 16, 3, 0), ("b", 8, 3, 0), ("b", 16, 3, 0),
    ]  # fmt: skip
    assert points[0]["top1"] is points[0]["top1_std"] is points[0]["noise_scale"] is None


@pytest.mark.parametrize(
    "axes",
    [
        "grid: {scale.gpus: [2], optimizer.base_lr: [0.1, 0.2]}\n",  # other curves
        "zip: {seed: [0, 1], optimizer.base_lr: [0.1, 0.2]}\n",  # another key with the seed
        "grid: {nodes: [1, 2], scale.gpus: [2, 4]}\n",
        "runs: [{seed: 1, curve: x}, {seed: 2, curve: y}]\n",
    ],
)
def test_runs_that_differ_in_anything_else_are_points_of_their_own(make_sweep: Make, axes: str) -> None:
    sweep = make_sweep(axes)
    rows = read_rows(sweep)
    assert len(sweep_points(sweep, rows)) == len(sweep.runs) and "\n\n" not in tables(sweep, rows)


def test_a_point_by_hand_and_its_table(make_sweep: Make) -> None:
    sweep = make_sweep(SEEDS)
    values: dict[str, list[Any]] = {
        "top1": [90.0, 92.0, 97.0, 50.0],
        "top1_std": [0.1, 0.2, 0.6, 1.0],
        "training_top1": [99.0, 99.0, 96.0, 60.0],
        "gradient_square": [1.0, -0.5, 2.5, 9.0],
        "gradient_variance": [100.0, 80.0, 120.0, 1.0],
        "noise_scale_error": [None, None, None, 7.0],
    }
    rows = _done(read_rows(sweep), **values)
    first, second, third, _ = sweep_points(sweep, rows)
    # (90 + 92 + 97) / 3 = 93; ((-3)^2 + (-1)^2 + 4^2) / (3 - 1) = 13
    assert (first["top1"], first["top1_std"]) == (93, pytest.approx(13**0.5))
    assert (first["training_top1"], first["training_top1_std"]) == (98, pytest.approx(3**0.5))
    assert first["checkpoints_std"] == pytest.approx(0.3)
    # The ratio of the means, 300 / 3 clips; the runs' own ratios are 100, -160 and 48. Residuals v - 100 s: 0, 130,
    # -130; mean square 1.
    assert first["noise_scale"] == Measured(3, 100, pytest.approx((2 * 130**2 / 2 / 3) ** 0.5))
    assert (second["runs"], second["done"], second["top1"], second["top1_std"]) == (3, 1, 50.0, None)
    assert second["checkpoints_std"] == 1.0
    assert second["noise_scale"] == Measured(1, pytest.approx(1 / 9), 7.0)  # of one run the error over its steps
    assert (third["done"], third["top1"], third["noise_scale"]) == (0, None, None)
    rows[0].state = "running"  # a run that is not done has no part in it
    assert (sweep_points(sweep, rows)[0]["done"], sweep_points(sweep, rows)[0]["top1"]) == (2, 94.5)

    rows = _done(read_rows(sweep), **values | {"gradient_square": [1.0] * 4, "gradient_variance": [40.0] * 4})
    of_runs, of_points = tables(sweep, rows).split("\n\n")
    assert len(of_runs.splitlines()) == 1 + 12
    header, *lines = of_points.splitlines()
    assert header.split("  ")[0] == "curve" and len(lines) == 4
    assert "3 of 3" in lines[0] and "93.00 \u00b1 3.61 %" in lines[0] and "40 \u00b1 0 clips" in lines[0]
    assert "1 of 3" in lines[1] and "50.00 %" in lines[1]
    points = json.loads(json.dumps(as_values(sweep, rows)))["points"]
    assert [point["top1"] for point in points] == [93, 50, None, None]
    assert points[0]["noise_scale"] == {"count": 3, "value": 40, "error": 0} and points[2]["noise_scale"] is None


def test_a_rows_noise_scale_is_that_of_its_measured_steps(make_sweep: Make, write_run: Any, run_records: Any) -> None:
    sweep, lines = make_sweep("grid: {scale.gpus: [2, 4]}\n"), run_records()
    steps = [line for line in lines if line["kind"] == "step"]
    for line, square in zip(steps[::10], (1.0, -1.0, 2.0, 6.0), strict=True):
        line |= {"noise_scale": 5.0, "gradient_square": square, "gradient_variance": 64.0}
    folder = write_run(str(sweep.runs[0].spec.run_path), lines=lines)
    (folder / "spec.yaml").write_text(dump_spec(sweep.runs[0].spec))
    keys = ("gradient_square", "gradient_variance", "noise_scale", "noise_scale_error")
    first, second = ([row.of(key) for key in keys] for row in read_rows(sweep))
    # Residuals 64 - 32 s: 32, 96, 0, -128
    assert first == [2, 64, 32, pytest.approx(((32**2 + 96**2 + 128**2) / 3 / 4) ** 0.5 / 2)]
    assert second == [None] * 4


def test_runs_with_several_labels_have_mean_average_precision(make_sweep, write_run):
    sweep = make_sweep("nodes: 2\nset: {loss.kind: binary}\ngrid: {scale.gpus: [1, 2]}\n")
    path = write_run(str(sweep.runs[0].spec.run_path))
    values = json.loads((path / "eval.json").read_text())
    first, last = ({key: row[key] for key in ("path", "step")} for row in values["checkpoints"])
    rows = [first | {"map": 41.0}, last | {"map": 42.0}]
    (path / "spec.yaml").write_text(dump_spec(sweep.runs[0].spec))
    (path / "eval.json").write_text(json.dumps({"map_mean": 41.5, "map_std": 0.25, "checkpoints": rows}))
    found = read_rows(sweep)
    assert [(row.state, row.map, row.map_std, row.top1) for row in found] == [
        ("done", 41.5, 0.5**0.5, None), ("missing", None, None, None)
    ]  # fmt: skip
    assert "mAP" in tables(sweep, found) and "41.50 ± 0.71 %" in tables(sweep, found)
    assert " top-1" not in tables(sweep, found).replace("train top-1", "")
    (point, other) = sweep_points(sweep, found)
    assert (point["map"], point["checkpoints_std"], other["map"]) == (41.5, 0.5**0.5, None)


def test_a_point_of_folds_has_their_mean_and_deviation_and_the_accuracy_over_all_clips(make_sweep: Make) -> None:
    """Folds of 10 and 30 clips, by hand: their means over the seeds are 85 and 65 %."""
    sweep = make_sweep("folds: folds/fold{1..2}\ngrid: {optimizer.base_lr: [0.1, 0.2], seed: [0, 1]}\n")
    done: dict[str, Any] = {"state": "done", "final": True, "top1_std": 0.0}
    found = dict(zip(("fold1", "fold2"), ((90.0, 80.0), (70.0, 60.0)), strict=True))
    rows = [
        dataclasses.replace(row, **done, top1=found[run.fold][run.spec.seed], videos=10 if run.fold == "fold1" else 30)
        for run, row in zip(sweep.runs, read_rows(sweep), strict=True)
    ]
    rows[-1].state = "failed"
    whole, part = sweep_points(sweep, rows)
    assert (whole["x"], whole["runs"], whole["folds"], whole["top1"]) == (0.1, 4, 2, 75.0)
    assert whole["top1_std"] == pytest.approx(200**0.5) and whole["top1_by_clips"] == pytest.approx(70.0)
    assert (part["x"], part["done"], part["top1"]) == (0.2, 3, 77.5) and "top1_by_clips" not in part
    _, table = tables(sweep, rows).split("\n\n")
    heading, first, second = table.splitlines()
    assert "optimizer.base_lr" in heading and heading.rstrip().endswith("top-1, by clips")
    assert "75.00 \N{PLUS-MINUS SIGN} 14.14 %" in first and first.rstrip().endswith("70.00 %") and "3 of 4" in second


def test_no_key_or_column_beside_the_measures_is_free_for_one(sweep: Sweep, begin: Any, trained_run: Path) -> None:
    """Those of the log, of eval.json, of the results' JSON, and of the tables of runs and sweeps."""
    begin(0)
    rows = read_rows(sweep)
    evaluated = json.loads((trained_run / "eval.json").read_text())
    tables = [*(row.values() for row in rows), *sweep_points(sweep, rows), index.COLUMNS, ["settings"]]
    recorded = {one.name for one in dataclasses.fields(EvalRecord)} - {"measures"}
    files = [evaluated, *evaluated["checkpoints"], *records(trained_run, "eval"), recorded]
    names = set().union(*tables, *files, goodput_values(trained_run))
    assert {name for name in names if not name.endswith(("_mean", "_std", "_last", "_best"))} <= set(RESERVED_NAMES)
    assert {"ema", "overrides", "written"} <= set(RESERVED_NAMES)  # with an average, of `eval`, of both


def _score(run: Path, labels: Sequence[int], scores: Sequence[Sequence[float]], classes: Sequence[str]) -> None:
    """Write the scores of the run's last checkpoint for the videos a.mp4, b.mp4, ..., of which the first is read."""
    checkpoints = [Path(row["path"]) for row in json.loads((run / "eval.json").read_text())["checkpoints"]]
    read = np.arange(len(labels)) == 0
    found = Scores(np.arange(len(labels)), np.array(labels), np.array(scores), read)
    clips = [Clip(f"{name}.mp4") for name in "abcd"[: len(labels)]]
    found.save(run / f"predictions/{prediction_names(checkpoints)[-1]}.npz", clips, classes)


def test_the_clips_of_all_folds_stand_in_one_table_with_the_probability_of_each_class(
    make_sweep: Make, begin_of: Callable[..., Path]
) -> None:
    sweep = make_sweep("folds: folds/fold{1..3}\n")
    for number in (0, 1):
        logits = np.log([[0.1, 0.6, 0.1, 0.2]] * 2).tolist()
        _score(begin_of(sweep, number), [number, 3], logits, ["w", "x", "y", "z"] if number else [])
    rows = read_rows(sweep)
    heading, *found = clip_table(sweep, rows)
    assert heading == ["run", "fold", "seed", "clip", "label", "predicted", "w", "x", "y", "z"]
    assert found == [
        ["fold1", "fold1", 0, "a.mp4", "w", "x", "0.100000", "0.600000", "0.100000", "0.200000"],
        ["fold1", "fold1", 0, "b.mp4", "z", *[""] * 5],
        ["fold2", "fold2", 0, "a.mp4", "x", "x", "0.100000", "0.600000", "0.100000", "0.200000"],
        ["fold2", "fold2", 0, "b.mp4", "z", *[""] * 5],
    ]
    (sweep.runs[0].spec.run_path / "predictions").rename(sweep.runs[0].spec.run_path / "gone")
    assert len(clip_table(sweep, rows)) == 3 and "has no predictions/" in rows[0].note


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        (("x", "w", "y", "z"), "must have the same classes, .*; they differ in their order"),
        (("w", "x", "y"), "has 4 classes and .* has 3; must be the same"),
    ],
)
def test_a_fold_of_other_classes_is_left_out_of_the_table_of_clips_and_named(
    names: tuple[str, ...], wrong: str, make_sweep: Make, begin_of: Callable[..., Path]
) -> None:
    """The first fold's scores have no names, which fit any of as many classes."""
    sweep = make_sweep("folds: folds/fold{1..4}\n")
    for number, classes in enumerate(((), ("w", "x", "y", "z"), names, ("w", "x", "y", "z"))):
        width = len(classes) or 4
        _score(begin_of(sweep, number), [1], np.eye(1, width, k=1).tolist(), classes)
    rows = read_rows(sweep)
    heading, *found = clip_table(sweep, rows)
    assert heading[6:] == ["w", "x", "y", "z"]
    assert [line[:6] for line in found] == [[name, name, 0, "a.mp4", "x", "x"] for name in ("fold1", "fold2", "fold4")]
    assert [bool(row.note) for row in rows] == [False, False, True, False]
    assert re.search(wrong, rows[2].note)
