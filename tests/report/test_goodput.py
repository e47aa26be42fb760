"""Where the time of a run went, worked out by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from summit_train.report.goodput import goodput_values, restarts, time_spent
from summit_train.report.records import RunRecord

T0 = 1_700_000_000.0


def _step(step: int, time: float, step_s: float = 10.0, **more: object) -> dict[str, Any]:
    return {"kind": "step", "step": step, "epoch": 0, "time": T0 + time, "step_s": step_s, **more}


def _start(step: int, time: float, startup_s: float) -> dict[str, Any]:
    return {"kind": "start", "step": step, "ranks": 2, "time": T0 + time, "startup_s": startup_s}


# A first job from -20 s: three steps of 10 s, a checkpoint after the second of 4 s, killed after the third. A second
# one, from 100 s, starts training at 130 s from step 2: three steps, one of them skipped, a validation of 5 s, and a
# checkpoint of 6 s. It ends at 172 s. A third one comes an hour later to repeat a final evaluation.
LINES = [
    _start(0, 0, 20),
    _step(1, 10),
    _step(2, 20),
    {"kind": "checkpoint", "step": 2, "time": T0 + 24, "seconds": 4.0},
    _step(3, 35),
    _start(2, 130, 30),
    _step(3, 140),
    _step(4, 150, skipped=1),
    _step(5, 160, 8.0),
    {"kind": "eval", "epoch": 1, "step": 5, "top1": 50.0, "time": T0 + 165, "seconds": 5.0},
    {"kind": "checkpoint", "step": 5, "time": T0 + 172, "seconds": 6.0},
    {"kind": "log_lost", "time": T0 + 180, "reason": "Broken pipe"},
    _start(5, 3772, 30),
    {"kind": "done", "time": T0 + 3800},
]


def test_each_second_of_two_jobs_is_counted_once(write_run):
    path = write_run(lines=LINES)
    spent = time_spent(RunRecord(path))
    assert spent is not None and asdict(spent) == {
        "steps": 38.0,  # 1, 2, 3 of the second job, 5
        "lost_steps": 20.0,  # 3 of the first job, 4
        "checkpoints": 10.0,
        "validations": 5.0,
        "startup": 50.0,
        "restarts": 0.0,
        "between_jobs": 65.0,  # from 35 s to 100 s
        "other": 4.0,  # 1 s before step 3, 2 s before the second one's step 5, 1 s before its checkpoint
    }
    assert spent.total == 192.0  # from -20 s to 172 s
    assert spent.goodput == 38 / 192 and spent.goodput_in_jobs == 38 / 127
    values = goodput_values(path)
    assert values == {"goodput": 38 / 192, "goodput_in_jobs": 38 / 127, "time_s": asdict(spent)}


def test_a_restart_in_the_same_job_is_not_the_queue(write_run):
    path = write_run(lines=[line | ({"job": str(int(T0) - 20)} if line["kind"] == "start" else {}) for line in LINES])
    spent = time_spent(RunRecord(path))
    assert spent is not None and (spent.restarts, spent.between_jobs, spent.total) == (65.0, 0.0, 192.0)
    assert spent.goodput == spent.goodput_in_jobs == 38 / 192


def test_restarts_are_read_up_to_what_a_full_disk_or_a_lost_node_has_left(write_run):
    path = write_run()
    (path / "job").mkdir()
    (path / "job/restarts").write_bytes(b"2026-01-02T03:04:05+0100 job 7: exit status 1\n\n\0\xff\n2026-01")
    assert restarts(path) == ["job 7: exit status 1"]


@pytest.mark.parametrize("lines", [[], LINES[:1], LINES[1:], [*LINES[:4], {**LINES[4], "time": None}]])
def test_without_the_times_of_all_records_there_is_no_goodput(write_run, lines):
    path = write_run(lines=lines)
    assert time_spent(RunRecord(path)) is None and goodput_values(path) == {}
    (path / "metrics.jsonl").unlink()
    assert goodput_values(path) == {}


def test_a_start_that_was_lost_counts_from_the_start_of_its_job(write_run):
    """The first job's script begins at -60 s, and its ranks fail before a record; those of -20 s go on."""
    job = str(int(T0) - 60)
    lines = [line | ({"job": job} if line["kind"] == "start" and line["time"] == T0 else {}) for line in LINES]
    spent = time_spent(RunRecord(write_run(lines=lines)))
    assert spent is not None and (spent.startup, spent.total, spent.between_jobs) == (90.0, 232.0, 65.0)
