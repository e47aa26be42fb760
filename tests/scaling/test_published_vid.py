"""Published figures of video detection: what the papers say of them, and the table of the docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from summit_train.scaling.published_vid import BESIDE, TABLE_9, Row

DOCS = Path(__file__).resolve().parents[2] / "docs" / "detection.md"


def test_table_9_has_the_gain_that_section_6_names() -> None:
    """ "especially on the fast moving objects, where TSM increases mAP by 4.6%"."""
    single, fgfa, tsm = TABLE_9
    assert tsm.fast - single.fast == pytest.approx(4.6)
    assert (single.online, fgfa.online, tsm.online) == (True, False, True)
    assert (single.latency, fgfa.latency, tsm.latency) == (1.0, 2.5, 1.0)


def cells(row: Row) -> str:
    return f"| {row.label} | {row.form} | {row.map} | {row.slow} | {row.medium} | {row.fast} | {row.source} |"


def test_the_docs_have_every_row() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("|") and line.count("|") == 8]
    assert rows[2:] == [cells(row) for row in (*TABLE_9, *BESIDE)]
