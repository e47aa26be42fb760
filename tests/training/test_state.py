"""The small state files of a run folder: what --more-epochs asks for, also after a version that kept it in the log."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from summit_train.core.errors import UserError
from summit_train.core.run_folder import CheckpointError, find_checkpoints, measures_path
from summit_train.training.checkpoint import save_checkpoint
from summit_train.training.state import EXTENSION_FILE, Extension, Validation
from tests.runs import load_any


@pytest.fixture
def run(one_epoch_run: Path, tmp_path: Path) -> Path:
    """A finished run of one epoch of ten steps, which has no file of a validation."""
    shutil.copytree(one_epoch_run, tmp_path / "run")
    return tmp_path / "run"


def _rewritten(run: Path, spec: dict[str, str] | None = None, **values: Any) -> None:
    """Give the checkpoint other values, and the spec other words."""
    (path,) = find_checkpoints(run)
    save_checkpoint(path, {**load_any(path), **values})
    text = (run / "spec.yaml").read_text()
    for before, after in (spec or {}).items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    (run / "spec.yaml").write_text(text)


def test_the_same_command_asks_for_the_same_until_the_run_has_come_to_its_end(run: Path) -> None:
    asked = Extension.asked(str(run), 2)
    assert asked == Extension(1, 3)
    Extension(1, 2).write(run)
    assert Extension.asked(str(run), 1) == Extension(1, 2)
    Extension(1, 2, is_done=True).write(run)
    assert Extension.asked(str(run), 1) == Extension(1, 2)  # the spec still has one epoch


def test_a_run_that_has_stopped_early_gets_epochs_beyond_those_that_were_trained(run: Path) -> None:
    (checkpoint,) = find_checkpoints(run)
    for stops, before in ((True, 4), (False, 1)):
        Validation(4, {"top1": 50.0}, {}, stops_early=stops).write(checkpoint)
        assert Extension.asked(str(run), 3) == Extension(before, before + 3)


def test_what_an_earlier_version_has_begun_is_not_begun_again(run: Path) -> None:
    """It kept that in its log: the spec has two epochs more than the newest checkpoint's experiment."""
    (checkpoint,) = find_checkpoints(run)
    assert not measures_path(checkpoint).exists()
    _rewritten(run, {"\n  epochs: 1\n": "\n  epochs: 3\n"})
    assert Extension.asked(str(run), 2) == Extension(1, 3)
    assert Extension.asked(str(run), 4) == Extension(3, 7)
    _rewritten(run, line=5)
    with pytest.raises(UserError, match=r"start it once without --more-epochs, then again with it"):
        Extension.asked(str(run), 4)


@pytest.mark.parametrize("file", [EXTENSION_FILE, "checkpoints/step_00000010.measures.json"])
@pytest.mark.parametrize("text", ["{", "[]", '{"other": 1}'])
def test_a_damaged_file_is_named(run: Path, file: str, text: str) -> None:
    (run / file).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{file}: cannot be read \(.*\); restore it, or delete it"):
        Extension.asked(str(run), 1)
