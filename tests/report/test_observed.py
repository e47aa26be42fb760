"""The figure of early recognition, for a command and on a page."""

from __future__ import annotations

import json
import re
from pathlib import Path

from summit_train.report.curves import pictures
from summit_train.report.observed import draw_observed
from summit_train.report.page import render
from summit_train.report.records import read_runs
from summit_train.report.results import Observed

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
