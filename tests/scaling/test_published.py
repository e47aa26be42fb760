"""The paper's figures as they are printed."""

from __future__ import annotations

import pytest

from summit_train.scaling import published


def test_table_3_is_the_papers() -> None:
    batches = [96, 384, 768, 1536, 3072, 6144, 12_288, 18_432, 24_576, 49_152]
    assert [row.global_batch for row in published.TABLE_3] == batches
    assert [row.gpus for row in published.TABLE_3] == [6, 48, 96, 192, 384, 768, 1536, 2304, 3072, 6144]
    # Against one node's 49 h 55 min: the node-seconds of 8, 256 and 384 nodes, in percent.
    one, *others = published.TIMED_ROWS
    shares = {row.nodes: 100 * (one.seconds or 0) / ((row.seconds or 1) * row.nodes) for row in others}
    assert shares[8] == pytest.approx(87.7, abs=0.05)
    assert shares[256] == pytest.approx(82.3, abs=0.05)
    assert shares[384] == pytest.approx(76.8, abs=0.05)
