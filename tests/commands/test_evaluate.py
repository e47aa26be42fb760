"""`summit-train eval`: which checkpoints of which run, and what it refuses."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from summit_train.training.checkpoint import checkpoint_path, load_checkpoint, save_checkpoint
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


def _rewrite(run: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    path = checkpoint_path(run, 20)
    state = load_checkpoint(path)
    change(state["model"])
    save_checkpoint(path, state)
    return path


@pytest.mark.parametrize("option", [(), ("--observed", "0.5,1")])
def test_scores_that_are_not_finite_are_no_unreadable_videos(run: Path, say: Say, option: tuple[str, ...]) -> None:
    """The last class alone, so that the first one's scores look right."""
    path = _rewrite(run, lambda weights: weights["fc.bias"][-1].fill_(torch.nan))
    status, out, err = say("eval", *_spec(run), *option)
    assert (status, out) == (1, "") and err.count("\n") == 1
    assert f"{path}: scores are not finite, those of videos/val_000000.mp4 the first" in err
