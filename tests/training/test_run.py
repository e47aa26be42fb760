"""Whole runs of the program, alone: killed, stopped, resumed, refused; when they validate and what they hold."""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summit_train.__main__ import main
from summit_train.cli import pipeline
from summit_train.core.comm import World
from summit_train.core.run_folder import remove_half_written, step_of
from summit_train.data.batches.loader import MicroBatch
from summit_train.evaluation import evaluation
from summit_train.plan import validates
from summit_train.report import page
from summit_train.report.records import RunRecord
from summit_train.spec import load_spec
from summit_train.training.checkpoint import save_checkpoint
from summit_train.training.state import Extension
from summit_train.training.step import TrainStep
from summit_train.training.timer import StepTimer
from tests.conftest import ONLINE, WriteSpec
from tests.runs import assert_bit_equal, final_state, load_any, records, steps_of
from tests.worlds import PATIENCE_S, command, forked, main_without_reports, start, train, train_signalled, until


def test_a_killed_run_ends_bit_equal(write_spec: WriteSpec, tmp_path: Path, trained_run: Path) -> None:
    """SIGKILL in the middle of the second epoch."""
    killed = str(write_spec("killed", model=ONLINE))
    assert train_signalled(killed, signal.SIGKILL, 14)[0] == -signal.SIGKILL
    assert not (tmp_path / "runs/killed/checkpoints/step_00000020.pt").exists()
    output = train(0, killed)
    assert "step_00000010.pt" in output
    assert_bit_equal(final_state(trained_run), final_state(tmp_path / "runs/killed"))
    assert steps_of(tmp_path / "runs/killed")[-10:] == list(range(11, 21))


def test_a_kill_in_a_background_write_costs_that_one(write_spec: WriteSpec, tmp_path: Path, trained_run: Path) -> None:
    """Every second step is saved. The file of step 14 gets no name until step 16 is recorded, then all is killed."""
    spec, run = write_spec("beside", model=ONLINE, checkpoint={"background": True}), tmp_path / "runs/beside"

    def die(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rename" and str(arguments[1]).endswith("step_00000014.pt"):
            while 16 not in steps_of(run):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def work() -> int:
        sys.addaudithook(die)
        return main_without_reports(["train", str(spec), "checkpoint.every_minutes=1e-9"])

    assert forked(0, work)[0] == -signal.SIGKILL
    names = {path.name.split(".")[-1] for path in (run / "checkpoints").glob("*step_00000014*")}
    assert names == {"writing", "sha256"}
    assert "step_00000012.pt" in train(0, spec)
    assert_bit_equal(final_state(trained_run), final_state(run))
    assert list((run / "checkpoints").glob(".*")) == []
    assert steps_of(run) == [*range(1, 17), *range(13, 21)]


def test_a_stopped_run_exits_85_and_resumes_bit_equal(write_spec: WriteSpec, tmp_path: Path, trained_run: Path) -> None:
    stopped = str(write_spec("stopped", model=ONLINE, checkpoint={"background": True}))
    status, output = train_signalled(stopped, signal.SIGUSR2, 4)
    assert status == 85, output
    saved = sorted(p.name for p in (tmp_path / "runs/stopped/checkpoints").glob("*.pt"))
    assert saved == ["step_00000005.pt"]  # it came in step 4, in which the ranks vote; they read the vote in step 5
    assert "stopped by SIGUSR2" in output and saved[0] in output
    train(0, stopped)
    assert_bit_equal(final_state(trained_run), final_state(tmp_path / "runs/stopped"))


# Asked for as a step begins, of ten in an epoch: read with the next one, at an epoch's end with the step itself.
@pytest.mark.parametrize("step", [9, 10])
def test_a_late_stop_ends_with_the_epoch(write_spec: WriteSpec, tmp_path: Path, step: int) -> None:
    status, output = train_signalled(write_spec("ends"), signal.SIGUSR2, step)
    assert status == 85, output
    assert [step_of(path) for path in (tmp_path / "runs/ends/checkpoints").glob("*.pt")] == [10]
    assert steps_of(tmp_path / "runs/ends") == [*range(1, 11)]


def _stop_while_starting(spec: str) -> tuple[int, str]:
    """Exit status and output of a run that gets SIGUSR2 as soon as it listens, before it has loaded torch.

    On a busy machine this process may look too late; then another run is started.
    """
    for _ in range(20):
        process = start(0, "-m", "summit_train", "train", spec)
        status = Path(f"/proc/{process.pid}/status")
        while not int(status.read_text().partition("SigCgt:")[2].split()[0], 16) & 1 << signal.SIGUSR2 - 1:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGSTOP)
        if "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
            os.kill(process.pid, signal.SIGUSR2)
            os.kill(process.pid, signal.SIGCONT)
            output, _ = process.communicate(timeout=PATIENCE_S)
            return process.returncode, output
        process.kill()
        process.communicate()
    raise AssertionError("torch is loaded before the run listens")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc to see how far the start has come")
def test_a_stop_waits_for_the_start_and_comes_before_the_evaluation(write_spec: WriteSpec, tmp_path: Path) -> None:
    """A run that is started and stopped again and again gets on; one that is trained is not evaluated in a hurry."""
    spec = str(write_spec(schedule={"epochs": 1}))
    status, output = _stop_while_starting(spec)
    assert status == 85 and "step_00000002.pt" in output, output
    train(0, spec)
    assert steps_of(tmp_path / "runs/run") == list(range(1, 11))
    (tmp_path / "runs/run/eval.json").unlink()
    status, output = _stop_while_starting(spec)
    assert status == 85 and "step_00000010.pt" in output, output
    assert not (tmp_path / "runs/run/eval.json").exists()


def test_a_run_leaves_what_the_contract_names(write_spec: WriteSpec, tmp_path: Path) -> None:
    run, spec = tmp_path / "runs/run", write_spec(evaluate={"every_epochs": 1, "last_checkpoints": 2})
    status, output = command(0, "train", str(spec))
    assert status == 0, output
    names = "spec.yaml plan.json metrics.jsonl checkpoints eval.json predictions report.html"
    assert {path.name for path in run.iterdir()} >= set(names.split())
    steps, evals = records(run, "step"), records(run, "eval")
    assert [r["step"] for r in steps] == list(range(1, 21))
    assert set(steps[0]) >= {"epoch", "loss", "lr", "clips_per_second", "step_s", "data_wait_s"}
    # 8 clips, base_lr 0.005 for 8: the peak is 0.005, reached by step 10 in tenths
    assert steps[0]["lr"] == pytest.approx(0.0005) and steps[9]["lr"] == pytest.approx(0.005)
    assert [(r["epoch"], r["step"], r["videos"]) for r in evals] == [(1, 10, 11), (2, 20, 11)]
    counts = list(json.loads((run / "plan.json").read_text())["clips_per_class"]["val"].values())
    for r in evals:
        right = sum(count * top1 for count, top1 in zip(counts, r["classes"], strict=True))
        assert right / 11 == pytest.approx(r["top1"], abs=0.01)
    result = json.loads((run / "eval.json").read_text())
    assert result["videos"] == 11 and len(result["checkpoints"]) == 2
    assert f"top-1 {result['top1_mean']:.2f}" in output
    # 4 classes: the log and the last line leave top-5 out, the records keep it.
    assert "top-5" not in output and "top5_mean" in result and "top5" in evals[0]
    assert list((run / "tensorboard").glob("events.*"))
    (begin,) = records(run, "start")
    assert 0 < result["goodput"] <= result["goodput_in_jobs"] < 1 and begin["startup_s"] > 0
    assert result["time_s"]["steps"] == pytest.approx(sum(r["step_s"] for r in steps))
    assert sum(result["time_s"].values()) == pytest.approx(evals[-1]["time"] - begin["time"] + begin["startup_s"])
    assert "Where the time went" in (run / "report.html").read_text()
    assert "Traceback" not in output and "0 s left" in output


def test_another_experiment_is_refused_with_the_difference(done: str, tmp_path: Path) -> None:
    run = tmp_path / "runs/run"
    status, output = command(0, "train", done, "optimizer.momentum=0.5", "model.width=0.25")
    assert status == 2 and "Traceback" not in output
    assert "optimizer.momentum: the checkpoint has 0.9, this run 0.5" in output
    assert "model.width: the checkpoint has 0.125, this run 0.25" in output
    assert f"Give this run another name; to begin it with these weights, set model.pretrained to {run}" in output
    output = command(0, "train", done, "optimizer.momentum=0.5")[1]
    assert f"To continue with the new values: train {run} --from 10 KEY=VALUE" in output
    words = ("optimizer.momentum=0.5", "name=other", f"model.pretrained={run}")
    assert "pretrained: " in train(0, done, *words) and steps_of(tmp_path / "runs/other") == list(range(1, 11))


def _killed_in(step: int, ranks: int, *words: str) -> None:
    """Run `train ...` whose ranks kill themselves as they begin update `step`."""
    honest = TrainStep.begin

    def begin(self: TrainStep, lr: float, timer: StepTimer | None = None) -> None:
        if len(steps_of(Path(words[0]))) + 1 >= step - 1:  # a step is recorded after the next one was launched
            os.kill(os.getpid(), signal.SIGKILL)
        honest(self, lr, timer)

    def work() -> int:
        TrainStep.begin = begin  # type: ignore[method-assign]
        return main_without_reports(["train", *words])

    assert forked(ranks, work, grace_s=0)[0] == -signal.SIGKILL


def _longer(run: Path, more_epochs: int) -> str:
    """What `train RUN --more-epochs N` says of the steps that the run would then have; it trains none."""
    status, output = command(0, "train", str(run), "--more-epochs", str(more_epochs), "--trace", "999:999")
    assert status == 2
    return output


def test_more_epochs_continue_a_finished_run_bit_equal_after_kills(one_epoch_run: Path, tmp_path: Path) -> None:
    """Killed before and after the first checkpoint that is longer; started again without --more-epochs, and with."""
    whole, killed = (tmp_path / name / "run" for name in ("whole", "killed"))
    for run in (whole, killed):
        shutil.copytree(one_epoch_run, run)
    words = ("--more-epochs", "2", "evaluate.last_checkpoints=3")
    assert "3 instead of 1; LR continues at 0.00452254, as in a run of 3 epochs" in train(2, whole, *words)
    _killed_in(14, 2, str(killed), *words)
    _killed_in(25, 2, str(killed), *words[2:])
    train(2, killed, *words)
    assert_bit_equal(final_state(whole), final_state(killed))
    for run in (whole, killed):
        assert load_spec(run / "spec.yaml").schedule.epochs == 3
        found = records(run, "more_epochs")
        assert {(record["from"], record["to"], record["step"]) for record in found} == {(1, 3, 10)}
        (shown,) = RunRecord(run).log.extensions
        assert (shown.before, shown.after, shown.step) == (1, 3, 10)
        former, result = (json.loads((run / place / "eval.json").read_text()) for place in ("evals/epochs-1", "."))
        assert former == json.loads((one_epoch_run / "eval.json").read_text()) | {"overrides": {"schedule.epochs": 1}}
        assert (run / "evals/epochs-1/predictions/step_00000010.npz").exists()
        assert [row["step"] for row in result["checkpoints"]] == [20, 30]  # those of the line alone
    # the run has come to its end: the same command adds its epochs again
    assert "steps 1 to 50" in _longer(whole, 2)


@pytest.mark.parametrize(
    ("place", "number", "status"),
    [
        ("write_json", signal.SIGKILL, -signal.SIGKILL),  # eval.json
        ("write_report", signal.SIGTERM, 85),
        ("record_end", signal.SIGKILL, -signal.SIGKILL),
        ("record_end", signal.SIGTERM, 0),  # the run is done
    ],
)
def test_more_epochs_are_added_once_after_a_late_end(
    one_epoch_run: Path, tmp_path: Path, place: str, number: int, status: int
) -> None:
    """A signal just before the report or the record of the end, or just after eval.json."""
    shutil.copytree(one_epoch_run, run := tmp_path / "run")
    words = ["train", str(run), "--more-epochs", "1"]
    modules = {"write_json": evaluation, "write_report": page, "record_end": pipeline}

    def work() -> int:
        honest = getattr(modules[place], place)

        def signalled(*arguments: object) -> object:
            done = honest(*arguments) if place == "write_json" else None
            os.kill(os.getpid(), number)
            return done or honest(*arguments)

        setattr(modules[place], place, signalled)
        return main(words)

    assert forked(0, work)[0] == status
    assert json.loads((run / "eval.json").read_text())["checkpoints"][-1]["step"] == 20
    if status:
        again = train(0, run, *words[2:])
        assert "more epochs: finishes the extension from 1 to 2 epochs" in again
        assert steps_of(run) == list(range(1, 21)) and load_spec(run / "spec.yaml").schedule.epochs == 2
        assert json.loads((run / "evals/epochs-1/eval.json").read_text())["checkpoints"][-1]["step"] == 10
    assert "steps 1 to 30" in _longer(run, 1)  # by then it has come to its end


def test_a_request_to_stop_while_the_command_is_imported_is_heard(write_spec: WriteSpec, tmp_path: Path) -> None:
    def work() -> int:
        honest = importlib.import_module

        def interrupted(name: str) -> object:
            os.kill(os.getpid(), signal.SIGTERM)
            return honest(name)

        importlib.import_module = interrupted  # type: ignore[assignment]
        return main(["train", str(write_spec())])

    status, output = forked(0, work)
    assert status == 85 and "stopped by SIGTERM; resumes from" in output


def test_a_start_removes_what_a_killed_one_left_half_written(done: str, tmp_path: Path) -> None:
    run, gone = tmp_path / "runs/run", f"{1 << 22 | 1}@{os.uname().nodename}.writing"
    left = [run / f".plan.json.{gone}", run / f"predictions/.step_00000010.npz.{gone}"]
    left += [run / f"checkpoints/.step_00000012.pt.{gone}", run / "checkpoints/step_00000012.pt.sha256"]
    kept = [run / f"checkpoints/step_00000010.learner_0000.pt{ending}" for ending in ("", ".sha256")]
    for path in (*left, *kept):
        path.touch()
    assert remove_half_written(run) is None and all(path.exists() for path in kept)
    for path in left:
        path.touch()
    train(0, done)
    assert not any(path.exists() for path in left) and (run / "checkpoints/step_00000010.pt.sha256").exists()


def test_the_result_of_the_longer_run_is_not_kept_as_that_of_the_shorter(one_epoch_run: Path, tmp_path: Path) -> None:
    """The shorter run has no result, as after a kill in its evaluation."""
    shutil.copytree(one_epoch_run, run := tmp_path / "run")
    (run / "eval.json").unlink()
    train(0, run, "--more-epochs", "1")
    extension = Extension.read(run)
    assert extension == Extension(1, 2, is_done=True)
    replace(extension, is_done=False).write(run)
    train(0, run, "--more-epochs", "1")
    assert json.loads((run / "eval.json").read_text())["checkpoints"][-1]["step"] == 20
    assert not (run / "evals").exists()


@pytest.mark.parametrize(
    ("name", "epochs", "wrong"),
    [("run.yaml", "1", "used with a run folder, got /"), ("runs/run", "0", "1 or more, got 0")],
)
def test_more_epochs_are_those_of_a_run_folder(done: str, tmp_path: Path, name: str, epochs: str, wrong: str) -> None:
    status, output = command(0, "train", f"{tmp_path}/{name}", "--more-epochs", epochs)
    assert status == 2 and f"--more-epochs must be {wrong}" in output
    status, output = command(0, "train", done, "schedule.epochs=4")
    assert status == 2 and f"To train it longer: train {tmp_path}/runs/run --more-epochs 3" in output


def test_speed_of_data_is_no_other_experiment(done: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is done trains no step when it is started again."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    output = train(0, done, "data.workers=2", "evaluate.clips=2", "checkpoint.keep=3")
    assert output.count("orker") == 1 and "data.workers: 2 loader processes share 1 core of a rank" in output
    assert steps_of(tmp_path / "runs/run") == list(range(1, 11))


def test_an_old_checkpoint_resumes_but_not_with_another_solver(done: str, tmp_path: Path) -> None:
    path = tmp_path / "runs/run/checkpoints/step_00000010.pt"
    state = load_any(path)
    first = {
        "optimizer": "name momentum weight_decay base_lr base_batch lr_scaling clip_norm compression",
        "schedule": "epochs warmup_epochs decay",
    }
    for key in list(state["experiment"]):
        section, _, name = key.partition(".")
        if section in first and name not in first[section].split():
            del state["experiment"][key]
    assert "optimizer.trust_ratio" not in state["experiment"] and "schedule.milestones" not in state["experiment"]
    del state["noise_scale"], state["experiment"]["ema.decay"]
    save_checkpoint(path, state | {"forced": ["seed: the checkpoint has 0, this run 1"]})  # as version 0.1 could
    assert "resumes from" in train(0, done)
    for override in ("ema.decay=0.9", "optimizer.name=adam"):
        status, output = command(0, "train", done, override)
        assert status == 2 and "Traceback" not in output
        assert f"{override.partition('=')[0]}: the checkpoint has" in output


def test_a_second_run_in_the_same_directory_is_refused(write_spec: WriteSpec, tmp_path: Path) -> None:
    spec = str(write_spec(schedule={"epochs": 40}))
    process = start(0, "-m", "summit_train", "train", spec)
    try:
        assert until(lambda: bool(steps_of(tmp_path / "runs/run")) or process.poll() is not None)
        status, output = command(0, "train", spec)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert status == 2
    assert "another run is using this directory" in output and f"process {process.pid}" in output


def test_more_epochs_of_a_run_without_a_checkpoint_are_added_once(one_epoch_run: Path, tmp_path: Path) -> None:
    """Killed before its first checkpoint, twice; then started over without the option, which leaves no trace of it."""
    run = tmp_path / "run"
    shutil.copytree(one_epoch_run, run, ignore=shutil.ignore_patterns("checkpoints", "eval.json", "predictions"))
    words = (str(run), f"run_dir={tmp_path}", "--more-epochs", "1")
    for _ in range(2):
        _killed_in(3, 0, *words)
        assert load_spec(run / "spec.yaml").schedule.epochs == 2 and Extension.read(run) == Extension(1, 2)
    train(0, *words)
    assert steps_of(run)[-1] == 20 and Extension.read(run) == Extension(1, 2, is_done=True)
    assert final_state(run)["line"] == 0
    shutil.rmtree(run / "checkpoints")
    _killed_in(3, 0, str(run))
    assert Extension.read(run) is None


@pytest.mark.parametrize(("every", "epochs"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (9, [5])])
def test_a_run_validates_every_so_often_and_after_its_last_epoch(
    write_spec: WriteSpec, every: int, epochs: list[int]
) -> None:
    spec = load_spec(write_spec(schedule={"epochs": 5}, evaluate={"every_epochs": every}))
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


def test_too_low_a_limit_of_open_files_is_one_warning(write_spec: WriteSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("summit_train.training.run.raise_open_files", lambda: 64)
    monkeypatch.setattr(World, "connections", 3)
    status, output = forked(0, lambda: main_without_reports(["train", str(write_spec(schedule={"epochs": 1}))]))
    assert status == 0 and output.count("open files: a rank may need 103, the limit is 64") == 1, output
