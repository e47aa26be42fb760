"""A resume needs the memory of its state once: what arrives, or is read, goes into what the steps use.

The state here is small, and what a process needs besides, some 30 MB, is a third of it: a second copy is 0.5 or more.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest

from summit_train.training.run import Run
from tests.conftest import WriteSpec
from tests.worlds import joined, main_without_reports, needs_ranks, train

NETWORK = {"model": {"arch": "tsn", "backbone": "resnet18", "width": 1, "num_classes": 4}, "schedule": {"epochs": 1}}
LOCAL = {"method": "averaging", "period": 100, "optimizer_state": "local"}


def _memory(kind: str) -> int:
    """The bytes of this process: VmRSS now, VmHWM at most since the last reset."""
    status = Path("/proc/self/status").read_text().split()
    return 1024 * int(status[status.index(f"{kind}:") + 1])


@pytest.mark.parametrize(
    ("more", "bound"),
    [
        ({"optimizer": {"name": "sgd"}, "ema": {"decay": 0.9}}, 1.5),
        ({"optimizer": {"name": "adamw"}}, 1.5),
        ({"optimizer": {"name": "lamb"}}, 1.5),
        # The average, and the network and momentum of each of a rank's two learners: five halves of a learner's file.
        ({"optimizer": {"name": "sgd"}, "parallel": LOCAL}, 3.2),
    ],
    ids=["sgd and average", "adamw", "lamb", "learners"],
)
@pytest.mark.parametrize("backend", [pytest.param("horovod", marks=needs_ranks), "torch"])
def test_no_rank_needs_more_than_its_state(
    write_spec: WriteSpec, tmp_path: Path, backend: str, more: dict[str, Any], bound: float
) -> None:
    spec = write_spec("run", **NETWORK, **more)
    train(2, spec, comm=backend)
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
