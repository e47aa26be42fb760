"""All runs below a folder on one page, beside broken ones, with names that are hostile, and in one figure."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from matplotlib.figure import Figure

from summit_train.core.errors import UserError
from summit_train.report import figures as module
from summit_train.report.index import find_runs, read_index, write_index
from summit_train.report.overlay import MOST_NAMED, RunCurves, overlay
from summit_train.report.records import RunRecord
from tests.killing import another_holds
from tests.report.test_page import HOSTILE, Page

BRIEF = ("metrics.jsonl",)


def curves_of(*folders: Path) -> dict[str, RunCurves]:
    return {run.label: RunCurves.of(run) for run in map(RunRecord, folders)}


def change_spec(run: Path, **keys: object) -> None:
    spec = yaml.safe_load((run / "spec.yaml").read_text())
    (run / "spec.yaml").write_text(yaml.safe_dump(spec | keys))


def test_a_row_by_hand(write_run, tmp_path):
    """40 steps, 10 an epoch; two checkpoints around 96.875 %; a node, the steps and 4 checkpoints of 1/4 s."""
    run = write_run("a")
    (found,) = read_index(tmp_path).rows
    row = asdict(found)
    assert row.pop("curves") and row.pop("settings") == {}
    seconds = sum(json.loads(line).get("step_s", 0) for line in (run / "metrics.jsonl").read_text().splitlines()) + 1
    assert row.pop("node_hours") == pytest.approx(seconds / 3600, rel=1e-12)
    assert row.pop("clips_per_second") == pytest.approx(32, rel=0.1)
    # 62 of 64 videos: (0.96875 + z^2/128 -+ sqrt(z^2/64 (0.96875 0.03125 + z^2/256))) / (1 + z^2/64).
    assert (row.pop("low"), row.pop("high")) == pytest.approx((89.303, 99.139), abs=1e-3)
    assert row == {
        "macro": None, "name": "a", "state": "done", "epochs": 4.0, "planned_epochs": 4.0, "measure": "top-1",
        "last": 97.375, "best": 97.375, "mean": 96.875, "evaluation": "final", "lr": 0.01, "global_batch": 16.0,
        "started": "2023-11-14 22:13:20 UTC", "run": str(run), "remarks": "",
    }  # fmt: skip


def test_while_there_is_no_final_evaluation_the_validations_count(write_run, run_records, tmp_path):
    lines = [line | {"top1": 90.0} if line["kind"] == "eval" and line["step"] == 10 else line for line in run_records()]
    write_run("a", lines=lines[:-4], leave_out=("eval.json",))
    (row,) = read_index(tmp_path).rows
    assert (row.evaluation, row.last, row.best, row.mean) == ("training", 79.0, 90.0, None)
    assert row.state == "unfinished" and row.remarks == "eval.json is missing"


def test_states_and_broken_runs(write_run, run_records, tmp_path):
    """A run that went on with another number of ranks has no node-hours."""
    unfinished = ("eval.json",)
    write_run("sweep/done", name="done")
    (write_run("sweep/stopped", name="stopped", leave_out=unfinished) / "stopped").write_text("checkpoint")
    resumed = [*run_records(), {"kind": "start", "step": 40, "ranks": 3}]
    torn = write_run("torn", lines=resumed, leave_out=unfinished) / "metrics.jsonl"
    torn.write_text(torn.read_text() + '{"kind": "step", "st')
    (write_run("unparsed") / "spec.yaml").write_text("name: [")
    (tmp_path / "submitted/job").mkdir(parents=True)
    (tmp_path / "submitted/job/spec.yaml").write_text("name: waits")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/metrics.jsonl").touch()
    rows = {row.name: row for row in read_index(tmp_path).rows}
    states = {name: row.state for name, row in rows.items()}
    assert states == {
        "empty": "broken", "submitted": "not started", "done": "done", "stopped": "stopped", "torn": "unfinished",
        "unparsed": "broken",
    }  # fmt: skip
    assert "torn, the run was killed" in rows["torn"].remarks and rows["torn"].node_hours is None
    assert "spec.yaml" in rows["unparsed"].remarks and "plan.json is missing" in rows["empty"].remarks


def test_a_run_that_another_process_holds_is_running(write_run, tmp_path):
    run = write_run("a", leave_out=("eval.json",))
    with another_holds(run / "lock"):
        assert [row.state for row in read_index(tmp_path).rows] == ["running"]


def test_runs_are_found_once_through_links_and_not_within_runs(write_run, tmp_path):
    run = write_run("group/run", leave_out=BRIEF)
    (run / "job/none").mkdir(parents=True)
    (run / "job/spec.yaml").write_text("name: run")
    far = write_run("far/away", leave_out=BRIEF)
    (tmp_path / "group/link").symlink_to(far)
    (tmp_path / "group/again").symlink_to(run)
    (tmp_path / "group/up").symlink_to(tmp_path / "group")
    assert [path.name for path in find_runs(tmp_path / "group")] == ["again", "link"]
    for folder, reason in ((tmp_path / "group/nowhere", "no such directory"), (run / "job/none", "no run below it")):
        with pytest.raises(UserError, match=reason):
            read_index(folder)


def test_only_keys_that_differ_are_shown(write_run, tmp_path):
    for name, more in (("a", {"seed": 0, "loss": {}}), ("b", {"seed": 1, "loss": None, "crop": [1, 2]})):
        change_spec(write_run(name, leave_out=BRIEF), run_dir=f"runs/{name}", **more)
    (write_run("broken", leave_out=BRIEF) / "spec.yaml").write_text("{")
    a, b, broken = (row.settings for row in read_index(tmp_path).rows)
    assert a == {"seed": 0, "loss": "{}", "crop": None} and b == {"seed": 1, "loss": "null", "crop": "[1, 2]"}
    assert broken == dict.fromkeys(a)


def test_the_page_is_one_file_whose_only_script_is_ours(write_run, tmp_path):
    hostile = write_run("runs/50%#?<i>", name=HOSTILE, leave_out=BRIEF)
    (hostile / "report.html").touch()
    change_spec(hostile, seed="</script><script>alert(2)</script>")
    change_spec(write_run("runs/b", name="b"), seed=1)
    out = tmp_path / "pages/index.html"
    index = write_index(tmp_path / "runs", out)
    html = out.read_text(encoding="utf-8")
    page = Page(html)
    assert page.tags.count("script") == 1 and not {"i", "link", "iframe", "object", "base"} & set(page.tags)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert HOSTILE in page.text and "</script><script>alert(2)</script>" in page.text
    assert page.values("a", "href") == 2 * ["../runs/50%25%23%3F%3Ci%3E/report.html"]
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in html or f"script-src 'sha256-{digest}'" in html
    assert len(page.values("img", "src")) == 1 and page.values("img", "src")[0].startswith("data:image/svg+xml;base64,")
    rows = list(csv.DictReader((tmp_path / "pages/index.csv").open(newline="")))
    assert [row["name"] for row in rows] == [HOSTILE, "b"] and rows[1]["seed"] == "1" and rows[1]["epochs"] == "4.0"
    assert len(index.rows) == 2 and rows[0]["mean"] == "96.875"


def test_the_index_keeps_a_curve_of_a_long_run_and_not_its_records(write_run, run_records, tmp_path):
    step = next(line for line in run_records() if line["kind"] == "step")
    lines = [run_records()[0], *(step | {"step": number, "loss": float(number)} for number in range(1, 6001))]
    path = write_run("runs/long", lines=lines)
    (row,) = read_index(path.parent).rows
    curves = row.curves
    assert curves is not None
    steps, losses = curves.losses
    assert len(steps) == len(losses) == 1500 and curves.last_step == 6000
    assert (steps[:2].tolist(), losses[:2].tolist()) == ([2.5, 6.5], [2.5, 6.5])  # the means of four steps
    assert overlay({"long": curves}) is not None


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
        write_run("_unmeasured$", lines=lines, leave_out=("eval.json",)),
        write_run("training", leave_out=("eval.json",)),
        write_run("final", top1=98.0),
        write_run("nothing", leave_out=("eval.json", "metrics.jsonl")),
    ]
    picture = overlay(curves_of(*runs))
    assert picture is not None and picture.alt == "Loss and accuracy by epoch of 3 runs"
    assert legend(drawn[0]) == ["final: top-1 98.00 ± 0.71 %", "training: top-1 (97.00 %)", "_unmeasured$"]
    losses, accuracies = drawn[0].axes
    assert len(losses.lines) == 3 and losses.lines[0].get_xdata()[-1] == 4.0
    assert [len(line.get_xdata()) for line in accuracies.lines] == [4, 1, 4, 0]  # validations, a star, ...
    assert accuracies.lines[1].get_ydata() == [98.0]
    assert overlay(curves_of(runs[3])) is None


def test_without_steps_per_epoch_the_axis_counts_steps(write_run, run_records, drawn):
    lines = [line for line in run_records() if line.get("epoch") == 0]
    runs = [write_run("a"), write_run("b", lines=lines, leave_out=("plan.json",))]
    picture = overlay(curves_of(*runs))
    assert picture is not None and "by step" in picture.alt and drawn[0].axes[0].lines[0].get_xdata()[-1] == 40


def test_of_many_runs_the_best_have_names_and_all_lie_on_the_page(write_run, run_records, drawn):
    lines = run_records()[:12]
    runs = [write_run(f"run {i} with a name of some length and more", lines=lines, top1=50.0 + i) for i in range(24)]
    overlay(curves_of(*runs))
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
    overlay(curves_of(binary, write_run("softmax", leave_out=("eval.json",))))
    _, top1, _, precision = drawn[0].axes
    assert [axes.get_ylabel() for axes in (top1, precision)] == ["validation top-1 (%)", "validation mAP (%)"]
    assert [len(axes.lines) for axes in drawn[0].axes] == [1, 1, 1, 1]
    assert precision.lines[0].get_ydata()[-1] == top1.lines[0].get_ydata()[-1] / 4 and precision.get_ylim()[1] < 30
    assert legend(drawn[0]) == ["softmax: top-1 (97.00 %)", "labels: mAP (24.25 %)"]


def test_the_figure_is_valid_svg(write_run):
    picture = overlay(curves_of(write_run()))
    assert picture is not None and ElementTree.fromstring(picture.svg).tag == "{http://www.w3.org/2000/svg}svg"
