"""The paper's figures as they are printed, and its accuracy between its batches."""

from __future__ import annotations

import pytest

from summit_train.scaling import published


def test_table_3_is_the_papers() -> None:
    batches = [96, 384, 768, 1536, 3072, 6144, 12_288, 18_432, 24_576, 49_152]
    assert [row.global_batch for row in published.TABLE_3] == batches
    assert [row.gpus for row in published.TABLE_3] == [6, 48, 96, 192, 384, 768, 1536, 2304, 3072, 6144]
    # Against one node's 49 h 55 min: the node-seconds of 8, 256 and 384 nodes, in percent.
    one, *others = published.timed_rows()
    shares = {row.nodes: 100 * (one.seconds or 0) / ((row.seconds or 1) * row.nodes) for row in others}
    assert shares[8] == pytest.approx(87.7, abs=0.05)
    assert shares[256] == pytest.approx(82.3, abs=0.05)
    assert shares[384] == pytest.approx(76.8, abs=0.05)


def test_accuracy_at_the_papers_batches_and_halfway() -> None:
    assert published.accuracy(12_288) == {"top1": 73.99, "std": 0.07, "interpolated": False}
    # Between 24,576 and 49,152 halfway on a logarithmic axis is the root of their product.
    between = published.accuracy(34_755)
    assert between is not None and between["interpolated"]
    assert between["top1"] == pytest.approx((69.80 + 62.22) / 2, abs=0.01)
    assert [published.accuracy(batch) for batch in (1, 95, 49_153)] == [None] * 3  # not tried by the paper


def test_a_row_is_found_by_batch_and_gpus() -> None:
    row = published.row_of(12_288, 1536)
    assert row is not None and row.seconds == 853
    assert published.row_of(12_288, 768) is None
