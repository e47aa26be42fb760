"""papers/fit_summit.py: fitted to three rows of Table 3, the model gives the others; the shipped file is that fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from summit_train.core.errors import RunFailed
from summit_train.scaling.machines import load_machine
from tests.worlds import bench_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, published = bench_script("fit_summit"), bench_script("published")
BASE = load_machine("summit_published")
FIT = SCRIPT.fit_table_3(BASE)


def test_three_rows_give_the_other_five_within_3_percent() -> None:
    errors = SCRIPT.errors_of(SCRIPT.with_constants(BASE, FIT))
    assert [nodes for nodes in errors if nodes in FIT.rows] == [1, 8, 384] and len(errors) == 8
    for nodes, error in errors.items():
        assert abs(error) < (0.002 if nodes in FIT.rows else 0.03), nodes


def test_the_shipped_file_is_what_the_script_writes() -> None:
    text = SCRIPT.machine_text(SCRIPT.fitted(BASE, FIT), FIT)
    assert text == (ROOT / "configs/machines/summit.yaml").read_text(encoding="utf-8")


def test_the_shipped_machine_predicts_table_3_and_the_speed_of_the_i3ds() -> None:
    summit = load_machine("summit")
    errors = SCRIPT.errors_of(summit)
    assert errors == pytest.approx({row.nodes: 0 for row in published.TIMED_ROWS}, abs=0.03)
    ratios = SCRIPT.speed_ratios(summit)
    for arch, ratio in SCRIPT.SPEED_RATIO.items():
        assert ratios[arch] == pytest.approx(ratio, rel=0.10)


def test_other_rows_do_not_turn_the_picture() -> None:
    # What is claimed of the fit must not hang on the one choice of rows: these are the ends and the middle.
    for nodes in ((1, 8, 64), (1, 16, 256), (1, 32, 384)):
        fit = SCRIPT.fit_table_3(BASE, nodes)
        errors = SCRIPT.errors_of(SCRIPT.with_constants(BASE, fit))
        assert max(map(abs, errors.values())) < 0.03
        assert 0.037 < fit.seconds_per_clip < 0.040


def test_rows_that_leave_a_constant_open_are_refused() -> None:
    for nodes in ((8, 64, 384), (1, 8), (1, 8, 64, 384)):
        with pytest.raises(RunFailed, match="clips and passes apart"):
            SCRIPT.fit_table_3(BASE, nodes)


def test_ring_latencies_alone_would_rise_more_than_the_times_did() -> None:
    # With the ring that the paper names and NCCL's hops, no room is left for stragglers.
    ring = load_machine("summit_published", ["network.algorithm=ring"])
    with pytest.raises(RunFailed, match="no positive constants"):
        SCRIPT.fit_table_3(ring)
