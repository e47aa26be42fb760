"""All runs below a folder: found once, on one page with hostile names, many and long ones in one figure."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re

import pytest
from matplotlib.figure import Figure

from summit_train.core.errors import UserError
from summit_train.report.index import find_runs, read_index, write_index
from summit_train.report.overlay import MOST_NAMED, RunCurves, overlay
from summit_train.report.records import RunRecord
from tests.killing import another_holds
from tests.page_values import page_text
from tests.report.test_page import HOSTILE, Page
from tests.run_directories import whole_log

BRIEF = ("metrics.jsonl",)


def test_a_run_that_another_process_holds_is_running(write_run, tmp_path):
    run = write_run("a", leave_out=("eval.json",))
    with another_holds(run / "lock"):
        assert [row["state"] for row in read_index(tmp_path).rows] == ["running"]


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


def test_the_page_is_one_file_whose_only_script_is_ours(write_run, tmp_path):
    evil = {"spec": {"seed": "</script><script>alert(2)</script>"}, "files": {"report.html": ""}}
    write_run("runs/50%#?<i>", name=HOSTILE, leave_out=BRIEF, **evil)
    write_run("runs/b", name="b", spec={"seed": 1})
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


def test_the_index_keeps_a_curve_of_a_long_run_and_not_its_records(write_run, tmp_path):
    step = next(line for line in whole_log() if line["kind"] == "step")
    lines = [whole_log()[0], *(step | {"step": number, "loss": float(number)} for number in range(1, 6001))]
    path = write_run("runs/long", lines=lines)
    (curves,) = read_index(path.parent).curves.values()
    steps, losses = curves.losses
    assert len(steps) == len(losses) == 1500 and curves.last_step == 6000
    assert (steps[:2].tolist(), losses[:2].tolist()) == ([2.5, 6.5], [2.5, 6.5])  # the means of four steps
    assert overlay({"long": curves}) is not None


def test_runs_are_under_the_names_of_their_sweeps_with_measures_of_their_own(write_run, tmp_path):
    """Two sweeps have a run of one name. One has a table, of which two columns are empty; the other's is broken."""
    measured = {"spec": {"evaluate": {"measures": [{"kind": "./own.py:recall"}, {"kind": "./own.py:loss"}]}}}
    for path, recall in (("cv/fold1", 0.25), ("cv/fold2", 0.5), ("deep/archs/fold1", 0.75)):
        run = {"files": {"eval.json": {"recall_mean": recall, "loss_mean": None}}} | measured
        write_run(f"runs/{path}", name=path.rpartition("/")[2], leave_out=BRIEF, **run)
    write_run("runs/alone", name="alone", leave_out=("eval.json",))
    table = [{"curve": "", "batch": "4", "top-1": "50.00 ± 1.25 %", "recall": "\N{EM DASH}"}]
    (tmp_path / "runs/cv/table.json").write_text(json.dumps({"table": table}))
    (tmp_path / "runs/deep/archs/table.json").write_text('{"table": [1]}')
    for folder in ("cv", "deep/archs"):
        (tmp_path / "runs" / folder / "sweep.yaml").write_text("")
    index = write_index(tmp_path / "runs", tmp_path / "index.html")
    sweeps = [("alone", None), ("cv/fold1", "cv"), ("fold2", "cv"), ("deep/archs/fold1", "deep/archs")]
    assert [(row["name"], row["sweep"]) for row in index.rows] == sweeps
    assert [row["measures"]["recall"] for row in index.rows] == [None, 0.25, 0.5, 0.75]
    assert index.sweep_table() == [{"sweep": "cv", "batch": "4", "top-1": "50.00 ± 1.25 %"}]
    text = page_text((tmp_path / "index.html").read_text())
    assert text.index("| alone") < text.index("sweep cv") < text.index("| fold2") < text.index("sweep deep/archs")
    assert not re.search(r"\bNone\b|\bTrue\b|\bFalse\b|\['|\{'", text)
    rows = list(csv.DictReader((tmp_path / "index.csv").open(newline="")))
    assert [(row["sweep"], row["recall"], row["loss"]) for row in rows][1] == ("cv", "0.25", "")
    (row, _) = read_index(tmp_path / "runs/cv").rows
    assert row["sweep"] == "cv"


def test_of_many_runs_the_best_have_names_and_all_are_on_the_page(write_run, monkeypatch):
    lines = whole_log()[:12]
    runs = [write_run(f"run {i} with a name of some length and more", lines=lines, top1=50.0 + i) for i in range(24)]
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, content, **_: drawn.append(figure))
    overlay({run.label: RunCurves.of(run) for run in map(RunRecord, runs)})
    (figure,) = drawn
    figure.draw_without_rendering()
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert len(names) == MOST_NAMED + 1 == 22 and names[-1] == "3 others"
    assert names[0] == "run 23 with a name of some length…: top-1 73.00 ± 0.71 %"
    assert len({(line.get_color(), line.get_linestyle()) for line in legend.get_lines()}) == 22
    box = legend.get_window_extent()
    page = figure.bbox
    assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 < 0.5 * page.y1
