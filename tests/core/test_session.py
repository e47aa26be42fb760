"""What a rank that fails leaves for those that started it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from summit_train.core.session import leave_reason


def test_the_reason_of_a_failure_is_left_with_torchrun_and_the_job_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_reason("nobody asked")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("SUMMIT_TRAIN_FAILURE", str(tmp_path / "failure"))
    leave_reason("rank 1 on n2: no progress\n")
    assert (tmp_path / "failure").read_text() == "rank 1 on n2: no progress\n"
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "rank 1 on n2: no progress"
    monkeypatch.setenv("SUMMIT_TRAIN_FAILURE", str(tmp_path / "gone/failure"))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "failure/error.json"))
    leave_reason("a full disk, say")  # is not the reason itself


def test_a_file_system_that_hangs_keeps_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "failure")  # opened for writing, it blocks
    monkeypatch.setenv("SUMMIT_TRAIN_FAILURE", str(tmp_path / "failure"))
    monkeypatch.setattr("summit_train.core.session._SECONDS_TO_WRITE", 0.1)
    leave_reason("rank 1 on n2: no progress")
