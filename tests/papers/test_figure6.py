"""papers/figure6.py: the rows of Table 3 beside what `simulate` predicts, and the figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.papers.conftest import Script
from tests.worlds import bench_script

figure6 = bench_script("figure6")
PAPER = ("shipped:kinetics/tsm_r50_8f_1536gpu", "--clips", "240000", "--machine")


def test_the_rows_of_table_3(script: Script) -> None:
    rows = {row["nodes"]: row for row in script(figure6, *PAPER, "summit")["rows"]}
    known = {nodes: row["published_run_s"] for nodes, row in rows.items() if row["published_run_s"]}
    assert list(known) == [8, 16, 32, 64, 128, 256, 384]
    for nodes, seconds in known.items():
        assert rows[nodes]["run_s"] == pytest.approx(seconds, rel=0.03)
    assert [nodes for nodes, row in rows.items() if row["projection"]] == [1, 512, 1024]
    assert rows[384]["accuracy"]["top1"] == 72.52 and rows[1]["accuracy"] is None


@pytest.mark.parametrize("words", [("summit", "model.arch=tsn"), ("ib_cluster",)])
def test_another_network_or_machine_has_no_published_times(words: tuple[str, ...], script: Script) -> None:
    (row,) = script(figure6, *PAPER, *words, "--nodes", "8")["rows"]
    assert row["projection"] and row["published_run_s"] is None


def test_the_table_and_the_figure(script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figure.png"
    assert figure6.main([*PAPER, "summit", "--nodes", "3,...,20,256", "--out", str(path)]) == 0
    text = capsys.readouterr().out.splitlines()
    assert path.read_bytes().startswith(b"\x89PNG") and text[-1] == f"drawn: {path}"
    (row,) = (line for line in text if line.endswith("top-1"))
    last = text[text.index(row) + 5]
    assert " ".join(last.split()) == "256 28,382 90.2 % 14 min 26 s 61.6 38 s 14 min 13 s 73.99 ± 0.07"
    wide = ("--nodes", "8192")
    for out, message in (("a.jpg", "ends in .png, .svg, .pdf"), ("/dev/null/a.png", "cannot be written")):
        assert figure6.main([*PAPER, "summit", *wide, "--out", out]) == 2
        assert message in capsys.readouterr().err
