"""What a rank that fails leaves for those that started it, and a process's age."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from summit_train.core import session
from summit_train.core.processes import seconds_alive
from summit_train.core.session import leave_reason
from tests.worlds import PATIENCE_S


def test_a_failures_reason_is_left_with_torchrun_and_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_reason("nobody asked", 1)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("SUMMIT_TRAIN_FAILURE", str(tmp_path / "failure"))
    leave_reason("rank 1 on n2: no progress\n", 1)
    assert (tmp_path / "failure").read_text() == "rank 1 on n2: no progress\n"
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "rank 1 on n2: no progress"
    monkeypatch.setenv("SUMMIT_TRAIN_FAILURE", str(tmp_path / "gone/failure"))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "failure/error.json"))
    leave_reason("a full disk, say", 1)  # is not the reason itself


def test_a_file_system_that_hangs_keeps_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def write(*_: object) -> None:
        begun.set()
        ended.wait()

    monkeypatch.setattr(session, "_write_reason", write)
    monkeypatch.setattr(session, "_SECONDS_TO_WRITE", 0.1)
    rank = threading.Thread(target=leave_reason, args=("rank 1 on n2: no progress", 1), daemon=True)
    rank.start()
    rank.join(PATIENCE_S)
    has_left, has_begun = not rank.is_alive(), begun.is_set()
    ended.set()
    assert has_begun and has_left


@pytest.mark.parametrize("status", [0, 2, 85, 1])
def test_only_a_failure_may_end_the_launcher(status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUMMIT_TRAIN_FAILURE", str(tmp_path / "failure.1.0"))
    leave_reason("why", status)
    assert (tmp_path / "failure.1.0").exists() == (status == 1)


@pytest.mark.parametrize(("spares", "named"), [("0 0", False), ("0 1", True), ("", False)])
def test_the_first_failed_rank_names_its_node(
    spares: str, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job := tmp_path / "job").mkdir()
    (job / "spares").write_text(spares)
    monkeypatch.setenv("SUMMIT_TRAIN_FAILURE", str(job / "failure.1.0"))
    leave_reason("rank 1 on n2: no progress", 1, "n2")
    leave_reason("rank 3 on n4: no progress", 1, "n4")  # the file system hangs for all of them
    assert (job / "failure.1.0").read_text() == "rank 1 on n2: no progress\n"
    found = (job / "bad_nodes").read_text() if (job / "bad_nodes").exists() else ""
    assert found == ("n2 rank 1 on n2: no progress\n" if named else "")


def test_a_process_is_older_than_its_child() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, repr(seconds_alive()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert 0 <= float(os.read(reader, 100)) < seconds_alive()
