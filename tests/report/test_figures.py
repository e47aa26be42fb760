"""Figures: they are valid SVG of any names, have few ticks, and show curves and times of ranks as prepared by hand."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from summit_train.report.curves import _cells, log_axis, pictures
from summit_train.report.figures import drawable, finite, moving_mean, smoothed, thinned
from summit_train.report.observed import draw_observed
from summit_train.report.records import RunRecord, read_runs
from summit_train.report.results import Observed

TITLES = ["Loss", "Accuracy", "Learning rate", "Throughput", "Data wait"]
HOSTILE = "_$\\frac{$ <script>alert(1)</script> --> \x07 \u6771\u4eac"


def test_every_figure_is_valid_svg_whatever_the_users_style(write_run):
    run = RunRecord(write_run())
    drawn = pictures([run])
    assert [picture.title for picture in drawn] == TITLES
    for picture in drawn:
        assert ElementTree.fromstring(picture.svg).tag == "{http://www.w3.org/2000/svg}svg"
        assert "Machine: node1, Fast CPU, 2 cores." in picture.caption and "epoch" in picture.alt
    with matplotlib.rc_context({"lines.linewidth": 9, "axes.facecolor": "black"}):
        assert [picture.svg for picture in pictures([run])] == [picture.svg for picture in drawn]
        assert matplotlib.rcParams["lines.linewidth"] == 9


@pytest.mark.filterwarnings("error")
def test_runs_share_a_figure_and_a_hostile_name_is_drawn_as_text(write_run):
    runs = read_runs([write_run("tsm_run"), write_run("b", name=HOSTILE * 20, leave_out=("metrics.jsonl",))])
    for picture in pictures(runs):
        # The letters are drawn as outlines; matplotlib leaves the text beside them in a comment.
        assert b"<!-- tsm_run" in picture.svg and b"<!-- _$" in picture.svg
        assert not [one for one in ElementTree.fromstring(picture.svg).iter() if one.tag.endswith("script")]


@pytest.mark.parametrize(("low", "high"), [(3, 4), (16, 60), (0.01, 0.09), (1, 50_000), (1e-6, 1e6)])
def test_a_logarithmic_axis_has_few_ticks_in_plain_numbers(low: float, high: float) -> None:
    figure = Figure()
    axes = figure.subplots()
    axes.plot([0, 1], [low, high])
    log_axis(axes)
    figure.canvas.draw()
    bottom, top = axes.get_ylim()
    shown = [
        label.get_text() for label in axes.get_yticklabels(which="both") if bottom <= label.get_position()[1] <= top
    ]
    shown = [text for text in shown if text]
    assert 2 <= len(shown) <= 6 and not any("$" in text for text in shown)


def test_names_are_cut_and_letters_the_font_lacks_replaced():
    assert drawable("tsm_r50 ± µ") == "tsm_r50 ± µ"
    assert drawable("\u6771\u4eac\n\x00") == "□" * 4
    assert len(drawable("x" * 500)) == 60


@pytest.mark.parametrize(
    ("values", "means"),
    [
        ([0.0, 3.0, 6.0, 0.0], [1.5, 3.0, 3.0, 3.0]),
        ([1.0, np.nan, 3.0, np.nan, np.nan, np.nan], [1.0, 2.0, 3.0, 3.0, np.nan, np.nan]),
    ],
)
def test_the_moving_mean_is_shorter_at_the_ends_and_passes_over_gaps(values, means):
    np.testing.assert_allclose(moving_mean(np.array(values), 3), means)


def test_thinned_keeps_both_spikes_of_a_long_curve():
    y = np.zeros(100_000)
    y[12_345], y[54_321], y[777] = 9.0, -9.0, np.nan
    x, thin = thinned(np.arange(100_000.0), y)
    assert len(x) <= 1500 and (np.diff(x) > 0).all()
    assert thin[x == 12_345] == [9.0] and thin[x == 54_321] == [-9.0]


def test_smoothed_keeps_the_mean_of_a_long_curve():
    x, y = smoothed(np.arange(60_000.0), np.tile([1.0, 2.0, 3.0], 20_000))
    assert len(x) == len(y) == 1500
    np.testing.assert_allclose(y, 2.0, atol=0.02)


def test_finite_turns_the_rest_into_gaps():
    np.testing.assert_array_equal(finite([1.0, None, float("inf")]), [1.0, np.nan, np.nan])


@pytest.mark.parametrize("length", [0, 1, 2])
def test_curves_of_hardly_any_points(length):
    y = np.ones(length)
    assert smoothed(y, y)[1].shape == thinned(y, y)[1].shape == (length,)


POINTS = [{"fraction": 0.1, "top1": 40.0, "top5": 80.0}, {"fraction": 1.0, "top1": 90.0, "top5": 100.0}]
CURVES = {"name": "_online $", "frames": 8, "videos": 101, "crops": 1, "observed": POINTS, "anytime": POINTS}


def test_a_figure_of_early_recognition_names_the_runs_and_both_kinds_of_curves(tmp_path: Path) -> None:
    runs = [Observed.model_validate(CURVES), Observed.model_validate(CURVES | {"frames": 16, "anytime": []})]
    for name in ("one.svg", "other.svg", "a.pdf"):
        draw_observed(tmp_path / name, runs)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    # Text is drawn as paths; matplotlib writes a comment next to each line.
    drawn = " ".join(re.findall(r"<!-- (.*?) -->", (tmp_path / "one.svg").read_text()))
    for words in ("_online $ (1)", "_online $ (2)", "the stream so far", "Solid: T frames", "101 videos"):
        assert words in drawn


def window(step: int, *compute: float, wait: float = 0.0) -> dict[str, object]:
    return {"kind": "rank_times", "step": step, "compute_s": compute, "data_wait_s": [wait] * len(compute)}


def test_each_cell_is_a_ranks_own_time_over_the_median(write_run) -> None:
    """Resumed from step 20 with fewer ranks; a window of traced steps is missing, and one says nothing."""
    lines = [
        window(10, 1.0, 2.0, 1.0, wait=1.0),
        window(20, 4.0, 2.0, 1.0),
        window(30, 7.0, 7.0, 9.0),
        {"kind": "start", "step": 20},
        window(40, 1.0, 3.0),
        window(50, 0.0, 0.0),
    ]
    edges, ratios = _cells(RunRecord(write_run(lines=lines)))
    assert edges == [0, 10, 20, 40, 50]
    gap = np.nan
    np.testing.assert_array_equal(ratios, [[1.0, 2.0, 0.5, gap], [1.5, 1.0, 1.5, gap], [1.0, 0.5, gap, gap]])


def test_of_many_ranks_and_windows_the_slowest_is_kept(write_run) -> None:
    seconds = np.ones((1000, 700))  # (windows, ranks)
    seconds[501, 350] = 9.0
    lines = [window(100 * (i + 1), *row) for i, row in enumerate(seconds.tolist())]
    edges, ratios = _cells(RunRecord(write_run(lines=lines)))
    assert ratios.shape == (300, 300) and len(edges) == 301 and (edges[0], edges[-1]) == (0, 100_000)
    ((rank, place),) = np.argwhere(ratios == 9.0)
    assert rank == 150 and edges[place] < 50_200 <= edges[place + 1] and (ratios != 1.0).sum() == 1
