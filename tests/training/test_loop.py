"""When a run validates, and how a step reads its micro-batches."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summit_train.core.comm import World
from summit_train.data.batches.loader import MicroBatch
from summit_train.plan import validates
from summit_train.spec import spec_from_values
from summit_train.training.step import TrainStep
from tests.conftest import WriteSpec
from tests.runs import records
from tests.worlds import forked, main_without_reports


@pytest.mark.parametrize(("every", "epochs"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (9, [5])])
def test_a_run_validates_every_so_often_and_after_its_last_epoch(every: int, epochs: list[int]) -> None:
    data = {"train": "train.csv", "val": "val.csv", "num_frames": 8}
    spec = spec_from_values(
        {
            "name": "run",
            "model": {"arch": "tsm", "num_classes": 4},
            "data": data,
            "scale": {"gpus": 1, "clips_per_gpu": 2},
            "schedule": {"epochs": 5},
            "evaluate": {"every_epochs": every},
        },
        "here",
    )
    assert [epoch for epoch in range(1, 6) if validates(spec, epoch)] == epochs


def test_a_step_holds_the_clips_of_a_micro_batch_and_those_read_ahead(write_spec: WriteSpec, tmp_path: Path) -> None:
    """Steps of 20 micro-batches in a process that may open few files; the clips of a step alone would be 60 of them."""
    spec = write_spec(data={"workers": 2}, scale={"gpus": 20, "clips_per_gpu": 2}, schedule={"epochs": 1})
    honest, held, files, before = TrainStep._forward, list[int](), list[int](), 0

    def with_clips() -> int:
        batches = [one.clips for one in gc.get_objects() if type(one) is MicroBatch and len(one.clips)]
        # A tensor shares the memory of the array that it was made of.
        return len({clips.ctypes.data if isinstance(clips, np.ndarray) else clips.data_ptr() for clips in batches})

    def forward(self: Any, *arguments: Any) -> Any:
        held.append(with_clips() - before)
        files.append(len(os.listdir("/proc/self/fd")))
        return honest(self, *arguments)

    def work() -> int:
        nonlocal before
        before = with_clips()  # of tests that this process ran before
        TrainStep._forward = forward  # type: ignore[method-assign]
        status = main_without_reports(["train", str(spec)])
        print("held", max(held), "files", max(files) - min(files))
        return status

    status, output = forked(0, work)
    assert status == 0, output
    most, more_files = (int(output.split(f"{word} ")[1].split()[0]) for word in ("held", "files"))
    assert most <= 1 + 2 * 2 + 1 and more_files <= 3 * (1 + 2 * 2 + 1), output
    steps = records(tmp_path / "runs/run", "step")
    assert [step["step"] for step in steps] == [1, 2]
    assert all(0 < step["data_wait_s"] < step["step_s"] for step in steps)


def test_a_limit_of_open_files_that_is_too_low_is_said_once(
    write_spec: WriteSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("summit_train.training.run.raise_open_files", lambda: 64)
    monkeypatch.setattr(World, "connections", 3)
    status, output = forked(0, lambda: main_without_reports(["train", str(write_spec(schedule={"epochs": 1}))]))
    assert status == 0 and output.count("open files: a rank may need 103, the limit is 64") == 1, output
