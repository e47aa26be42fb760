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
import yaml

from summit_train.cli import pipeline
from summit_train.core.run_folder import checkpoint_path
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


@pytest.fixture
def spec(trained_run: Path, tmp_path: Path) -> Path:
    """The spec of a copy of the trained run, in runs/run of the test's folder, as it was before its evaluation."""
    run = tmp_path / "runs/run"
    shutil.copytree(trained_run, run, ignore=shutil.ignore_patterns("eval.json", "predictions"))
    values = yaml.safe_load((run / "spec.yaml").read_text()) | {"run_dir": str(tmp_path / "runs")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "run.yaml"


@pytest.fixture
def train(say: Say, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Runs `train SPEC ...` in this process, without its report."""
    monkeypatch.setattr(page, "write_report", lambda runs, path: path)
    return partial(say, "train")


def test_a_run_carries_on_without_the_reader_of_its_log(
    write_spec: WriteSpec, eight_videos: dict[str, str], tmp_path: Path
) -> None:
    spec = write_spec("t", data=eight_videos, schedule={"epochs": 1, "warmup_epochs": 0})
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        process = start(0, "-m", "summit_train", "train", str(spec), output=pipe, errors=subprocess.PIPE)
        _, err = process.communicate(timeout=PATIENCE_S)
    lost = "warning: the rest of this log is lost: standard output: Broken pipe\n"
    assert process.returncode == 0 and err.endswith(lost) and err.count("log is lost") == 1
    (run,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    assert [record["reason"] for record in records(run, "log_lost")] == ["Broken pipe"]
    assert (run / "report.html").is_file()


def _accuracy(run: Path) -> Any:
    return json.loads((run / "eval.json").read_text())


def test_a_stopped_evaluation_resumes_where_it_was(
    spec: Path, tmp_path: Path, scoring: Scoring, train: Say, say: Say
) -> None:
    """In the second of two checkpoints, and again some videos later."""
    run, two = tmp_path / "runs/run", "evaluate.last_checkpoints=2"
    for stop_at in (VIDEOS + 3, VIDEOS + 7):
        scoring.stop_at = stop_at
        status, out, _ = train(spec, two)
        assert status == 85 and "stopped by SIGUSR2; resumes from" in out and "step_00000020.pt" in out
        assert len(scoring.videos) == stop_at and not (run / "eval.json").exists() and (run / "stopped").exists()
    assert train(spec, two)[0] == 0 and not (run / "stopped").exists()
    assert scoring.videos == [*range(VIDEOS), *range(VIDEOS)]
    assert steps_of(run) == list(range(1, 21))
    assert not list((run / "predictions").glob("*.partial"))
    found = _accuracy(run)
    assert say("eval", spec, two)[0] == 0 and _accuracy(run) == found


def test_other_views_of_a_stopped_evaluation_are_scored_from_the_start(
    spec: Path, scoring: Scoring, train: Say
) -> None:
    scoring.stop_at = 8
    assert train(spec)[0] == 85
    assert train(spec, "evaluate.short_side=40")[0] == 0
    assert scoring.videos == [*range(8), *range(VIDEOS)]


def test_a_validation_that_was_stopped_or_not_begun_is_made_up_for(
    write_spec: WriteSpec, eight_videos: dict[str, str], tmp_path: Path, scoring: Scoring, train: Say
) -> None:
    """One whose epoch has no checkpoint of its own, and one at whose epoch's edge the run stopped.

    The votes of a step are read after the next one: asked in step 1, a run stops after step 2, the first epoch's last.
    """

    def validations(name: str) -> list[dict[str, Any]]:
        return [{**record, "seconds": 0, "time": 0} for record in records(tmp_path / "runs" / name, "eval")]

    keys: dict[str, Any] = {"evaluate": {"every_epochs": 1}, "checkpoint": {"every_epochs": 2}, "scale": {"gpus": 2}}
    keys["data"] = eight_videos  # two steps an epoch, two videos to validate
    whole, stopped, edge = (write_spec(name, **keys) for name in ("whole", "stopped", "edge"))
    assert train(whole)[0] == 0
    expected = validations("whole")
    assert [record["epoch"] for record in expected] == [1, 2]
    scoring.videos.clear()
    scoring.stop_at = 1
    status, out, _ = train(stopped)
    assert status == 85 and "step_00000002.pt" in out and validations("stopped") == []
    for _ in range(2):  # the second time there is nothing to make up for
        assert train(stopped)[0] == 0 and validations("stopped") == expected
    assert train_signalled(edge, signal.SIGUSR2, 1)[0] == 85
    assert steps_of(tmp_path / "runs/edge") == [1, 2] and validations("edge") == []
    assert train(edge)[0] == 0 and validations("edge") == expected


def test_a_request_to_stop_ends_the_report(
    spec: Path, tmp_path: Path, scoring: Scoring, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = page.write_report

    def write(*arguments: Any) -> Path:
        os.kill(os.getpid(), signal.SIGTERM)
        return honest(*arguments)

    monkeypatch.setattr(page, "write_report", write)
    assert say("train", spec)[0] == 85
    assert not (tmp_path / "runs/run/report.html").exists()
    monkeypatch.setattr(page, "write_report", honest)
    assert say("train", spec)[0] == 0
    assert (tmp_path / "runs/run/report.html").exists() and scoring.videos == list(range(VIDEOS))


def test_a_deleted_lock_is_taken_again_and_one_that_another_run_took_ends_this_one(
    spec: Path, tmp_path: Path, train: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one writes no checkpoint there."""
    lock, honest = tmp_path / "runs/run/lock", TrainStep.begin

    def take() -> None:
        lock.unlink()
        lock.write_text("node7, process 7\n")

    def train_the_last_epoch(act: Callable[[], None]) -> tuple[int, str, str]:
        def begin(self: TrainStep, lr: float, timer: StepTimer) -> None:
            if timer.number == 14:
                act()
            honest(self, lr, timer)

        checkpoint_path(tmp_path / "runs/run", 20).unlink()
        monkeypatch.setattr(TrainStep, "begin", begin)
        return train(spec)

    assert train_the_last_epoch(lock.unlink)[0] == 0
    assert f"process {os.getpid()}" in lock.read_text() and checkpoint_path(tmp_path / "runs/run", 20).exists()
    status, _, err = train_the_last_epoch(take)
    assert (status, err) == (
        1,
        f"summit-train: {lock} was deleted or replaced while this run was using the directory, and another run has "
        "taken it (node7, process 7); this one stops here\n",
    )
    assert not checkpoint_path(tmp_path / "runs/run", 20).exists()


GONE = "its checkpoints are gone: they were removed while this run was using the directory"


def test_checkpoints_that_are_removed_before_the_evaluation_are_named(
    spec: Path, tmp_path: Path, train: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs/run"
    honest = pipeline.train

    def train_and_lose(*arguments: Any, **options: Any) -> None:
        honest(*arguments, **options)
        shutil.rmtree(run / "checkpoints")

    monkeypatch.setattr(pipeline, "train", train_and_lose)
    status, _, err = train(spec)
    assert (status, err) == (1, f"summit-train: {run}: {GONE}\n")


def test_a_run_folder_removed_during_the_evaluation_is_no_mistake_of_the_user(
    spec: Path, tmp_path: Path, train: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, honest = tmp_path / "runs/run", Scorer.results

    def results(*arguments: Any) -> Iterator[Any]:
        shutil.rmtree(run, ignore_errors=True)
        yield from honest(*arguments)

    monkeypatch.setattr(Scorer, "results", results)
    status, _, err = train(spec, "evaluate.last_checkpoints=2")
    assert status == 1 and err.startswith(f"summit-train: {run}") and err.count("\n") == 1, err


def test_ranks_whose_kernels_differ_are_named_once_and_recorded(
    write_spec: WriteSpec, eight_videos: dict[str, str], trained_run: Path, tmp_path: Path
) -> None:
    """Two of three ranks are on nodes without a compiler, with a cache of their own."""
    spec = write_spec(data=eight_videos, scale={"gpus": 3}, schedule={"epochs": 1, "warmup_epochs": 0})

    def work() -> int:
        if os.environ["RANK"] != "0":
            os.environ |= {"CXX": "nope", "XDG_CACHE_HOME": str(tmp_path / "empty")}
            loaded.cache_clear()
            socket.gethostname = lambda: f"n{os.environ['RANK']}"
        return main_without_reports(["train", str(spec)])

    status, output = forked(3, work)
    assert status == 0, output
    none = "none: no compiler on PATH among nope"
    alike, mixed = (json.loads((run / "environment.json").read_text()) for run in (trained_run, tmp_path / "runs/run"))
    assert alike["kernels"] == mixed["kernels"] == execution() and "other_kernels" not in alike
    assert mixed["other_kernels"] == {"n1": none, "n2": none}
    assert sorted(mixed["hosts"]) == sorted([socket.gethostname(), "n1", "n2"])
    warning = f"warning: C++ kernels: rank 0 has {execution()}, but n1 has {none}; all ranks wait for the slowest"
    assert [line for line in lines(output) if "C++ kernels: rank 0" in line] == [warning], output


def test_one_rank_that_is_asked_to_stop_takes_the_others_with_it(spec: Path, motion_set: Path, tmp_path: Path) -> None:
    """The signal comes to rank 1 alone, in the final evaluation; the next start scores what is left."""
    # Of 80 videos: the other rank hears of it some videos later.
    spec.write_text(spec.read_text().replace(str(motion_set / "val.csv"), str(motion_set / "train.csv")))
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
