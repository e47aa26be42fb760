"""A request to stop is heard in the validation, the final evaluation and the report, and nothing is done twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from summit_train.__main__ import main
from summit_train.cli import pipeline
from summit_train.evaluation.scoring import Scorer
from summit_train.models.fast import execution
from summit_train.models.fast.kernels import loaded
from summit_train.report import page
from summit_train.training.step import TrainStep
from summit_train.training.timer import StepTimer
from tests.conftest import WriteSpec
from tests.runs import records, steps_of
from tests.worlds import PATIENCE_S, Say, forked, lines, main_without_reports, start, succeed, train_signalled

VIDEOS = 11


class Scoring:
    """The videos that this process has scored, in their order. Asks it to stop when it has scored `stop_at`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.videos: list[int] = []
        self.stop_at = -1
        honest = Scorer.results

        def results(scorer: Scorer, model: Any, videos: Any) -> Iterator[Any]:
            for video, result in zip(videos, honest(scorer, model, videos), strict=True):
                self.videos.append(video)
                if len(self.videos) == self.stop_at:
                    os.kill(os.getpid(), signal.SIGUSR2)
                yield result

        monkeypatch.setattr(Scorer, "results", results)


@pytest.fixture
def scoring(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scoring]:
    """A process that leaves on request ignores the signals from then on; this one stays."""
    former = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)}
    yield Scoring(monkeypatch)
    for number, handler in former.items():
        signal.signal(number, handler)


def test_a_run_carries_on_without_the_reader_of_its_log(write_spec: WriteSpec, tmp_path: Path) -> None:
    spec = write_spec("t", schedule={"epochs": 1, "warmup_epochs": 0})
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        process = start(0, "-m", "summit_train", "train", str(spec), output=pipe, errors=subprocess.PIPE)
        _, err = process.communicate(timeout=PATIENCE_S)
    lost = "warning: the rest of this log is lost: standard output: Broken pipe\n"
    assert (process.returncode, err) == (0, lost)
    (run,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    assert [record["reason"] for record in records(run, "log_lost")] == ["Broken pipe"]
    assert (run / "report.html").is_file()


@pytest.fixture
def train(say: Say) -> Say:
    """Runs `train SPEC ...` in this process."""
    return partial(say, "train")


def _records(run: Path, kind: str) -> list[dict[str, Any]]:
    return [{**record, "seconds": 0, "time": 0} for record in records(run, kind)]


def _accuracy(run: Path) -> Any:
    return json.loads((run / "eval.json").read_text())


def test_a_stopped_evaluation_resumes_where_it_was(
    write_spec: WriteSpec, tmp_path: Path, scoring: Scoring, train: Say
) -> None:
    """In the second of two checkpoints, and again some videos later."""
    spec, run = write_spec(evaluate={"last_checkpoints": 2}, schedule={"epochs": 2}), tmp_path / "runs/run"
    for stop_at in (VIDEOS + 3, VIDEOS + 7):
        scoring.stop_at = stop_at
        status, out, _ = train(spec)
        assert status == 85 and "stopped by SIGUSR2; resumes from" in out and "step_00000020.pt" in out
        assert len(scoring.videos) == stop_at and not (run / "eval.json").exists() and (run / "stopped").exists()
    status, out, _ = train(spec)
    assert status == 0 and (run / "report.html").exists() and not (run / "stopped").exists()
    assert scoring.videos == [*range(VIDEOS), *range(VIDEOS)]
    assert steps_of(run) == list(range(1, 21))
    assert not list((run / "predictions").glob("*.partial"))
    found = _accuracy(run)
    assert main(["eval", str(spec)]) == 0 and _accuracy(run) == found


def test_other_views_of_a_stopped_evaluation_are_scored_from_the_start(
    write_spec: WriteSpec, scoring: Scoring, train: Say
) -> None:
    spec = write_spec(schedule={"epochs": 1})
    scoring.stop_at = 8
    assert train(spec)[0] == 85
    assert train(spec, "evaluate.short_side=40")[0] == 0
    assert scoring.videos == [*range(8), *range(VIDEOS)]


def test_a_stopped_validation_is_made_up_for(
    write_spec: WriteSpec, tmp_path: Path, scoring: Scoring, train: Say
) -> None:
    """The epoch that it follows has no checkpoint of its own."""
    keys = {"evaluate": {"every_epochs": 1}, "checkpoint": {"every_epochs": 2}}
    whole, stopped = write_spec("whole", **keys), write_spec("stopped", **keys)
    assert train(whole)[0] == 0
    scoring.videos.clear()
    scoring.stop_at = 10
    status, out, _ = train(stopped)
    assert status == 85 and "step_00000010.pt" in out
    assert _records(tmp_path / "runs/stopped", "eval") == []
    assert train(stopped)[0] == 0
    assert _records(tmp_path / "runs/stopped", "eval") == _records(tmp_path / "runs/whole", "eval")
    assert train(stopped)[0] == 0  # nothing to make up for
    assert len(_records(tmp_path / "runs/stopped", "eval")) == 2


def test_a_run_stopped_at_an_epochs_edge_makes_up_for_its_validation(
    write_spec: WriteSpec, tmp_path: Path, train: Say
) -> None:
    """The votes of a step are read after the next one: asked in step 9, it stops after step 10, the first epoch's."""
    spec, run = write_spec(evaluate={"every_epochs": 1}), tmp_path / "runs/run"
    assert train_signalled(spec, signal.SIGUSR2, 9)[0] == 85
    assert steps_of(run) == list(range(1, 11)) and _records(run, "eval") == []
    assert train(spec)[0] == 0
    assert [record["epoch"] for record in _records(run, "eval")] == [1, 2]


def test_a_request_to_stop_ends_the_report(
    write_spec: WriteSpec, tmp_path: Path, scoring: Scoring, train: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = page.write_report

    def write(*arguments: Any) -> Path:
        os.kill(os.getpid(), signal.SIGTERM)
        return honest(*arguments)

    spec = write_spec(schedule={"epochs": 1})
    monkeypatch.setattr(page, "write_report", write)
    assert train(spec)[0] == 85
    assert not (tmp_path / "runs/run/report.html").exists()
    monkeypatch.setattr(page, "write_report", honest)
    assert train(spec)[0] == 0
    assert (tmp_path / "runs/run/report.html").exists() and scoring.videos == list(range(VIDEOS))


def _at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    """Do `act` before the update number `step`, counted from 0."""
    honest = TrainStep.begin

    def begin(self: TrainStep, lr: float, timer: StepTimer) -> None:
        if timer.number == step + 1:
            act()
        honest(self, lr, timer)

    monkeypatch.setattr(TrainStep, "begin", begin)


def test_a_deleted_lock_is_taken_again(
    write_spec: WriteSpec, tmp_path: Path, train: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "runs/run/lock"
    _at_step(monkeypatch, 3, lock.unlink)
    assert train(write_spec(schedule={"epochs": 1}))[0] == 0
    assert f"process {os.getpid()}" in lock.read_text()


def test_a_run_whose_directory_another_one_took_writes_no_checkpoint_there(
    write_spec: WriteSpec, tmp_path: Path, train: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "runs/run/lock"

    def take() -> None:
        lock.unlink()
        lock.write_text("node7, process 7\n")

    _at_step(monkeypatch, 3, take)
    status, _, err = train(write_spec(schedule={"epochs": 1}))
    assert status == 1
    assert err == (
        f"summit-train: {lock} was deleted or replaced while this run was using the directory, and another run has "
        "taken it (node7, process 7); this one stops here\n"
    )
    assert not list((tmp_path / "runs/run").glob("checkpoints/*"))


GONE = "its checkpoints are gone: they were removed while this run was using the directory"


def test_checkpoints_that_are_removed_before_the_evaluation_are_named(
    write_spec: WriteSpec, tmp_path: Path, train: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, honest = tmp_path / "runs/run", pipeline._train

    def train_and_lose(*arguments: Any, **options: Any) -> None:
        honest(*arguments, **options)
        shutil.rmtree(run / "checkpoints")

    monkeypatch.setattr(pipeline, "_train", train_and_lose)
    status, _, err = train(write_spec(schedule={"epochs": 1}))
    assert (status, err) == (1, f"summit-train: {run}: {GONE}\n")


def test_a_run_folder_removed_during_the_evaluation_is_no_mistake_of_the_user(
    write_spec: WriteSpec, tmp_path: Path, train: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, honest = tmp_path / "runs/run", Scorer.results

    def results(*arguments: Any) -> Iterator[Any]:
        shutil.rmtree(run, ignore_errors=True)
        yield from honest(*arguments)

    monkeypatch.setattr(Scorer, "results", results)
    status, _, err = train(write_spec(evaluate={"last_checkpoints": 2}))
    assert status == 1 and err.startswith(f"summit-train: {run}") and err.count("\n") == 1, err


def test_ranks_whose_kernels_differ_are_named_once_and_recorded(write_spec: WriteSpec, tmp_path: Path) -> None:
    """Two of three ranks are on nodes without a compiler, with a cache of their own."""
    spec = write_spec(scale={"gpus": 3, "clips_per_gpu": 2}, schedule={"epochs": 1, "warmup_epochs": 0})

    def work(name: str, lacking: int) -> int:
        if 3 - int(os.environ["RANK"]) <= lacking:
            os.environ |= {"CXX": "nope", "XDG_CACHE_HOME": str(tmp_path / "empty")}
            loaded.cache_clear()
            socket.gethostname = lambda: f"n{os.environ['RANK']}"
        return main_without_reports(["train", str(spec), f"name={name}"])

    none = "none: no compiler on PATH among nope"
    for name, lacking, others in (("alike", 0, None), ("mixed", 2, {"n1": none, "n2": none})):
        status, output = forked(3, partial(work, name, lacking))
        assert status == 0, output
        machine = json.loads((tmp_path / f"runs/{name}/environment.json").read_text())
        assert machine["kernels"] == execution() and machine.get("other_kernels") == others
        warning = f"warning: C++ kernels: rank 0 has {execution()}, but n1 has {none}; all ranks wait for the slowest"
        said = [line for line in lines(output) if "C++ kernels: rank 0" in line]
        assert said == ([warning] if others else []), output
    assert sorted(machine["hosts"]) == sorted([socket.gethostname(), "n1", "n2"])


def test_one_rank_that_is_asked_to_stop_takes_the_others_with_it(
    write_spec: WriteSpec, motion_set: Path, tmp_path: Path
) -> None:
    """The signal comes to rank 1 alone, in the final evaluation; the next start scores what is left."""
    # Of 80 videos: the other rank hears of it some videos later.
    spec = write_spec(schedule={"epochs": 1}, data={"val": str(motion_set / "train.csv")})
    honest, scored = Scorer.results, list[list[int]]()

    def work(stop_at: int) -> int:
        def results(scorer: Scorer, model: Any, videos: Any) -> Iterator[Any]:
            for number, (video, score) in enumerate(zip(videos, honest(scorer, model, videos), strict=True)):
                if (os.environ["RANK"], number) == ("1", stop_at):
                    os.kill(os.getpid(), signal.SIGUSR2)
                os.write(1, f"scored {video}\n".encode())
                yield score

        Scorer.results = results  # type: ignore[assignment,method-assign]  # in a forked process
        return main_without_reports(["train", str(spec)])

    for stop_at, expected in ((5, 85), (-1, 0)):
        status, output = forked(2, partial(work, stop_at))
        assert status == expected, output
        scored.append([int(line.split()[1]) for line in lines(output) if line.startswith("scored ")])
    assert 6 <= len(scored[0]) < 80
    assert sorted(scored[0] + scored[1]) == list(range(80))
    found = _accuracy(tmp_path / "runs/run")
    succeed(2, "eval", str(spec))
    assert _accuracy(tmp_path / "runs/run") == found
