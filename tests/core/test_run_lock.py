"""One run at a time in a folder: a lock that another process holds."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from summit_train.core.errors import RunFailed, UserError
from summit_train.core.run_lock import RunLock, wait_for_lock


def test_a_restart_in_a_job_waits_for_the_lock_of_a_lost_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder is another process, as a POSIX lock binds only others. It lets go after the first attempt."""
    (tmp_path / "lock").write_text("n1, process 7\n")
    hold = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True)"
    holder = subprocess.Popen([sys.executable, "-c", f"{hold}; sys.stdin.read()", str(tmp_path / "lock")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert holder.stdout is not None and holder.stdin is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match=r"another run is using this directory \(n1, process 7\)"):
        RunLock(tmp_path)
    wait_for_lock(tmp_path, lambda: pytest.fail("waited outside of a job"))
    monkeypatch.setenv("SUMMIT_TRAIN_FAILURE", "job/failure.1.1")
    with pytest.raises(RunFailed, match="another run is using this directory"):
        RunLock(tmp_path)
    ticks = list[float]()
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(time, "monotonic", lambda: len(ticks) * 1.0)
    wait_for_lock(tmp_path, lambda: ticks.append(1))
    assert len(ticks) == 100
    ticks.clear()
    monkeypatch.setattr(time, "sleep", lambda _: (holder.stdin.close(), holder.wait()))
    wait_for_lock(tmp_path, lambda: ticks.append(1))
    assert len(ticks) == 1
    with RunLock(tmp_path):
        pass
