"""papers/figure3.py on tiny networks: what is measured fits together. How long anything takes is never asked."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from summit_train.spec import load_spec
from tests.bench.conftest import SHORT, TINY
from tests.conftest import WriteSpec
from tests.papers.conftest import Script
from tests.worlds import bench_script

figure3, published = bench_script("figure3"), bench_script("published")


@pytest.fixture
def specs(write_spec: WriteSpec) -> list[str]:
    return [str(write_spec("one")), str(write_spec("other", model={"arch": "tsn"}))]


def test_table_1_of_other_networks(specs: list[str], script: Script, tmp_path: Path) -> None:
    out = tmp_path / "table1.png"
    words = ("--specs", *specs, "--batch", "3", "--peak", "1e9", "--out", str(out), *SHORT)
    values = script(figure3, "table1", *words)
    for row in values["rows"]:
        assert (row["parameters"], row["multiply_adds"]) == (TINY.parameters, TINY.multiply_adds)
        assert row["published"] is None and row["input_bytes"] == 4 * 3 * 32**2
        assert row["clips_per_second"]["max"] == pytest.approx(3 / row["pass_s"]["min"])
        assert row["utilisation"]["max"] == pytest.approx(3 * TINY.multiply_adds / row["pass_s"]["min"] / 1e9)
    assert values["rows"][1]["relative_throughput"] == {"min": 1, "median": 1, "max": 1}
    assert out.read_bytes().startswith(b"\x89PNG") and json.loads((tmp_path / "table1.json").read_text()) == values
    values["rows"][0]["published"] = published.table_1_row(load_spec("configs/kinetics/tsm_r50_8f.yaml"))
    below = figure3.table_1_text(values).splitlines()[6].split()
    assert below == ["the", "paper", "24.3", "M", "33", "G", "27.4", "k", "84.8", "2.0", "x", "2.02", "x"]


def test_the_papers_values_are_those_of_the_papers_networks_alone() -> None:
    figure3.add_networks(parser := argparse.ArgumentParser())
    paths = parser.get_default("specs")
    assert paths == [f"shipped:kinetics/{name}" for name in figure3.PAPERS]
    rows = [published.table_1_row(load_spec(path)) for path in paths]
    assert [row and row["clips_per_second"] for row in rows] == [63.1, 41.9, 84.8]
    for other in ("data.crop=112", "model.non_local=tsm"):
        assert published.table_1_row(load_spec(paths[2], [other])) is None
    assert published.label_of(load_spec(paths[2])) == "TSM, 8 frames"


@pytest.mark.parametrize("measured", [True, False])
def test_figure_3b_takes_the_wait_from_the_step_or_from_a_rate(
    measured: bool, specs: list[str], script: Script, tmp_path: Path
) -> None:
    words = ["b", "--specs", *specs, "--batch", "2", "--out", str(tmp_path / "b.svg"), *SHORT]
    values = script(figure3, *words, *([] if measured else ["--frames-per-second", "1"]))
    for row, spec in zip(values["rows"], values["steps"], strict=True):
        assert row["step_s"] == pytest.approx(row["busy_s"] + row["data_wait_s"])
        assert (row["clips_per_step"], row["frames_per_step"]) == (2, 8)
        if measured:
            assert row["data_wait_s"] == spec["phases_s"]["data_wait"]["median"] > 0
        else:
            assert row["step_s"] == pytest.approx(8)  # 8 frames at one a second
    assert values["bench"] == "b"
    assert values["projection"] is not measured and ("PROJECTION" in values["source"]) is not measured
    assert b"wait for data" in (tmp_path / "b.svg").read_bytes()


@pytest.mark.usefixtures("forked_ranks")
def test_figure_3c_names_the_networks_as_the_paper_does_and_its_bounds(
    specs: list[str], script: Script, tmp_path: Path
) -> None:
    words = ("--specs", *specs, "--batch", "2", "--synthetic", "--repeats", "1", "--steps", "1", "--warm-up", "1")
    values = script(figure3, "c", *words, "--ranks", "1,2", "--out", str(tmp_path / "c.svg"))
    assert [network["label"] for network in values["networks"]] == ["TSM, 4 frames", "TSN, 4 frames"]
    assert [[row["ranks"] for row in network["rows"]] for network in values["networks"]] == [[1, 2]] * 2
    bounds = "paper, 8 nodes of 4 Tesla P100s: TSM over 98 % and I3D 3x3x3 under 85 %"
    assert figure3.scalability_text(values).splitlines()[-1] == bounds
    drawn = (tmp_path / "c.svg").read_bytes()
    assert b"Paper, Figure 3c, 8 nodes of 4" in drawn and b"scalability" in drawn
