"""`summit-train simulate`: the contract's rows, what is said of them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from summit_train.cli.simulate import parse_nodes
from summit_train.core.errors import UserError
from summit_train.spec import dump_spec
from tests.detectors import detector_spec
from tests.worlds import Say, json_of

ROOT = Path(__file__).resolve().parents[2]
SPEC = str(ROOT / "configs/kinetics/tsm_r50_8f_1536gpu.yaml")
KEYS = {"nodes", "gpus", "global_batch", "steps_per_epoch", "step_s", "run_s", "efficiency", "node_hours"}


Simulate = Callable[..., dict[str, Any]]


@pytest.fixture
def simulated(say: Say) -> Simulate:
    """What `simulate SPEC ... --json` prints."""
    return lambda *words: json_of(say("simulate", SPEC, *words, "--json"))


def test_the_contracts_rows_of_the_papers_run(simulated: Simulate) -> None:
    """The golden words have the numbers of 256 nodes."""
    found = simulated("--machine", "summit")
    assert simulated("--site", "summit") == found  # its former name
    assert [row["nodes"] for row in found["rows"]] == [1, 8, 16, 32, 64, 128, 256, 384, 512, 1024]
    assert found["rows"][6]["efficiency"] > 0.8  # the paper's claim
    assert (found["clips"], found["manifest_counted"], found["last_batch"]) == (240_000, False, "keep")


def test_a_fixed_batch_and_a_measured_rate(simulated: Simulate) -> None:
    words = ("--machine", "summit", "--nodes", "64", "--fixed-batch", "--clips-per-second", "100")
    row = simulated(*words, "--set", "last_batch=drop")["rows"][0]
    assert row["steps_per_epoch"] == 19
    assert (row["accumulation"], row["global_batch"]) == (4, 12_288)
    assert row["parts"]["compute_s"] == pytest.approx(4 * 8 / 100)


def test_ones_own_data_set_is_counted(simulated: Simulate, tmp_path: Path) -> None:
    (tmp_path / "clips.csv").write_text("path,label\n" + "".join(f"{i}.mp4,0\n" for i in range(960)))
    data = [f"data.{which}={tmp_path}/clips.csv" for which in ("train", "val")]
    found = simulated("--machine", "summit", "--nodes", "1", *data)
    assert (found["clips"], found["videos"], found["manifest_counted"]) == (960, 960, True)
    assert found["rows"][0]["steps_per_epoch"] == 20


def test_training_sees_the_spans_of_a_list_with_boxes(say: Say, tmp_path: Path) -> None:
    path = tmp_path / "boxes.csv"
    rows = [f"a.mp4,{frame},0,{frame % 2},1,1,9,9\n" for frame in range(50)]
    path.write_text("video,frame,track,label,left,top,width,height\n" + "".join(rows))
    data = {"train": str(path), "val": str(path), "root": str(tmp_path), "span_frames": 8}
    spec = detector_spec(data=data, precision="fp32", scale={"gpus": None, "clips_per_gpu": 1})
    (tmp_path / "spec.yaml").write_text(dump_spec(spec))
    found = json_of(say("simulate", tmp_path / "spec.yaml", "--machine", "summit", "--nodes", "1", "--json"))
    assert (found["clips"], found["videos"]) == (6, 1)


def test_each_row_says_what_failures_cost(simulated: Simulate) -> None:
    found = simulated("--machine", "summit", "--set", "failures.gpu_hours=7440", "checkpoint.background=true")
    costs = [row["losses"] for row in found["rows"]]
    assert costs[6]["mtbf_s"] == 7440 * 3600 / 1536
    for key in ("goodput", "daly_s", "young_s"):
        values = [cost[key] for cost in costs]
        assert values == sorted(values, reverse=True)
    assert all(cost["own_goodput"] <= cost["goodput"] for cost in costs)


@pytest.mark.parametrize("text", ["", "0", "8,", "...,8", "8,...", "8,...,x", "-1", "1.5", "²"])
def test_nodes_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="must be numbers above 0 with commas") as caught:
        parse_nodes(text)
    assert type(caught.value) is UserError  # of an option, and of no machine
