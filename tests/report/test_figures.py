"""The figures of a run's page: which there are, what they say, what is on their axes, and how curves are prepared."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from summit_train.report.curves import TWICE, Canvas, log_axis, pictures
from summit_train.report.figures import drawable, finite, moving_mean, smoothed, thinned
from summit_train.report.observed import draw_observed
from summit_train.report.page import render
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


@pytest.mark.usefixtures("undrawn")
def test_only_what_there_is_data_for_is_drawn(write_run, run_records):
    nothing = write_run("nothing", leave_out=("metrics.jsonl", "eval.json"))
    only_final = write_run("final", leave_out=("metrics.jsonl",))
    no_loss = write_run("no_loss", lines=[{**line, "loss": None} for line in run_records()])
    assert pictures([RunRecord(nothing)]) == []
    assert [picture.title for picture in pictures([RunRecord(only_final)])] == ["Accuracy"]
    assert [picture.title for picture in pictures([RunRecord(no_loss)])] == TITLES[1:]


@pytest.mark.usefixtures("undrawn")
def test_the_loss_of_the_validations_is_drawn_beside_that_of_training(write_run, run_records):
    lines = [line | {"val_loss": 1.25} if line["kind"] == "eval" else line for line in run_records()]
    loss = pictures([RunRecord(write_run(lines=lines))])[0]
    assert loss.title == "Loss" and loss.caption.startswith(f"{TWICE} Circles: on the validation videos.")
    assert "validation" not in pictures([RunRecord(write_run("older"))])[0].caption


@pytest.mark.usefixtures("undrawn")
def test_restarts_and_skipped_steps_are_explained(write_run, run_records):
    lines = run_records()
    plain = RunRecord(write_run("plain", lines=lines))
    lines[3]["skipped"] = 1
    lines.append({"kind": "start", "step": 40, "ranks": 2, "time": 0})
    marked = RunRecord(write_run("marked", lines=lines))
    captions = {run.label: {picture.title: picture.caption for picture in pictures([run])} for run in (plain, marked)}
    assert "without an update" in captions["marked"]["Loss"] and "resumed there" in captions["marked"]["Throughput"]
    assert "without an update" not in captions["plain"]["Loss"] and "resumed" not in captions["plain"]["Throughput"]


@pytest.mark.filterwarnings("error")
def test_trust_ratios_are_drawn_where_a_run_has_them(write_run, run_records):
    ratios = [{"kind": "trust_ratio", "step": s, "ratios": {"a": 0.1 * s, "b": 2.0}} for s in (1, 20, 40)]
    again = {"kind": "start", "step": 20, "ranks": 2, "time": 0}
    run = RunRecord(write_run("bounded", lines=[*run_records(), *ratios, again]))
    # The last one lies beyond the checkpoint that the run goes on from.
    assert [(record.step, record.ratios["a"]) for record in run.log.trust_ratios] == [(1, 0.1), (20, 2.0)]
    assert [picture.title for picture in pictures([run])] == [*TITLES, "Trust ratio"]
    both = {picture.title: picture for picture in pictures([run, RunRecord(write_run("plain"))])}
    assert b"<!-- bounded" in both["Trust ratio"].svg and "median" in both["Trust ratio"].caption


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


def test_the_axis_is_epochs_unless_a_run_does_not_know_them(write_run, run_records):
    run = RunRecord(write_run("a"))
    young = RunRecord(write_run("b", lines=run_records()[:5], leave_out=("plan.json",)))
    for runs, axis, expected in (([run], "epoch", [0.5, 4.0]), ([run, young], "step", [5, 40])):
        canvas = Canvas(runs, "loss")
        assert canvas.axis == axis
        np.testing.assert_allclose(canvas.positions(run, [5, 40]), expected)


def test_the_classes_of_each_validation_are_drawn_the_lowest_at_the_end_first(write_run, run_records):
    """Of 31 classes, named in plan.json or not; the last one has no video, the one before is right at the end."""
    counts = dict.fromkeys((f"class {number}" for number in range(32)), 2)
    epochs = [[*range(1, 31), 10 * epoch, None] for epoch in range(1, 5)]
    lines, classes = run_records(), iter(epochs)
    lines = [line | {"classes": next(classes)} if line["kind"] == "eval" else line for line in lines]
    run = RunRecord(write_run("named", lines=lines, clips_per_class={"train": counts, "val": counts}))
    assert run.log.evals[3].classes == tuple(epochs[3])
    (drawn,) = [one for one in pictures([run]) if one.title == "Classes"]
    assert "The 30 lowest of 31 are shown." in drawn.caption and not drawn.third
    names = re.findall(rb"<!-- (class \d+) -->", drawn.svg)
    assert names == [b"class %d" % number for number in range(30)]  # class 30 ends with 40 %
    (few,) = [one for one in pictures([RunRecord(write_run("few", lines=lines[:13]))]) if one.title == "Classes"]
    assert b"<!-- 30 -->" in few.svg and b"<!-- 29 -->" not in few.svg  # after the first epoch class 29 is the best
    assert "Classes" not in [one.title for one in pictures([run, RunRecord(write_run("other"))])]


@pytest.mark.usefixtures("undrawn")
def test_the_first_cell_of_classes_begins_at_the_validation_before_it(write_run, run_records, monkeypatch):
    """An older version wrote the first two validations, without classes."""
    drawn = list[list[float]]()
    plain = Axes.pcolormesh
    monkeypatch.setattr(
        Axes, "pcolormesh", lambda own, x, *a, **k: drawn.append(np.ravel(x).tolist()) or plain(own, x, *a, **k)
    )
    for without, edges in ((0, [0, 1, 2, 3, 4]), (2, [2, 3, 4])):
        lines, number = run_records(), iter(range(4))
        lines = [
            line | {"classes": [50.0, 60.0]} if line["kind"] == "eval" and next(number) >= without else line
            for line in lines
        ]
        pictures([RunRecord(write_run(f"without_{without}", lines=lines))])
        assert drawn[0] == edges
        drawn.clear()  # the colour bar is one, too


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


# Early recognition.

POINTS = [{"fraction": 0.1, "top1": 40.0, "top5": 80.0}, {"fraction": 1.0, "top1": 90.0, "top5": 100.0}]
CURVES = {"name": "_online $", "frames": 8, "videos": 101, "crops": 1, "observed": POINTS, "anytime": POINTS}


def _texts(svg: str) -> list[str]:
    # Text is drawn as paths; matplotlib writes a comment beside each line.
    return re.findall(r"<!-- (.*?) -->", svg)


def test_it_names_the_runs_and_both_kinds_of_curves(tmp_path: Path) -> None:
    runs = [Observed.model_validate(CURVES), Observed.model_validate(CURVES | {"frames": 16, "anytime": []})]
    one, other = tmp_path / "one.svg", tmp_path / "other.svg"
    draw_observed(one, runs)
    draw_observed(other, runs)
    assert one.read_bytes() == other.read_bytes()
    drawn = " ".join(_texts(one.read_text()))
    for words in ("_online $ (1)", "_online $ (2)", "the stream so far", "Solid: T frames", "101 videos"):
        assert words in drawn


def test_without_a_stream_there_is_no_word_of_one(tmp_path: Path) -> None:
    draw_observed(tmp_path / "a.pdf", [Observed.model_validate(CURVES)])
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    draw_observed(tmp_path / "a.svg", [Observed.model_validate(CURVES | {"anytime": []})])
    drawn = " ".join(_texts((tmp_path / "a.svg").read_text()))
    assert "stream" not in drawn and "Solid: 8 frames" in drawn


def test_the_report_shows_it_where_it_is(write_run) -> None:
    bare, with_curves = (write_run(name, leave_out=("metrics.jsonl",)) for name in ("bare", "with_curves"))
    (with_curves / "observed.json").write_text(json.dumps(CURVES))
    assert "Early recognition" not in render(read_runs([bare]))
    assert render(read_runs([with_curves])).count("<b>Early recognition.</b>") == 1
    # Of two runs: in the comparison, and with its own run.
    assert render(read_runs([bare, with_curves])).count("<b>Early recognition.</b>") == 2
    picture = pictures(read_runs([bare, with_curves]))[-1]
    assert "with_curves" in _texts(picture.svg.decode())
