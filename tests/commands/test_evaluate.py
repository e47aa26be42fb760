"""`summit-train eval`: which checkpoints of which run, and what it refuses."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from summit_train.training.checkpoint import checkpoint_path, save_checkpoint
from tests.runs import load_any
from tests.worlds import Said, main_said

Say = Callable[..., Said]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs `summit-train ...` in this process."""
    return lambda *words: main_said(capsys, *words)


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    """A copy of the trained run, in runs/run of the test's folder."""
    return Path(shutil.copytree(trained_run, tmp_path / "runs/run"))


def _spec(run: Path) -> tuple[str, str]:
    return str(run / "spec.yaml"), f"run_dir={run.parent}"


def _rewrite(run: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change the last checkpoint, and its digest with it; the older one goes."""
    path = checkpoint_path(run, 20)
    state = load_any(path)
    change(state)
    save_checkpoint(path, state)
    checkpoint_path(run, 10).unlink()
    return path


@pytest.mark.parametrize("option", [(), ("--observed", "0.5,1")])
def test_scores_that_are_not_finite_are_no_unreadable_videos(run: Path, say: Say, option: tuple[str, ...]) -> None:
    """The last class alone, so that the first one's scores look right."""
    path = _rewrite(run, lambda state: state["model"]["fc.bias"][-1].fill_(torch.nan))
    status, out, err = say("eval", *_spec(run), *option)
    assert (status, out) == (1, "") and err.count("\n") == 1
    assert f"{path}: scores are not finite, those of videos/val_000000.mp4 the first" in err


def _whole_numbers(state: dict[str, Any]) -> None:
    state["model"]["fc.bias"] = state["model"]["fc.bias"].long()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state: state.update(model=[1]), "model must hold tensors by name, got list"),
        (lambda state: state.update(step="far"), "step must be a number of updates, got 'far'"),
        (lambda state: state.update(step=-20), "step must be a number of updates, got -20"),
        (lambda state: state["model"].pop("fc.bias"), "does not fit: model has no fc.bias"),
        (_whole_numbers, "does not fit: model.fc.bias must be float32 (4,), got int64 (4,)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_line_for_every_command(
    run: Path, say: Say, motion_set: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    path = _rewrite(run, change)
    spec, video = _spec(run), motion_set / "videos/val_000000.mp4"
    commands = [
        ("eval", *spec, "--checkpoints", path),
        ("eval", *spec, "--observed", "1"),
        ("predict", path, video),
        ("predict", run, video),
        ("train", *spec),
    ]
    for words in commands:
        status, out, err = say(*words)
        assert (status, out) == (2, "") and err.count("\n") == 1, words
        assert f"{path}: {reason}" in err, words


def test_training_refuses_a_solvers_state_that_does_not_fit(run: Path, say: Say) -> None:
    """A test of each solver's state is in tests/training/test_checkpoint.py."""
    path = _rewrite(run, lambda state: state["optimizer"]["state"].pop(3))
    status, out, err = say("train", *_spec(run))
    assert (status, out) == (2, "") and f"{path}: does not fit: optimizer" in err and err.count("\n") == 1
