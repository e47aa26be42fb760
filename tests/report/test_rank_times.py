"""The picture of the ranks against time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from summit_train.report.page import render
from summit_train.report.rank_times import _cells, rank_times_picture
from summit_train.report.records import RunRecord

Write = Callable[..., Path]
Lines = Callable[[], list[dict[str, Any]]]


def _window(step: int, *compute: float, wait: float = 0.0) -> dict[str, Any]:
    return {"kind": "rank_times", "time": 0, "step": step, "compute_s": compute, "data_wait_s": [wait] * len(compute)}


def _slow(step: int, rank: int, part: str = "data_wait") -> dict[str, Any]:
    return {"kind": "slow_rank", "time": 0, "step": step, "rank": rank, "host": f"n{rank}", "part": part}


def _run(write_run: Write, run_records: Lines, *more: dict[str, Any]) -> RunRecord:
    return RunRecord(write_run(lines=[*run_records(), *more]))


def test_each_cell_is_a_ranks_own_time_over_the_median(write_run: Write, run_records: Lines) -> None:
    """Resumed from step 20 with fewer ranks; a window of traced steps is missing, and one says nothing."""
    log = [
        _window(10, 1.0, 2.0, 1.0, wait=1.0),
        _window(20, 4.0, 2.0, 1.0),
        _window(30, 7.0, 7.0, 9.0),
        {"kind": "start", "step": 20, "time": 0},
        _window(40, 1.0, 3.0),
        _window(50, 0.0, 0.0),
    ]
    edges, ratios = _cells(_run(write_run, run_records, *log))
    assert edges == [0, 10, 20, 40, 50]
    gap = np.nan
    wanted = [[1.0, 2.0, 0.5, gap], [1.5, 1.0, 1.5, gap], [1.0, 0.5, gap, gap]]
    np.testing.assert_array_equal(ratios, wanted)


def test_of_many_ranks_and_windows_the_slowest_is_kept(write_run: Write, run_records: Lines) -> None:
    seconds = np.ones((1000, 700))  # (windows, ranks)
    seconds[501, 350] = 9.0
    log = [_window(100 * (i + 1), *row) for i, row in enumerate(seconds.tolist())]
    edges, ratios = _cells(_run(write_run, run_records, *log))
    assert ratios.shape == (300, 300) and len(edges) == 301 and (edges[0], edges[-1]) == (0, 100_000)
    ((rank, window),) = np.argwhere(ratios == 9.0)
    assert rank == 150 and edges[window] < 50_200 <= edges[window + 1] and (ratios != 1.0).sum() == 1


@pytest.mark.filterwarnings("error")
def test_named_ranks_are_marked_and_the_page_shows_them(write_run: Write, run_records: Lines) -> None:
    log = [_window(step, 1.0, 1.0, 3.0, *[1.0] * 14) for step in (10, 20, 30, 40)]
    run = _run(write_run, run_records, *log, _slow(30, 2), _slow(40, 2), *(_slow(40, rank) for rank in range(10, 18)))
    (picture,) = rank_times_picture(run)
    assert ElementTree.fromstring(picture.svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert b"<!-- rank 2 on n2: data wait, named at step 40 -->" in picture.svg, "once, though it was named twice"
    assert picture.svg.count(b"<!-- rank 1") == 5 and b"<!-- 2 more -->" in picture.svg
    assert picture.caption.startswith("Own time of each rank") and picture.uri in render([run])
    assert rank_times_picture(run)[0].svg == picture.svg


def test_a_run_without_windows_has_no_picture(write_run: Write) -> None:
    assert rank_times_picture(RunRecord(write_run())) == []


def test_a_damaged_window_is_left_out_with_a_note(write_run: Write, run_records: Lines) -> None:
    broken = [_window(10), _window(20, 1.0, 1.0) | {"compute_s": ["x", 1.0]}, _window(30, 1.0, 2.0, 3.0)]
    run = _run(write_run, run_records, *broken, {"kind": "slow_rank", "step": 30})
    assert [one.step for one in run.log.rank_times] == [30] and len(run.notes) == 3
    uneven = _window(40, 1.0, 1.0, 2.0) | {"data_wait_s": [1.0, 1.0]}
    (picture,) = rank_times_picture(RunRecord(write_run("uneven", lines=[*run_records(), uneven])))
    assert picture.title == "Ranks"
