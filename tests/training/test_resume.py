"""What a run may resume from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from summit_train.core.saved import find_checkpoints
from summit_train.training.checkpoint import save_checkpoint
from tests.runs import load_any
from tests.worlds import main_said


def test_a_checkpoint_keeps_the_names_of_its_experiment_and_without_a_list_its_digests_are_unknown(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names in files are those of earlier versions. What is skipped where the list is missing, no spelling decides."""
    shutil.copytree(trained_run, run := tmp_path / "run")
    words = ("plan", run / "spec.yaml", f"run_dir={tmp_path}", "--clips", 80)
    path = find_checkpoints(run)[-1]
    state = load_any(path)
    assert [name for name in state["experiment"] if "(" in name] == ["data.train (fingerprint)"]
    state["experiment"] |= {"data.train (fingerprint)": "another", "data.quarantine (fingerprint)": "another"}
    save_checkpoint(path, state)
    assert main_said(capsys, *words)[0] == 0
    state["experiment"]["data.other (fingerprint)"] = "abc"
    save_checkpoint(path, state)
    status, _, err = main_said(capsys, *words)
    assert status == 2 and "data.other (fingerprint): the checkpoint has 'abc', this run None" in err
