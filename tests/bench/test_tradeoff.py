"""The figure of accuracy against cost: which numbers it takes, and what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from summit_train.bench.tradeoff import Point, draw_tradeoff, points_of

TOP1, COUNTED = {"Kinetics": 70.0}, {"multiply_adds": 4e9, "parameters": 2e6}


def _row(label: str, top1: dict[str, float], counted: dict[str, float] | None, **paper: Any) -> dict[str, Any]:
    published = {"family": "TSM", "top1": top1, "multiply_adds": None, "parameters": None, "clips": 1} | paper
    return {"label": label, "published": published} | (counted or dict.fromkeys(COUNTED))


ROWS = [
    _row("printed", TOP1, COUNTED, multiply_adds=5e9, parameters=3e6, clips=10),
    _row("counted", TOP1, COUNTED),
    _row("no size", TOP1, None, multiply_adds=6e9, family="ECO"),
    _row("no cost", TOP1, None),
    _row("another set", {"Jester": 97.0}, COUNTED),
]
VALUES = {
    "rows": ROWS,
    "data_sets": ["Kinetics"],
    "overrides": [],
    "table": {"number": 3, "title": "a table", "setting": "ten clips"},
}


def test_the_published_cost_is_taken_and_the_counted_one_where_there_is_none() -> None:
    assert points_of(ROWS, "Kinetics") == [
        Point("printed", "TSM", 50.0, 70.0, 3e6, counted=False),
        Point("counted", "TSM", 4.0, 70.0, 2e6, counted=True),
        Point("no size", "ECO", 6.0, 70.0, None, counted=False),
    ]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_it_is_drawn_and_the_same_rows_give_the_same_bytes(suffix: str, tmp_path: Path) -> None:
    one, other = tmp_path / f"one{suffix}", tmp_path / f"other{suffix}"
    draw_tradeoff(one, VALUES)
    draw_tradeoff(other, VALUES)
    assert one.read_bytes() == other.read_bytes()


def test_it_names_what_it_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "figure.svg"
    draw_tradeoff(path, VALUES)
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    # Text is drawn as paths; matplotlib writes a comment beside each line.
    drawn = " ".join(re.findall(r"<!-- (.*?) -->", path.read_text()))
    for words in (
        "Left out, without a cost: no cost; another set.",
        "Hollow: ",
        "Small dot: ",
        "nothing was trained here",
    ):
        assert words in drawn
