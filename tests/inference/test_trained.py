"""A run directory or a checkpoint alone gives back the network, its spec and the names of its classes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from summit_train.core.errors import UserError
from summit_train.inference.trained import named, open_trained
from tests.closeness import assert_near
from tests.runs import changed_copy

CPU = torch.device("cpu")


def test_a_run_gives_its_newest_checkpoint(trained_run: Path, motion_set: Path) -> None:
    trained = open_trained(trained_run)
    assert trained.path.name == "step_00000020.pt" and trained.step == 20 and trained.run_path == trained_run
    assert trained.spec.model.shift_direction == "past"
    assert list(trained.classes) == (motion_set / "classes.txt").read_text().split() and trained.has_names


def test_a_checkpoint_alone_is_enough(trained_run: Path, tmp_path: Path) -> None:
    alone = tmp_path / "weights.pt"
    shutil.copy(open_trained(trained_run).path, alone)
    ours, theirs = open_trained(alone), open_trained(trained_run)
    assert ours.run_path is None
    assert (ours.spec, ours.step, ours.classes) == (theirs.spec, theirs.step, theirs.classes)
    clip = torch.rand(1, 4, 3, 32, 32)
    with torch.inference_mode():
        plain, fast = ours.network(CPU, ready=False), theirs.network(CPU)
        assert plain.execution == "plain" and not plain.training and not fast.training
        assert_near(plain(clip), fast(clip), 1e-5)


def test_overrides(trained_run: Path) -> None:
    assert open_trained(trained_run, ["evaluate.clips=3"]).spec.evaluate.clips == 3
    with pytest.raises(UserError, match=r"evaluate\.clips"):
        open_trained(trained_run, ["evaluate.clips=0"])


def test_an_override_that_makes_it_another_network_is_refused(trained_run: Path) -> None:
    trained = open_trained(trained_run, ["model.width=0.25"])
    with pytest.raises(UserError, match=r"step_00000020\.pt: does not fit: model\.conv1\.weight must be"):
        trained.network(CPU)


def test_without_names_the_classes_are_numbers(trained_run: Path, tmp_path: Path) -> None:
    trained = open_trained(changed_copy(trained_run, tmp_path / "a.pt", classes=None))
    assert trained.classes == ("0", "1", "2", "3") and not trained.has_names


def test_a_digest_beside_it_counts(trained_run: Path, tmp_path: Path) -> None:
    path = changed_copy(trained_run, tmp_path / "a.pt", step=1)
    (tmp_path / "a.pt.sha256").write_text(f"{'0' * 64}  a.pt\n")
    with pytest.raises(UserError, match="the file is damaged"):
        open_trained(path)


def test_what_is_refused(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("no checkpoint")
    without_spec = changed_copy(trained_run, tmp_path / "old.pt", spec=None)
    for path, reason in (
        (tmp_path / "empty", "there is no checkpoint in it"),
        (tmp_path / "nowhere", "no such run directory or checkpoint"),
        (tmp_path / "text.pt", "cannot be read as a file"),
        (without_spec, "does not hold its spec"),
    ):
        with pytest.raises(UserError, match=reason) as caught:
            open_trained(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_names_of_the_classes(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("a\nb\nc\nd\n")
    (tmp_path / "three.txt").write_text("a\nb\nc\n")
    (tmp_path / "twice.txt").write_text("a\nb\nc\na\n")
    nameless = replace(open_trained(trained_run), classes=("0", "1", "2", "3"), has_names=False)
    assert named(nameless, None) is nameless
    found = named(nameless, str(tmp_path / "names.txt"))
    assert (found.classes, found.has_names) == (("a", "b", "c", "d"), True)
    for name, reason in (
        ("three.txt", "has 3 names; it must name the 4 classes of .*, one a line"),
        ("twice.txt", "is listed twice"),
        ("gone.txt", "there is no such file; it must name the 4 classes"),
    ):
        with pytest.raises(UserError, match=reason) as caught:
            named(nameless, str(tmp_path / name))
        assert name in str(caught.value) and "\n" not in str(caught.value)
