"""Runs on a data set with bad videos: replaced and counted alike on any ranks, named, limited, or left out."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import WriteSpec
from tests.runs import assert_bit_equal, final_state, rewound
from tests.worlds import command, succeed, train

BAD_TRAINING = (3, 40)
BAD_TEST = 7


@pytest.fixture
def data(motion_set: Path, tmp_path: Path) -> dict[str, Any]:
    """The motion set with two training videos and one test video cut short; keys of a spec's data section."""
    folder = tmp_path / "data"
    shutil.copytree(motion_set, folder)
    for name, rows in (("train.csv", BAD_TRAINING), ("val.csv", (BAD_TEST,))):
        lines = (folder / name).read_text().splitlines()[1:]
        for row in rows:
            os.truncate(folder / lines[row].split(",")[0], 300)
    paths = {"train": str(folder / "train.csv"), "val": str(folder / "val.csv")}
    return {**paths, "on_bad_clip": "skip", "max_bad_fraction": 0.1}


def _bad(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "runs" / name / "bad_clips.jsonl").read_text().splitlines()]


def _counts(tmp_path: Path, name: str) -> list[int]:
    lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if record["kind"] == "step"]
    return [record["bad_clips"] for record in {record["step"]: record for record in steps}.values()]


def test_bad_clips_are_counted_named_and_shown_and_a_resumed_run_counts_on(
    write_spec: WriteSpec, tmp_path: Path, data: dict[str, Any]
) -> None:
    output = train(0, write_spec("whole", data=data))
    training = [record for record in _bad(tmp_path, "whole") if "test" not in record]
    replaced = [record for record in training if record["substitute"] is not None]
    assert [(record["epoch"], record["clip"]) for record in replaced].count((0, 3)) == 1
    assert {record["clip"] for record in replaced} == set(BAD_TRAINING) and len(replaced) == 4
    assert all(Path(record["path"]).exists() and record["reason"] for record in training)
    counts = _counts(tmp_path, "whole")
    assert counts == sorted(counts) and counts[-1] == len(training)
    assert f"{len(training)} bad clips" in output

    # The first epoch alone, then the rest: the same weights, the same list, the same count.
    rewound(tmp_path / "runs/whole", "resumed", 20)
    assert "step_00000010.pt" in train(0, write_spec("resumed", data=data))
    assert_bit_equal(final_state(tmp_path / "runs/whole"), final_state(tmp_path / "runs/resumed"))
    again = [record for record in _bad(tmp_path, "resumed") if "test" not in record]
    assert again == training and _counts(tmp_path, "resumed") == counts

    # The test: the bad video counts as wrong, and is named once for each evaluation.
    tested = [record for record in _bad(tmp_path, "whole") if "test" in record]
    assert {record["clip"] for record in tested} == {BAD_TEST}
    result = json.loads((tmp_path / "runs/whole/eval.json").read_text())
    assert (result["videos"], result["checkpoints"][0]["bad_videos"]) == (11, 1)


def test_too_many_bad_clips_or_by_default_one_end_the_run(
    write_spec: WriteSpec, tmp_path: Path, data: dict[str, Any]
) -> None:
    spec = write_spec(data={**data, "max_bad_fraction": 0.02})  # of 80 clips: 1.6
    status, output = command(2, "train", str(spec))
    assert status == 1, output
    assert "clips of epoch 0 could not be read, more than data.max_bad_fraction (0.02) of 80" in output
    assert output.count("could not be read") == 1
    assert {record["clip"] for record in _bad(tmp_path, "run")} >= set(BAD_TRAINING)
    status, output = command(0, "train", str(write_spec("fails", data={**data, "on_bad_clip": "fail"})))
    assert status == 1
    assert "rank 0" in output and ".mp4: " in output and "Traceback" not in output


def test_a_run_on_what_a_scan_writes_has_no_bad_clip(
    write_spec: WriteSpec, tmp_path: Path, data: dict[str, Any]
) -> None:
    keys = {**data, "on_bad_clip": "fail", "root": str(Path(data["train"]).parent)}
    for which in ("train", "val"):
        keys[which] = str(tmp_path / f"{which}.clean.csv")
        succeed(0, "data", "scan", data[which], "--out", keys[which], "--workers", "0")
    spec = str(write_spec(data=keys, schedule={"epochs": 1}))
    plan = json.loads(succeed(0, "plan", spec, "--json"))
    assert (plan["clips"], plan["steps_per_epoch"]) == (78, 9)
    train(0, spec)
    assert json.loads((tmp_path / "runs/run/eval.json").read_text())["videos"] == 10
