"""papers/figure4.py: a sweep's accuracies beside those of Table 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.papers.conftest import Script
from tests.worlds import bench_script

figure4 = bench_script("figure4")
SWEEP = "shipped:sweeps/table3"


def test_the_published_accuracies_are_in_the_rows_of_their_batches(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    as_values = figure4.as_values

    def one_done(*args: Any) -> dict[str, Any]:
        values = as_values(*args)
        values["runs"][6] |= {"state": "done", "top1": 73.5, "top1_std": 0.25}
        values["runs"][7] |= {"state": "running", "top1": 12.5}  # of a validation in training
        return dict(values)

    monkeypatch.setattr(figure4, "as_values", one_done)
    rows = script(figure4, SWEEP, "--out", "figure4.svg")["runs"]
    assert [row["reference_top1"] for row in rows] == [
        74.12, 74.12, 74.18, 74.14, 74.10, 73.99, 73.99, 72.52, 69.80, 62.22
    ]  # fmt: skip
    assert [row["top1"] for row in rows] == [*[None] * 6, 73.5, *[None] * 3]
    assert b"<!-- published: Lin, Gan, Han (2019), Table 3 -->" in Path("figure4.svg").read_bytes()
    assert figure4.main([SWEEP]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[7].split() == ["nodes-256", "done", "12,288", "73.50", "±", "0.25", "%", "73.99", "±", "0.07", "%"]
    assert table[1].split() == ["nodes-1", "missing", "96", "—", "74.12", "±", "0.11", "%"]
    assert figure4.main([SWEEP, "--out", "a.jpg"]) == 2 and "ends in .png" in capsys.readouterr().err
