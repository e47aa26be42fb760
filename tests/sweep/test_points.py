"""Runs that differ in their seed alone become points; mean, deviation and noise scale by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from summit_train.report.noise import Measured
from summit_train.spec import dump_spec
from summit_train.sweep.grid import Sweep, load_sweep
from summit_train.sweep.points import as_values, clear_noise, has_seeds, sweep_points, tables
from summit_train.sweep.status import SweepRow, read_rows

SEEDS = "presets: {a: {optimizer.base_lr: 0.1}, b: {}}\ngrid: {scale.gpus: [2, 4], seed: [0, 1, 2]}\n"

Make = Callable[[str], Sweep]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def one(axes: str) -> Sweep:
        base = {
            "model": {"arch": "tsm", "num_classes": 4},
            "data": {"train": "a", "val": "b"},
            "run_dir": str(tmp_path),
        }
        base |= {"scale": {"clips_per_gpu": 4}, "schedule": {"epochs": 4, "warmup_epochs": 1}}
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
        (tmp_path / "sweep_file.yaml").write_text(f"name: study\nbase: base.yaml\n{axes}")
        return load_sweep(tmp_path / "sweep_file.yaml")

    return one


def _done(rows: list[SweepRow], **values: list[Any]) -> list[SweepRow]:
    """The rows, the first of them done with these values."""
    changed = [dict(zip(values, of_row, strict=True)) for of_row in zip(*values.values(), strict=True)]
    done = [dataclasses.replace(row, state="done", **new) for row, new in zip(rows, changed, strict=False)]
    return [*done, *rows[len(done) :]]


def test_runs_that_differ_in_their_seed_alone_are_a_point(make: Make) -> None:
    sweep = make(SEEDS)
    points = sweep_points(sweep, read_rows(sweep))
    assert [(point.curve, point.global_batch, point.runs, point.done) for point in points] == [
        ("a", 8, 3, 0), ("a", 16, 3, 0), ("b", 8, 3, 0), ("b", 16, 3, 0),
    ]  # fmt: skip
    assert has_seeds(points) and points[0].top1 is points[0].top1_std is points[0].noise_scale is None


@pytest.mark.parametrize(
    "axes",
    [
        "grid: {scale.gpus: [2], optimizer.base_lr: [0.1, 0.2]}\n",  # other curves
        "zip: {seed: [0, 1], optimizer.base_lr: [0.1, 0.2]}\n",  # another key with the seed
        "grid: {nodes: [1, 2], scale.gpus: [2, 4]}\n",
        "runs: [{seed: 1, curve: x}, {seed: 2, curve: y}]\n",
    ],
)
def test_runs_that_differ_in_anything_else_are_points_of_their_own(make: Make, axes: str) -> None:
    sweep = make(axes)
    points = sweep_points(sweep, read_rows(sweep))
    assert len(points) == len(sweep.runs) and not has_seeds(points)


def test_a_points_values_are_mean_and_deviation_over_the_runs_that_are_done(make: Make) -> None:
    sweep = make(SEEDS)
    values = {
        "top1": [90.0, 92.0, 97.0, 50.0],
        "top1_std": [0.1, 0.2, 0.6, 1.0],
        "training_top1": [99.0, 99.0, 96.0, 60.0],
    }
    first, second, third, _ = sweep_points(sweep, _done(read_rows(sweep), **values))
    # (90 + 92 + 97) / 3 = 93; ((-3)^2 + (-1)^2 + 4^2) / (3 - 1) = 13
    assert (first.top1, first.top1_std) == (93, pytest.approx(13**0.5))
    assert (first.training_top1, first.training_top1_std) == (98, pytest.approx(3**0.5))
    assert first.checkpoints_std == pytest.approx(0.3)
    assert (second.runs, second.done, second.top1, second.top1_std, second.checkpoints_std) == (3, 1, 50.0, None, 1.0)
    assert (third.done, third.top1) == (0, None)


def _measured(rows: list[SweepRow], squares: list[float | None], variances: list[float | None]) -> list[SweepRow]:
    return _done(rows, gradient_square=squares, gradient_variance=variances)


def test_the_noise_scale_of_a_point_is_the_ratio_of_the_means_over_its_runs(make: Make) -> None:
    sweep = make(SEEDS)
    rows = _measured(read_rows(sweep), [1.0, -0.5, 2.5, 9.0], [100.0, 80.0, 120.0, 1.0])
    first, second, third, _ = sweep_points(sweep, rows)
    # 300 / 3 clips. The runs' own ratios are 100, -160 and 48. Residuals v - 100 s: 0, 130, -130; mean square 1.
    assert first.noise_scale is not None and (first.noise_scale.count, first.noise_scale.value) == (3, 100)
    assert first.noise_scale.error == pytest.approx((2 * 130**2 / 2 / 3) ** 0.5)
    assert second.noise_scale == Measured(1, pytest.approx(1 / 9), None)
    assert third.noise_scale is None
    assert clear_noise([second, first]) == (8, first.noise_scale)


def test_where_it_is_unclear_the_next_batch_counts(make: Make) -> None:
    sweep = make(SEEDS)
    rows = read_rows(sweep)
    points = sweep_points(sweep, _measured(rows, [1.0, -2.0, 0.5, 4.0], [9.0, 9.0, 9.0, 24.0]))
    assert points[0].noise_scale == Measured(3, None, None)
    assert clear_noise(points) == (16, Measured(1, 6, None))
    larger, smaller = (dataclasses.replace(points[0], noise_scale=Measured(3, 6, error)) for error in (6.0, 5.9))
    assert clear_noise([larger, points[1]]) == (16, Measured(1, 6, None))
    assert clear_noise([smaller, points[1]]) == (8, Measured(3, 6, 5.9))
    assert clear_noise(points[:1]) is clear_noise(points[2:]) is clear_noise([]) is None


def test_a_run_that_is_not_done_has_no_part_in_it(make: Make) -> None:
    sweep = make(SEEDS)
    rows = _measured(read_rows(sweep), [1.0, 3.0, None], [50.0, 900.0, None])
    rows[:2] = [dataclasses.replace(rows[0], noise_scale_error=7.0), dataclasses.replace(rows[1], state="running")]
    assert sweep_points(sweep, rows)[0].noise_scale == Measured(1, 50, 7.0)  # of one run the error over its steps


def test_a_rows_noise_scale_is_that_of_its_measured_steps(make: Make, write_run: Any, run_records: Any) -> None:
    sweep, lines = make("grid: {scale.gpus: [2, 4]}\n"), run_records()
    steps = [line for line in lines if line["kind"] == "step"]
    for line, square in zip(steps[::10], (1.0, -1.0, 2.0, 6.0), strict=True):
        line |= {"noise_scale": 5.0, "gradient_square": square, "gradient_variance": 64.0}
    folder = write_run(str(sweep.runs[0].spec.run_path), lines=lines)
    (folder / "spec.yaml").write_text(dump_spec(sweep.runs[0].spec))
    first, second = read_rows(sweep)
    assert (first.gradient_square, first.gradient_variance, first.noise_scale) == (2, 64, 32)
    # Residuals 64 - 32 s: 32, 96, 0, -128
    assert first.noise_scale_error == pytest.approx(((32**2 + 96**2 + 128**2) / 3 / 4) ** 0.5 / 2)
    assert (second.gradient_square, second.gradient_variance, second.noise_scale) == (None, None, None)


def test_the_points_have_a_table_below_that_of_the_runs_and_a_place_in_the_json(make: Make) -> None:
    sweep = make(SEEDS)
    rows = _measured(_done(read_rows(sweep), top1=[90.0, 92.0, 97.0, 50.0]), [1.0] * 3, [40.0] * 3)
    of_runs, of_points = tables(sweep, rows).split("\n\n")
    assert len(of_runs.splitlines()) == 1 + 12
    header, *lines = of_points.splitlines()
    assert header.split("  ")[0] == "curve" and len(lines) == 4
    assert "3 of 3" in lines[0] and "93.00 ± 3.61 %" in lines[0] and "40 ± 0 clips" in lines[0]
    assert "1 of 3" in lines[1] and "50.00 %" in lines[1]
    values = json.loads(json.dumps(as_values(sweep, rows)))
    assert [point["top1"] for point in values["points"]] == [93, 50, None, None]
    assert values["points"][0]["noise_scale"] == {"count": 3, "value": 40, "error": 0}


def test_without_seeds_there_is_one_table(make: Make) -> None:
    sweep = make("grid: {scale.gpus: [2, 4]}\n")
    assert "\n\n" not in tables(sweep, read_rows(sweep))
