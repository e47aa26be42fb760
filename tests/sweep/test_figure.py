"""The figure of a sweep, and what is written into its folder."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

from summit_train.sweep.figure import draw_accuracy, write_sweep
from summit_train.sweep.grid import Reference, ReferencePoint, Sweep, load_sweep
from summit_train.sweep.status import SweepRow, read_rows


def _sweep(folder: Path, axes: str) -> Sweep:
    base = {"model": {"arch": "tsm", "num_classes": 4}, "data": {"train": "a", "val": "b"}, "run_dir": str(folder)}
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    (folder / "sweep_file.yaml").write_text(f"name: study\nbase: base.yaml\n{axes}")
    return load_sweep(folder / "sweep_file.yaml")


def _done(rows: list[SweepRow], *, drop: float = 1.0) -> list[SweepRow]:
    done = {"state": "done", "top1_std": 0.5, "final": True}
    return [
        dataclasses.replace(row, **done, top1=90 - drop * i, training_top1=95 - drop * i) for i, row in enumerate(rows)
    ]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return _sweep(tmp_path, "grid: {scale.gpus: [1, 2, 4]}\n")


def test_it_is_drawn_as_png_and_svg_and_the_same_rows_give_the_same_bytes(sweep: Sweep) -> None:
    rows = _done(read_rows(sweep))
    drawn = draw_accuracy(sweep, rows)
    assert set(drawn) == {"accuracy.png", "accuracy.svg"}
    assert drawn["accuracy.png"].startswith(b"\x89PNG") and b"<svg" in drawn["accuracy.svg"]
    assert draw_accuracy(sweep, rows) == drawn


def test_other_accuracies_curves_and_published_figures_change_it(sweep: Sweep, tmp_path: Path) -> None:
    rows = _done(read_rows(sweep))
    reference = Reference(label="$x_1$ _y", points=(ReferencePoint(global_batch=8, top1=50.0),))
    two = _sweep(tmp_path, "grid: {model.arch: [tsm, tsn], scale.gpus: [1, 2, 4]}\n")
    pictures = [
        draw_accuracy(sweep, rows),
        draw_accuracy(sweep, _done(read_rows(sweep), drop=2.0)),
        draw_accuracy(sweep, [*rows[:2], dataclasses.replace(rows[2], state="running")]),
        draw_accuracy(dataclasses.replace(sweep, reference=reference), rows),
        draw_accuracy(two, _done(read_rows(two))),
    ]
    assert len({picture["accuracy.png"] for picture in pictures}) == len(pictures)


@pytest.mark.parametrize("axes", ["grid: {scale.gpus: [1, 2]}\n", "set: {scale.gpus: 2}\ngrid: {seed: [1, 2]}\n"])
def test_without_two_batches_or_a_run_that_is_done_there_is_none(tmp_path: Path, axes: str) -> None:
    sweep = _sweep(tmp_path, axes)
    rows = read_rows(sweep)
    assert draw_accuracy(sweep, _done(rows) if "seed" in axes else rows) == {}


def test_all_is_written_into_the_sweeps_folder(sweep: Sweep, write_run) -> None:
    for run in sweep.runs[:2]:
        folder = write_run(str(run.spec.run_path), leave_out=("spec.yaml",))
        plan = json.loads((folder / "plan.json").read_text()) | {"global_batch": 8 * (run.spec.scale.gpus or 0)}
        (folder / "plan.json").write_text(json.dumps(plan))
    rows = write_sweep(sweep, {})
    assert [row.state for row in rows] == ["done", "done", "missing"]
    files = {path.name for path in sweep.folder.iterdir() if path.is_file()}
    assert files == {"table.txt", "table.csv", "table.json", "accuracy.png", "accuracy.svg", "lock"}
    assert re.search(r"^gpus-2 +done ", (sweep.folder / "table.txt").read_text(), re.M)
    assert json.loads((sweep.folder / "table.json").read_text())["states"]["done"] == 2
