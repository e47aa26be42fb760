"""The figures of a run's page: which there are, what they say, and what is on their axes."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from summit_train.report.curves import TWICE, Canvas, log_axis, pictures
from summit_train.report.records import RunRecord, read_runs

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
