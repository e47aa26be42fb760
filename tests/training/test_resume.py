"""What a run may resume from, and the memory that it takes: the state once, as it enters what the steps use."""

from __future__ import annotations

import ctypes
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from summit_train.core.run_folder import find_checkpoints
from summit_train.training.checkpoint import save_checkpoint
from summit_train.training.run import Run
from tests.conftest import WriteSpec
from tests.runs import load_any
from tests.worlds import joined, main_said, main_without_reports, needs_ranks, train


def test_a_checkpoint_keeps_the_names_of_its_experiment_and_without_a_list_its_digest_is_unknown(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names in files are those of earlier versions. What is skipped where the list is missing, no spelling decides."""
    shutil.copytree(trained_run, run := tmp_path / "run")
    words = ("plan", run / "spec.yaml", f"run_dir={tmp_path}", "--clips", 80)
    path = find_checkpoints(run)[-1]
    state = load_any(path)
    assert [name for name in state["experiment"] if "(" in name] == ["data.train (fingerprint)"]
    state["experiment"]["data.train (fingerprint)"] = "another"
    save_checkpoint(path, state)
    assert main_said(capsys, *words)[0] == 0
    state["experiment"]["data.other (fingerprint)"] = "abc"
    save_checkpoint(path, state)
    status, _, err = main_said(capsys, *words)
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
