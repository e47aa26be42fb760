"""What a run may resume from, the memory that it takes, and the state files of a run folder."""

from __future__ import annotations

import ctypes
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from summit_train.core.errors import UserError
from summit_train.core.run_folder import CheckpointError, find_checkpoints, measures_path
from summit_train.training.checkpoint import save_checkpoint
from summit_train.training.run import Run
from summit_train.training.state import EXTENSION_FILE, Extension, Validation
from tests.conftest import WriteSpec
from tests.runs import load_any
from tests.worlds import Say, joined, main_without_reports, needs_ranks, train


def test_a_checkpoint_keeps_the_names_of_its_experiment_and_without_a_list_its_digest_is_unknown(
    trained_run: Path, tmp_path: Path, say: Say
) -> None:
    """Names in files are those of earlier versions. What is skipped where the list is missing, no spelling decides."""
    shutil.copytree(trained_run, run := tmp_path / "run")
    words = ("plan", run / "spec.yaml", f"run_dir={tmp_path}", "--clips", 80)
    path = find_checkpoints(run)[-1]
    state = load_any(path)
    assert [name for name in state["experiment"] if "(" in name] == ["data.train (fingerprint)"]
    state["experiment"]["data.train (fingerprint)"] = "another"
    save_checkpoint(path, state)
    assert say(*words)[0] == 0
    state["experiment"]["data.other (fingerprint)"] = "abc"
    save_checkpoint(path, state)
    status, _, err = say(*words)
    assert status == 2 and "data.other (fingerprint): the checkpoint has 'abc', this run None" in err


NETWORK = {"model": {"arch": "tsn", "backbone": "resnet18", "width": 1, "num_classes": 4}, "schedule": {"epochs": 1}}
LOCAL = {"method": "averaging", "period": 100, "optimizer_state": "local"}


def _memory(kind: str) -> int:
    """The bytes of this process: VmRSS now, VmHWM at most since the last reset."""
    status = Path("/proc/self/status").read_text().split()
    return 1024 * int(status[status.index(f"{kind}:") + 1])


AVERAGE = {"optimizer": {"name": "sgd"}, "ema": {"decay": 0.9}}
# The average, and the network and momentum of each of a rank's two learners: five halves of a learner's file.
LEARNERS = {"optimizer": {"name": "sgd"}, "parallel": LOCAL}


@pytest.mark.parametrize(
    ("backend", "more", "bound"),
    [
        pytest.param("horovod", LEARNERS, 3.2, marks=[needs_ranks, pytest.mark.nightly]),
        ("torch", AVERAGE, 1.5),
        pytest.param("torch", {"optimizer": {"name": "lamb"}}, 1.5, marks=pytest.mark.nightly),
    ],
)
def test_no_rank_needs_more_than_its_state(
    write_spec: WriteSpec,
    eight_videos: dict[str, str],
    tmp_path: Path,
    backend: str,
    more: dict[str, Any],
    bound: float,
) -> None:
    spec = write_spec("run", data=eight_videos, **NETWORK, **more)
    train(0, spec)
    checkpoints = sorted((tmp_path / "runs/run/checkpoints").glob("*.pt"))
    begin = Run.__init__

    def begins(self: Run, *arguments: Any, **options: Any) -> None:
        ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed is not free memory for this one
        Path("/proc/self/clear_refs").write_text("5")
        before = _memory("VmRSS")
        begin(self, *arguments, **options)
        (tmp_path / f"{self.world.rank}.json").write_text(json.dumps(_memory("VmHWM") - before))

    def work() -> int:
        Run.__init__ = begins  # type: ignore[method-assign]
        return main_without_reports(["train", str(tmp_path / "runs/run"), "--more-epochs", "1"])

    status, output = joined(2, work, backend)
    assert status == 0 and "resumes from" in output, output
    size = checkpoints[-1].stat().st_size
    peaks = [json.loads((tmp_path / f"{rank}.json").read_text()) / size for rank in range(2)]
    assert all(0.3 < peak < bound for peak in peaks), (peaks, size)


@pytest.fixture
def run(one_epoch_run: Path, tmp_path: Path) -> Path:
    """A finished run of one epoch of ten steps, which has no file of a validation."""
    shutil.copytree(one_epoch_run, tmp_path / "run")
    return tmp_path / "run"


def test_the_same_command_asks_for_the_same_until_the_run_has_come_to_its_end(run: Path) -> None:
    assert Extension.asked(str(run), 2) == Extension(1, 3)
    for is_done in (False, True):  # the spec still has one epoch
        Extension(1, 2, is_done=is_done).write(run)
        assert Extension.asked(str(run), 1) == Extension(1, 2)


def test_a_run_that_has_stopped_early_gets_epochs_beyond_those_that_were_trained(run: Path) -> None:
    (checkpoint,) = find_checkpoints(run)
    for stops, before in ((True, 4), (False, 1)):
        Validation(4, {"top1": 50.0}, {}, stops_early=stops).write(checkpoint)
        assert Extension.asked(str(run), 3) == Extension(before, before + 3)


def test_what_an_earlier_version_has_begun_is_not_begun_again(run: Path) -> None:
    """It kept that in its log: the spec has two epochs more than the newest checkpoint's experiment."""
    (checkpoint,) = find_checkpoints(run)
    assert not measures_path(checkpoint).exists()
    spec = (run / "spec.yaml").read_text()
    (run / "spec.yaml").write_text(spec.replace("\n  epochs: 1\n", "\n  epochs: 3\n"))
    assert Extension.asked(str(run), 2) == Extension(1, 3)
    assert Extension.asked(str(run), 4) == Extension(3, 7)
    save_checkpoint(checkpoint, load_any(checkpoint) | {"line": 5})
    with pytest.raises(UserError, match=r"start it once without --more-epochs, then again with it"):
        Extension.asked(str(run), 4)


@pytest.mark.parametrize("file", [EXTENSION_FILE, "checkpoints/step_00000010.measures.json"])
@pytest.mark.parametrize("text", ["{", "[]", '{"other": 1}'])
def test_a_damaged_file_is_named(run: Path, file: str, text: str) -> None:
    (run / file).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{file}: cannot be read \(.*\); restore it, or delete it"):
        Extension.asked(str(run), 1)
