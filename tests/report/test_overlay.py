"""Loss and accuracy of many runs in one figure."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from summit_train.report import figures as module
from summit_train.report.overlay import MOST_NAMED, overlay
from summit_train.report.records import RunRecord


@pytest.fixture
def drawn(monkeypatch):
    """Keeps the figures that are drawn."""
    figures: list[Figure] = []

    def keep(figure: Figure) -> bytes:
        figures.append(figure)
        figure.draw_without_rendering()
        return b"<svg/>"

    monkeypatch.setattr(module, "image", keep)
    return figures


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_runs_are_named_by_their_accuracy_and_without_a_result_come_last(write_run, run_records, drawn):
    lines = [line for line in run_records() if line["kind"] != "eval"]
    runs = [
        RunRecord(write_run("_unmeasured$", lines=lines, leave_out=("eval.json",))),
        RunRecord(write_run("training", leave_out=("eval.json",))),
        RunRecord(write_run("final", top1=98.0)),
        RunRecord(write_run("nothing", leave_out=("eval.json", "metrics.jsonl"))),
    ]
    picture = overlay(runs)
    assert picture is not None and picture.alt == "Loss and accuracy by epoch of 3 runs"
    assert legend(drawn[0]) == ["final: top-1 98.00 ± 0.71 %", "training: top-1 (97.00 %)", "_unmeasured$"]
    losses, accuracies = drawn[0].axes
    assert len(losses.lines) == 3 and losses.lines[0].get_xdata()[-1] == 4.0
    assert [len(line.get_xdata()) for line in accuracies.lines] == [4, 1, 4, 0]  # validations, a star, ...
    assert accuracies.lines[1].get_ydata() == [98.0]
    assert overlay(runs[3:]) is None


def test_without_steps_per_epoch_the_axis_counts_steps(write_run, run_records, drawn):
    lines = [line for line in run_records() if line.get("epoch") == 0]
    runs = [RunRecord(write_run("a")), RunRecord(write_run("b", lines=lines, leave_out=("plan.json",)))]
    picture = overlay(runs)
    assert picture is not None and "by step" in picture.alt and drawn[0].axes[0].lines[0].get_xdata()[-1] == 40


def test_of_many_runs_the_best_have_names_and_all_lie_on_the_page(write_run, run_records, drawn):
    lines = run_records()[:12]
    runs = [
        RunRecord(write_run(f"run {i} with a name of some length and more", lines=lines, top1=50.0 + i))
        for i in range(24)
    ]
    overlay(runs)
    names = legend(drawn[0])
    assert len(names) == MOST_NAMED + 1 == 22 and names[-1] == "3 others"
    assert names[0] == "run 23 with a name of some length…: top-1 73.00 ± 0.71 %"
    styles = {(line.get_color(), line.get_linestyle()) for line in drawn[0].legends[0].get_lines()}
    assert len(styles) == 22
    box, page = drawn[0].legends[0].get_window_extent(), drawn[0].bbox
    assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 < 0.5 * page.y1


def test_each_measure_has_axes_of_its_own(write_run, run_records, drawn):
    lines = [line | {"map": line["top1"] / 4} if line["kind"] == "eval" else line for line in run_records()]
    binary = write_run("labels", lines=lines, leave_out=("eval.json",))
    with (binary / "spec.yaml").open("a") as spec:
        spec.write("loss: {kind: binary}\n")
    overlay([RunRecord(binary), RunRecord(write_run("softmax", leave_out=("eval.json",)))])
    _, top1, _, precision = drawn[0].axes
    assert [axes.get_ylabel() for axes in (top1, precision)] == ["validation top-1 (%)", "validation mAP (%)"]
    assert [len(axes.lines) for axes in drawn[0].axes] == [1, 1, 1, 1]
    assert precision.lines[0].get_ydata()[-1] == top1.lines[0].get_ydata()[-1] / 4 and precision.get_ylim()[1] < 30
    assert legend(drawn[0]) == ["softmax: top-1 (97.00 %)", "labels: mAP (24.25 %)"]


def test_the_figure_is_valid_svg(write_run):
    picture = overlay([RunRecord(write_run())])
    assert picture is not None and ElementTree.fromstring(picture.svg).tag == "{http://www.w3.org/2000/svg}svg"
