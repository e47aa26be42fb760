"""The states of a sweep's runs, as runs, killed runs and schedulers leave them; classes of folds; the figure."""

from __future__ import annotations

import csv
import dataclasses
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
from summit_train.sweep.figure import clear_noise, clip_table, draw_accuracy, read_folds, write_sweep
from summit_train.sweep.grid import Sweep
from summit_train.sweep.status import Point, read_jobs, read_rows, sweep_points, to_start
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


def change_spec(run: Path, **sections: dict[str, Any]) -> None:
    spec = yaml.safe_load((run / "spec.yaml").read_text())
    for section, values in sections.items():
        spec[section] |= values
    (run / "spec.yaml").write_text(yaml.safe_dump(spec))


def states(sweep: Sweep) -> list[str]:
    return [row["state"] for row in read_rows(sweep)]


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
    assert (row["state"], row["note"], row["job"]) == (state, note, "7" if job else None)


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


def test_a_run_whose_directory_another_process_holds_is_running(sweep, begin):
    with another_holds(begin(0, leave_out=BEGUN) / "lock"):
        assert states(sweep)[0] == "running"
    assert states(sweep)[0] == "failed"


def test_a_run_of_another_spec_is_neither_a_result_nor_started_again(sweep, begin):
    change_spec(begin(0), optimizer={"base_lr": 0.5}, data={"root": "elsewhere"})  # the same data in another folder
    row = read_rows(sweep)[0]
    assert (row["state"], row["note"]) == ("changed", "optimizer.base_lr was 0.5, the sweep has 0.00125")
    with pytest.raises(UserError, match=r"gpus-1: optimizer\.base_lr was 0\.5.*; give the sweep another name"):
        to_start(read_rows(sweep))


def test_a_run_without_the_sweeps_growing_batch_is_changed(sweep, begin):
    path = begin(0)
    averaging = {"method": "averaging", "grow_batch": {"factor": 2}}
    with_growth = sweep.runs[0].spec.model_dump(mode="json") | {"parallel": averaging}
    run = dataclasses.replace(sweep.runs[0], spec=spec_from_values(with_growth, "here"))
    note = read_rows(dataclasses.replace(sweep, runs=(run,)))[0]["note"]
    assert "parallel.grow_batch was None, the sweep has {'factor': 2" in note
    (path / "spec.yaml").write_text(yaml.safe_dump(with_growth))
    assert "parallel.grow_batch was {'factor': 2" in read_rows(sweep)[0]["note"]


def test_the_csv_has_the_measures_of_every_run(sweep, begin):
    """A run that was begun with another task has others than the sweep."""
    change_spec(begin(1), loss={"kind": "detection"})
    rows = write_sweep(sweep, {})
    header, *lines = csv.reader((sweep.folder / "table.csv").read_text().splitlines())
    assert header == list(rows[1]) and set(header) > set(rows[0])
    assert {len(line) for line in lines} == {len(header)}


def test_no_key_or_column_beside_the_measures_is_free_for_one(sweep: Sweep, begin: Any, trained_run: Path) -> None:
    """Those of the log, of eval.json, of the results' JSON, and of the tables of runs and sweeps."""
    begin(0)
    rows = read_rows(sweep)
    evaluated = json.loads((trained_run / "eval.json").read_text())
    tables = [*rows, *sweep_points(sweep, rows), index.COLUMNS, ["settings"]]
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
    heading, *found = clip_table(sweep, read_folds(rows))
    assert heading[6:] == ["w", "x", "y", "z"]
    assert [line[:6] for line in found] == [[name, name, 0, "a.mp4", "x", "x"] for name in ("fold1", "fold2", "fold4")]
    assert [bool(row["note"]) for row in rows] == [False, False, True, False]
    assert re.search(wrong, rows[2]["note"])


def test_the_figure_is_a_png_and_an_svg_of_the_same_bytes_every_time(sweep, begin):
    assert draw_accuracy(sweep, read_rows(sweep)) is None  # no run is done
    for number in (0, 1):
        begin(number, files={"plan.json": {"global_batch": 4 * 2**number}})
    written = []
    for _ in range(2):
        write_sweep(sweep, {})
        written.append([(sweep.folder / f"accuracy.{kind}").read_bytes() for kind in ("png", "svg")])
    assert written[0][0].startswith(b"\x89PNG") and b"<!-- validation -->" in written[0][1]
    assert written[0] == written[1]


def test_where_the_noise_scale_is_unclear_the_next_batch_counts() -> None:
    def curve(*noise: Measured | None) -> list[Point]:
        return [{"global_batch": 8 * (i + 1), "noise_scale": one} for i, one in enumerate(noise)]

    clear, alone, equal, unclear = (Measured(3, value, 6.0) for value in (6.1, 6.2, 6.0, None))
    assert clear_noise(curve(clear, alone)) == (8, clear)
    for noise in (equal, unclear, None):
        assert clear_noise(curve(noise, alone)) == (16, alone)
        assert clear_noise(curve(noise)) is None
    assert clear_noise(curve(Measured(1, 0.5, None))) == (8, Measured(1, 0.5, None))


@pytest.mark.parametrize(("baselines", "mean"), [((40.0, 60.0), 50.0), ((40.0, None), None)])
def test_a_baseline_of_some_folds_is_not_beside_the_accuracy_of_all(
    make_sweep: Make, begin_of: Any, baselines: Sequence[float | None], mean: float | None
) -> None:
    folds = make_sweep("folds: f{1..2}\n")
    for i, top1 in enumerate(baselines):
        values = {"top1": top1, "top1_interval": [0, 100], "features": 8, "videos": 64, "weights": "w.pth"}
        begin_of(folds, i, files={} if top1 is None else {"baseline/baseline.json": values})
    (point,) = sweep_points(folds, read_rows(folds))
    assert (point["done"], point["baseline"]) == (2, mean) and point["top1"] is not None
