"""The figure of a sweep, and what is written into its folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
from matplotlib.axes import Axes

from summit_train.report.noise import Measured
from summit_train.sweep.figure import clear_noise, draw_accuracy, write_sweep, written
from summit_train.sweep.grid import Sweep
from summit_train.sweep.status import Point, SweepRow, read_rows

Make = Callable[..., Sweep]


def _done(rows: list[SweepRow], *, drop: float = 1.0) -> list[SweepRow]:
    """The rows, done: 90 %, 89 %, ..."""
    values = ((90 - drop * i, 95 - drop * i) for i in range(len(rows)))
    done = partial(replace, state="done", top1_std=0.5, final=True)
    return [done(row, top1=top1, training_top1=training) for row, (top1, training) in zip(rows, values, strict=True)]


def _measured(rows: Sequence[SweepRow], squares: Sequence[float]) -> list[SweepRow]:
    pairs = zip(rows, squares, strict=True)
    return [replace(row, gradient_square=square, gradient_variance=80.0) for row, square in pairs]


@pytest.fixture
def sweep(make_sweep: Make) -> Sweep:
    return make_sweep("grid: {scale.gpus: [1, 2, 4]}\n", clips=8)


def test_it_is_drawn_as_png_and_svg_and_the_same_rows_give_the_same_bytes(sweep: Sweep) -> None:
    rows = _done(read_rows(sweep))
    drawn = draw_accuracy(sweep, rows)
    assert set(drawn) == {"accuracy.png", "accuracy.svg"}
    assert drawn["accuracy.png"].startswith(b"\x89PNG") and b"<!-- validation -->" in drawn["accuracy.svg"]
    assert draw_accuracy(sweep, rows) == drawn


def test_without_two_batches_or_a_run_that_is_done_there_is_none(sweep: Sweep, make_sweep: Make) -> None:
    assert draw_accuracy(sweep, read_rows(sweep)) == {}
    seeds = make_sweep("set: {scale.gpus: 2}\ngrid: {seed: [1, 2]}\n")
    assert draw_accuracy(seeds, _done(read_rows(seeds))) == {}


def test_all_is_written_into_the_sweeps_folder(sweep: Sweep, write_run) -> None:
    for run in sweep.runs[:2]:
        folder = write_run(str(run.spec.run_path), leave_out=("spec.yaml",))
        plan = json.loads((folder / "plan.json").read_text()) | {"global_batch": 8 * (run.spec.scale.gpus or 0)}
        (folder / "plan.json").write_text(json.dumps(plan))
    rows = write_sweep(sweep, {})
    assert [row.state for row in rows] == ["done", "done", "missing"]
    files = {path.name for path in sweep.folder.iterdir() if path.is_file()}
    assert files == {"table.txt", "table.csv", "table.json", "accuracy.png", "accuracy.svg", "lock"}
    assert written(sweep) == "accuracy.png, accuracy.svg, table.csv, table.json, table.txt"
    assert re.search(r"^gpus-2 +done ", (sweep.folder / "table.txt").read_text(), re.M)
    assert json.loads((sweep.folder / "table.json").read_text())["states"]["done"] == 2


@pytest.fixture
def calls() -> Iterator[dict[str, mock.Mock]]:
    """What is drawn: the calls of the axes' methods, which draw as ever."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(mock.patch.object(Axes, name, autospec=True, side_effect=getattr(Axes, name)))
            for name in ("errorbar", "axvline", "axvspan", "annotate", "set_xscale")
        }


def _curves(calls: dict[str, mock.Mock]) -> dict[str, list[list[float]]]:
    """Label -> batches, accuracies and bars of every curve."""
    drawn = calls["errorbar"].call_args_list
    return {call.kwargs["label"]: [list(values) for values in call.args[1:]] for call in drawn}


def test_a_curve_is_the_mean_over_the_seeds_with_their_deviation(make_sweep: Make, calls) -> None:
    presets = "presets: {a: {}, b: {loss.label_smoothing: 0.1}}\n"
    sweep = make_sweep(f"{presets}grid: {{scale.gpus: [4, 2], seed: [0, 1]}}\n", clips=8)
    rows = _done(read_rows(sweep))  # 90, 89, ...: each pair differs by 1
    squares = [2.0] * 4 + [2.0, 2.0, -9.0, 1.0]  # of the last curve the noise scale is unclear at 16 clips
    rows = _measured(rows, squares)
    draw_accuracy(sweep, [*rows[:-1], replace(rows[-1], state="failed")])
    half = pytest.approx(0.5**0.5)
    assert _curves(calls) == {
        "validation, a": [[16, 32], [87.5, 89.5], [half, half]],
        "validation, b": [[16, 32], [84, 85.5], [pytest.approx(float("nan"), nan_ok=True), half]],
    }
    lines = [(call.args[1], call.kwargs["label"]) for call in calls["axvline"].call_args_list]
    assert lines == [(40, "noise scale, a: 40 ± 0 clips"), (40, "noise scale, b: 40 ± 0 clips")]
    caption = calls["annotate"].call_args.args[1].splitlines()
    missing = "1 of 8 runs are not done and not shown."
    assert caption[0] == f"Mean and standard deviation (n - 1) over 1 to 2 seeds. {missing}"
    assert caption[1].startswith("Noise scale measured at 16, 32 clips: below it larger batches save steps")


def test_without_seeds_the_bars_are_of_checkpoints_and_training_is_drawn(sweep: Sweep, calls) -> None:
    draw_accuracy(sweep, _done(read_rows(sweep)))
    assert _curves(calls) == {
        "validation": [[8, 16, 32], [90, 89, 88], [0.5, 0.5, 0.5]],
        "training, last epoch": [[8, 16, 32], [95, 94, 93]],
    }
    assert not calls["axvline"].called and "last checkpoints" in calls["annotate"].call_args.args[1]


def test_one_checkpoint_has_no_bar(sweep: Sweep, calls) -> None:
    rows = [replace(row, top1_std=None) for row in _done(read_rows(sweep))]
    draw_accuracy(sweep, rows)
    assert np.isnan(_curves(calls)["validation"][2]).tolist() == [True] * 3


def test_the_noise_scales_band_is_its_standard_error(make_sweep: Make, calls) -> None:
    seeds = make_sweep("grid: {scale.gpus: [2, 4], seed: [0, 1]}\n")
    rows = _done(read_rows(seeds))
    for squares in ((3.0, 5.0), (0.0, 8.0)):
        draw_accuracy(seeds, [*_measured(rows[:2], squares), *rows[2:]])
    # 20 clips. Residuals +-20: sqrt(2 * 20^2 / 1 / 2) / 4 = 5. With 0 and 8 they are +-80, the error 20.
    assert [call.args[1:] for call in calls["axvline"].call_args_list] == [(20,)]
    assert [call.args[1:] for call in calls["axvspan"].call_args_list] == [(15, 25)]


def test_where_the_noise_scale_is_unclear_the_next_batch_counts() -> None:
    def curve(*noise: Measured | None) -> list[Point]:
        return [{"global_batch": 8 * (i + 1), "noise_scale": one} for i, one in enumerate(noise)]

    clear, alone, equal, unclear = (Measured(3, value, 6.0) for value in (6.1, 6.2, 6.0, None))
    assert clear_noise(curve(clear, alone)) == (8, clear)
    for noise in (equal, unclear, None):
        assert clear_noise(curve(noise, alone)) == (16, alone)
        assert clear_noise(curve(noise)) is None
    assert clear_noise(curve(Measured(1, 6, None))) == (8, Measured(1, 6, None))


def test_a_key_other_than_the_batch_is_drawn_too_with_words_side_by_side(make_sweep: Make, calls) -> None:
    lr = make_sweep("grid: {model.arch: [tsm, tsn], optimizer.base_lr: [0.1, 0.01, 1.0]}\n")
    rows = _measured(_done(read_rows(lr)), [2.0] * 6)
    assert set(draw_accuracy(lr, rows)) == {"accuracy.png", "accuracy.svg"}
    assert _curves(calls) == {
        "validation, arch-tsm": [[0.01, 0.1, 1.0], [89, 90, 88], [0.5] * 3],
        "validation, arch-tsn": [[0.01, 0.1, 1.0], [86, 87, 85], [0.5] * 3],
    }
    assert not calls["axvline"].called  # a noise scale is a batch
    assert calls["set_xscale"].call_args.kwargs == {"base": 10}  # from 0.01 to 1
    calls["errorbar"].reset_mock()
    calls["set_xscale"].reset_mock()
    words = make_sweep("grid: {optimizer.clip_norm: [null, 20]}\nfolds: f{1..2}\n")
    drawn = draw_accuracy(words, _done(read_rows(words)))
    assert _curves(calls)["validation"] == [[0, 1], [89.5, 87.5], [pytest.approx(0.5**0.5)] * 2]
    assert "<!-- \N{EM DASH} -->".encode() in drawn["accuracy.svg"] and b"<!-- 0.5 -->" not in drawn["accuracy.svg"]
    assert (
        not calls["set_xscale"].called and "over the folds, from 2 runs in all." in calls["annotate"].call_args.args[1]
    )
