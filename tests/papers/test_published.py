"""The papers' figures as printed, the TSM paper's tables against its text and our networks, and the fit of Summit."""

from __future__ import annotations

import re

import pytest

from summit_train.core.errors import RunFailed
from summit_train.counts import count_network
from summit_train.scaling.machines import load_machine
from tests.worlds import ROOT, bench_script

latency, published, tsm_paper = (bench_script(name) for name in ("latency", "published", "published_tsm"))
fit_summit = bench_script("fit_summit")
KINETICS, SOMETHING, TABLES = tsm_paper.KINETICS, tsm_paper.SOMETHING, tsm_paper.TABLES
BASE = load_machine("summit_published")


def test_table_3_of_the_scaling_paper_is_what_it_prints() -> None:
    batches = [96, 384, 768, 1536, 3072, 6144, 12_288, 18_432, 24_576, 49_152]
    assert [row.global_batch for row in published.TABLE_3] == batches
    assert [row.gpus for row in published.TABLE_3] == [6, 48, 96, 192, 384, 768, 1536, 2304, 3072, 6144]
    # Against one node's 49 h 55 min: the node-seconds of 8, 256 and 384 nodes, in percent.
    one, *others = published.TIMED_ROWS
    shares = {row.nodes: 100 * (one.seconds or 0) / ((row.seconds or 1) * row.nodes) for row in others}
    assert [shares[nodes] for nodes in (8, 256, 384)] == pytest.approx([87.7, 82.3, 76.8], abs=0.05)


# Table, two of its rows, a column, and the ratio that the text gives, with half of its last digit.
RATIOS = [
    (2, "ECO, 16 frames", "TSM, 8 frames", "multiply_adds", 1.9, 0.05),  # section 5.3.1
    (2, "ECO-lite ensemble", "TSM ensemble", "multiply_adds", 2.7, 0.05),
    (2, "ECO-lite ensemble", "TSM ensemble", "parameters", 3.1, 0.05),
    (5, "SlowFast, ResNet-50", "TSM, non-local ResNet-50", "latency_ms", 1.3, 0.05),  # section 5.3.5
    (5, "X3D-M", "TSM, ResNeXt-101", "latency_ms", 1.8, 0.05),
    (5, "ir-CSN-152", "TSM, ResNeXt-101", "latency_ms", 3.4, 0.05),
    (6, "ECO, 16 frames", "TSM, 8 frames", "latency_ms", 1.75, 0.02),  # section 5.4
    (6, "I3D 3x1x1", "TSM, 8 frames", "latency_ms", 1.5, 0.02),
    (6, "I3D 3x1x1", "TSM, 8 frames", "clips_per_second", 0.55, 0.01),
]


@pytest.mark.parametrize(("table", "above", "below", "column", "ratio", "tolerance"), RATIOS)
def test_the_tables_have_the_ratios_of_the_text(
    table: int, above: str, below: str, column: str, ratio: float, tolerance: float
) -> None:
    rows = {row.label: row for row in TABLES[table].rows}
    assert getattr(rows[above], column) / getattr(rows[below], column) == pytest.approx(ratio, abs=tolerance)


def test_the_tables_have_the_gains_of_the_text() -> None:
    table_2 = {row.label: row for row in TABLES[2].rows}
    for label, gain in (("ECO, 16 frames", 4.2), ("Non-local I3D of [60]", 1.2)):
        assert table_2["TSM, 8 frames"].top1[SOMETHING] - table_2[label].top1[SOMETHING] == pytest.approx(gain)
    non_local = table_2["Non-local I3D of [60]"]
    assert round(non_local.clips * non_local.multiply_adds / table_2["TSM, 8 frames"].multiply_adds) == 10
    rows = TABLES[3].rows
    gains = [tsm.top1[KINETICS] - tsn.top1[KINETICS] for tsn, tsm in zip(rows[::2], rows[1::2], strict=True)]
    assert gains == pytest.approx([3.0, 3.4, 3.9, 1.1])
    assert all(row.network is not None for row in rows)


# TRN's parameters as printed are not those of its public code, and I3D 3x1x1's are 5 % above ours.
@pytest.mark.parametrize("number", TABLES)
def test_our_networks_cost_what_is_printed(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "count_network", count_network)  # which keeps its counts
    for entry in latency.entries_of_table(TABLES[number], []):
        row, values = entry.published, entry.count_values()
        assert row is not None and bool(entry.specs) == (row.network is not None)
        if entry.specs and row.multiply_adds is not None:
            assert values["multiply_adds"] == pytest.approx(row.multiply_adds, rel=0.02)
            if entry.label not in ("TRN multi-scale, ResNet-50", "I3D 3x1x1"):
                assert values["parameters"] == pytest.approx(row.parameters, rel=0.005)


def test_the_page_lists_every_script() -> None:
    page = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
    scripts = {path.name for path in (ROOT / "papers").glob("*.py") if "if __name__ ==" in path.read_text()}
    assert set(re.findall(r"`python papers/(\w+\.py)", page)) == scripts


def test_the_shipped_file_is_what_the_script_writes() -> None:
    fit = fit_summit.fit_table_3(BASE)
    text = fit_summit.machine_text(fit_summit.fitted(BASE, fit), fit)
    assert text == (ROOT / "configs/machines/summit.yaml").read_text(encoding="utf-8")


def test_the_shipped_machine_predicts_table_3_and_the_speed_of_the_i3ds() -> None:
    summit = load_machine("summit")
    errors = fit_summit.errors_of(summit)
    assert errors == pytest.approx({row.nodes: 0 for row in published.TIMED_ROWS}, abs=0.03)
    ratios = fit_summit.speed_ratios(summit)
    for arch, ratio in fit_summit.SPEED_RATIO.items():
        assert ratios[arch] == pytest.approx(ratio, rel=0.10)


def test_other_rows_do_not_turn_the_picture() -> None:
    # What is claimed of the fit must not hang on the one choice of rows: these are the ends and the middle.
    for nodes in ((1, 8, 64), (1, 16, 256), (1, 32, 384)):
        fit = fit_summit.fit_table_3(BASE, nodes)
        errors = fit_summit.errors_of(fit_summit.with_constants(BASE, fit))
        assert max(map(abs, errors.values())) < 0.03
        assert 0.037 < fit.seconds_per_clip < 0.040


def test_rows_that_leave_a_constant_open_are_refused() -> None:
    for nodes in ((8, 64, 384), (1, 8), (1, 8, 64, 384)):
        with pytest.raises(RunFailed, match="clips and passes apart"):
            fit_summit.fit_table_3(BASE, nodes)


def test_ring_latencies_alone_would_rise_more_than_the_times_did() -> None:
    # With the ring that the paper names and NCCL's hops, no room is left for stragglers.
    ring = load_machine("summit_published", ["network.algorithm=ring"])
    with pytest.raises(RunFailed, match="no positive constants"):
        fit_summit.fit_table_3(ring)
