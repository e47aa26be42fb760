"""A run's log: what is written is read, broken lines are named, and a resume takes back what follows it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from summit_train.core.run_log import (
    KINDS,
    EvalRecord,
    RankTimesRecord,
    Replay,
    StepRecord,
    TrustRatioRecord,
    line_of,
)

# A record of each kind as a run writes it.
LINES = (Path(__file__).parents[1] / "golden/records.jsonl").read_text().splitlines(keepends=True)


def read(folder: Path, *lines: dict[str, Any] | str | bytes) -> Replay:
    """What a log of these lines says. A text is written as it is."""
    parts = [f"{json.dumps(line)}\n" if isinstance(line, dict) else line for line in lines]
    content = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
    (folder / "metrics.jsonl").write_bytes(content)
    return Replay.of(folder)


def step(number: int, **values: object) -> dict[str, Any]:
    return {"kind": "step", "step": number, "epoch": 0, "step_s": 1.0, "data_wait_s": 0.25, **values}


def start(at: int, **values: object) -> dict[str, Any]:
    return {"kind": "start", "step": at, "ranks": 2, **values}


def test_a_record_of_each_kind_is_one_line_and_comes_back(tmp_path: Path) -> None:
    log = read(tmp_path, *LINES)
    assert log.problems == [] and {record.kind for record in log.records} == set(KINDS)
    for line, record in zip(LINES, log.records, strict=True):
        assert type(record) is KINDS[record.kind] and line_of(record).decode() == line
    assert math.isnan(log.steps[0].loss) and log.extensions[0].before == 3


def test_what_only_some_steps_measure_is_in_their_lines_alone() -> None:
    measured = json.loads(line_of(StepRecord(step=1, epoch=0, noise_scale=math.inf, gradient_square=-1.0)))
    assert (measured["noise_scale"], measured["gradient_square"]) == (None, -1.0)
    assert "gradient_variance" not in measured


def test_the_numbers_of_a_record_for_exports_and_for_tensorboard() -> None:
    one = StepRecord(step=1, epoch=2, loss=0.5, top1=None, skipped=True, bad_clips=3, noise_scale=math.inf, lr=0.1)
    assert one.numbers() == {"epoch": 2, "loss": 0.5, "lr": 0.1, "bad_clips": 3}
    assert one.scalars() == {"loss": 0.5, "lr": 0.1}
    found = EvalRecord(epoch=1, step=2, measures={"top1": 75.0, "mine": None}, val_loss=0.5, classes=(5.0,), videos=4)
    assert list(found.numbers().items()) == [("epoch", 1), ("val_loss", 0.5), ("videos", 4), ("top1", 75.0)]
    assert found.scalars() == {"val_loss": 0.5, "top1": 75.0}
    assert TrustRatioRecord(step=3, ratios={"a": 2.0}).scalars() == {"a": 2.0}


TORN = '{"kind": "step", "step": 6, "epo'


@pytest.mark.parametrize(
    ("last", "steps", "starts"),
    [
        (TORN, [1, 2, 3, 4, 5], [0]),
        (f"{TORN}{json.dumps(start(4))}\n", [1, 2, 3, 4], [0, 4]),  # the next start appended its record
        (json.dumps(start(4)), [1, 2, 3, 4], [0, 4]),  # lacks only its end of line
    ],
)
def test_a_torn_last_line_is_left_out_and_named(tmp_path: Path, last: str, steps: list[int], starts: list[int]) -> None:
    log = read(tmp_path, start(0), *map(step, range(1, 6)), last)
    assert [one.step for one in log.steps] == steps and [one.step for one in log.starts] == starts
    assert ["line 7 is left out: torn" in problem for problem in log.problems] == [True] * ("epo" in last)


UNREADABLE = [
    (b"\xff\xfe\x00\n", "torn"),
    (b"[1, 2]\n", "torn"),
    (b'{"step": 1}\n', "no 'kind'"),
    (b'{"kind": "step", "step": 1}\n', "no 'epoch'"),
    (b'{"kind": "step", "step": 1.5, "epoch": 0}\n', "step: must be a whole number, got 1.5"),
    (b'{"kind": "step", "step": "1", "epoch": 0}\n', "step: must be a whole number, got '1'"),
    (b'{"kind": "step", "step": 1, "epoch": 0, "loss": [1]}\n', r"loss: must be a number, got [1]"),
    (b'{"kind": "step", "step": 1, "epoch": 0, "skipped": 2}\n', "skipped: must be true or false, got 2"),
    (b'{"kind": "step", "step": 1, "epoch": 0, "time": []}\n', "time: must be a number, got []"),
    (b'{"kind": "checkpoint", "step": 1e999, "seconds": 1}\n', "step: must be a whole number, got inf"),
    (b'{"kind": "checkpoint", "step": 1, "seconds": 1%s}\n' % (b"0" * 400), "seconds: int too large"),
    (b'{"kind": "warning", "step": 1, "text": 5}\n', "text: must be a text, got 5"),
    (b'{"kind": "rank_times", "step": 1, "compute_s": [], "data_wait_s": []}\n', "must have a number for each rank"),
    (b'{"kind": "trust_ratio", "step": 1, "ratios": [1]}\n', "ratios: must be an object, got [1]"),
    (b'{"kind": "start", "step": 1, "forced": "seed"}\n', "forced: must be a list, got 'seed'"),
    (b"[" * 200_000 + b"}\n", "its values are nested too deeply"),
]  # fmt: skip


def test_lines_that_are_no_records_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    good = {"kind": "checkpoint", "step": 1, "seconds": 0.5}
    log = read(tmp_path, good, *(line for line, _ in UNREADABLE), "\n", {"kind": "of tomorrow"}, good)
    assert len(log.checkpoints) == len(log.records) == 2
    for i, (problem, (_, reason)) in enumerate(zip(log.problems, UNREADABLE, strict=True), start=2):
        assert problem.startswith(f"metrics.jsonl, line {i} is left out: ") and reason in problem, problem


def test_without_a_log_there_are_no_records_and_a_folder_in_its_place_is_named(tmp_path: Path) -> None:
    log = Replay.of(tmp_path)
    assert (log.records, log.problems, log.steps, log.last_step, log.seconds) == ([], [], [], 0, 0)
    (tmp_path / "metrics.jsonl").mkdir()
    assert Replay.of(tmp_path).problems == ["metrics.jsonl: cannot be read to its end (Is a directory)"]


def test_values_that_are_no_numbers_are_unknown(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        step(1, loss=None, top1="x", skipped=True, step_s=math.inf, noise_scale=True),
        {"kind": "eval", "epoch": 1, "step": 1, "top1": "x", "top5": 4, "classes": ["x", 1], "videos": 2.0},
    )
    (one,), (validation,) = log.steps, log.evals
    assert math.isnan(one.loss) and one.top1 is one.noise_scale is None and log.skipped_steps == [1]
    assert (validation.of("top1"), validation.of("top5"), validation.of("none")) == (None, 4, None)
    assert (validation.classes, validation.videos) == ((None, 1), 2) and log.seconds == 0


def test_a_line_has_no_nan_at_any_depth(tmp_path: Path) -> None:
    records = [
        TrustRatioRecord(step=1, ratios={"a": math.nan, "b": 2.0}),
        RankTimesRecord(step=1, compute_s=(math.inf, 1.0), data_wait_s=(0.5, -math.inf)),
        EvalRecord(epoch=1, step=1, measures={"top1": math.nan}, classes=(math.nan, 50.0)),
    ]
    lines = [json.loads(line_of(record), parse_constant=pytest.fail) for record in records]
    assert lines[0]["ratios"] == {"a": None, "b": 2.0}
    assert (lines[1]["compute_s"], lines[1]["data_wait_s"]) == ([None, 1.0], [0.5, None])
    assert (lines[2]["top1"], lines[2]["classes"]) == (None, [None, 50.0])
    log = read(tmp_path, *lines)
    assert log.problems == []
    ratios, times = log.trust_ratios[0].ratios, log.rank_times[0]
    assert math.isnan(ratios["a"]) and ratios["b"] == 2.0
    assert math.isnan(times.compute_s[0]) and times.compute_s[1] == 1.0 and math.isnan(times.data_wait_s[1])
    assert log.evals[0].classes == (None, 50.0)


def test_a_repeated_step_keeps_its_last_record(tmp_path: Path) -> None:
    log = read(tmp_path, step(1), step(2), step(1, loss=123.0))
    assert [(one.step, one.loss == 123.0) for one in log.steps] == [(1, True), (2, False)] and log.last_step == 2


def test_a_resume_replaces_what_it_does_again(tmp_path: Path) -> None:
    """Steps 4 and 5 of the killed process are no part of the weights that the run has now."""
    ratios = {"kind": "trust_ratio", "ratios": {"a": 1.0}}
    lines = [
        start(0), *map(step, range(1, 4)), {"kind": "checkpoint", "step": 2, "seconds": 0.25},
        *({"kind": "eval", "epoch": epoch, "step": 2 * epoch, "seconds": 0.5} for epoch in (1, 2)),
        step(4), step(5), ratios | {"step": 2}, ratios | {"step": 3}, {"kind": "warning", "step": 5, "text": "x"},
        start(2), step(3, loss=7.0),
    ]  # fmt: skip
    log = read(tmp_path, *lines)
    assert log.last_step == 3 and [one.loss for one in log.steps[2:]] == [7.0]
    assert [one.steps_again for one in log.starts] == [0, 3]
    assert [[one.step for one in kept] for kept in (log.evals, log.trust_ratios, log.warnings)] == [[2], [2], []]
    assert len(log.checkpoints) == 1 and log.seconds == 6 * 1.0 + 2 * 0.5 + 0.25
    assert read(tmp_path, start(20)).last_step == 20


def test_the_last_decision_of_an_epoch_and_an_end_that_steps_followed(tmp_path: Path) -> None:
    batch = {"kind": "batch", "global_batch": 8, "accuracy": 1.0, "best": 2.0}
    more = {"kind": "more_epochs", "from": 3, "to": 4}
    stop = {"kind": "early_stop", "epoch": 1, "step": 2, "measure": "top1", "best_epoch": 1}
    decided = [batch | {"epoch": epoch, "clips_per_gpu": clips} for epoch, clips in ((2, 4), (1, 2), (2, 8))]
    log = read(tmp_path, *decided, more | {"step": 9}, more | {"step": 4, "to": 5}, step(2), stop)
    assert [(one.epoch, one.clips_per_gpu) for one in log.batches] == [(1, 2), (2, 8)]
    assert [(one.step, one.before, one.after) for one in log.extensions] == [(4, 3, 5), (9, 3, 4)]
    assert log.early_stop is not None and log.early_stop.best is None
    assert read(tmp_path, step(2), stop, step(3)).early_stop is None
