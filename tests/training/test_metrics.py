"""What a run writes down and shows."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from summit_train.core.errors import describe
from summit_train.core.run_log import EvalRecord, StartRecord, StepRecord
from summit_train.training.metrics import RunLog
from tests.runs import full_disk, records

_STEP = StepRecord(
    step=1, epoch=0, loss=1.25, lr=0.1, clips_per_second=8.0, step_s=1.0, data_wait_s=0.25, top1=50.0, bad_clips=0
)


def _step(step: int, **values: Any) -> StepRecord:
    return replace(_STEP, step=step, **values)


def _log(folder: Path, start: int = 0) -> RunLog:
    return RunLog(folder, "a b", start, 4)


def _scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """The (step, value) pairs that TensorBoard shows."""
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_records_are_lines_of_json_and_events(tmp_path: Path) -> None:
    with _log(tmp_path) as log:
        log.step(_step(1))
        log.step(_step(2, loss=math.nan))
        log.write(EvalRecord(epoch=1, step=2, measures={"top1": 75.0, "top5": 100.0}, videos=4))
    assert [(record["step"], record["loss"]) for record in records(tmp_path, "step")] == [(1, 1.25), (2, None)]
    assert [record["step"] for record in records(tmp_path, "eval")] == [2]
    assert _scalars(tmp_path, "step/loss") == [(1, 1.25)] and _scalars(tmp_path, "eval/top1") == [(2, 75.0)]


def test_a_resumed_run_hides_the_events_beyond_its_checkpoint(tmp_path: Path) -> None:
    """Killed after step 4, resumed from the checkpoint of step 2; the second file counts from the restart."""
    for start, steps in ((0, range(1, 5)), (2, range(3, 4))):
        with _log(tmp_path, start) as log:
            for step in steps:
                log.step(_step(step))
        (path,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*.*")
        path.rename(path.with_name(f"events.out.tfevents.{start}"))  # read in the order of their names
    assert [step for step, _ in _scalars(tmp_path, "step/loss")] == [1, 2, 3]


def test_half_a_line_of_a_killed_run_stays_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "st')
    with _log(tmp_path) as log:
        log.write(StartRecord(step=0, ranks=2))
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])
    assert record["kind"] == "start" and record["time"] <= time.time()


def test_the_noise_scale_is_shown_until_the_next_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with _log(tmp_path) as log:
        log.step(_step(2, noise_scale=math.inf))
        log.step(_step(3, noise_scale=1234.5))
        log.step(_step(4))
    assert [record.get("noise_scale", "none") for record in records(tmp_path, "step")] == [None, 1234.5, "none"]
    assert "data wait 25 %  noise scale 1,230 clips  0 s left" in capsys.readouterr().out
    assert _scalars(tmp_path, "step/noise_scale") == [(3, 1234.5)]


def test_plain_lines_where_the_output_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last step is always shown; the ones before only every ten seconds."""
    with _log(tmp_path) as log:
        for step in range(1, 5):
            log.step(_step(step))
        log.say("[bold]as it is[/bold]")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "a b: step 4/4  epoch 0  loss 1.2500  lr 0.1  8.0 clips/s  data wait 25 %  0 s left"
    assert said[1] == "[bold]as it is[/bold]"


def test_a_full_disk_is_named_with_the_file_of_the_records(tmp_path: Path) -> None:
    log = RunLog(tmp_path, "t", 0, 1)
    log._events.flush()  # by a thread of its own, which may be slow
    with log, pytest.raises(OSError, match="File too large") as caught, full_disk():
        log.write(StartRecord(step=0, ranks=2))
    assert describe(caught.value) == f"{tmp_path}/metrics.jsonl: File too large"
