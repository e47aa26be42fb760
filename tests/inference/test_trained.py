"""A run folder or a checkpoint alone gives back the network, its spec and the names of its classes."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from summit_train.core.errors import UserError
from summit_train.core.run_folder import best_path, checkpoint_path
from summit_train.core.saved import SAFETENSORS_KEY
from summit_train.inference.arguments import open_named
from summit_train.inference.trained import Trained, open_trained
from summit_train.models import build_model
from summit_train.models.weights import load_pretrained
from tests.closeness import assert_near
from tests.runs import changed_copy
from tests.worlds import Say, received

CPU = torch.device("cpu")


def _equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def _refused(path: Path, checkpoint: str = "last") -> str:
    with pytest.raises(UserError) as caught:
        open_trained(path, (), checkpoint)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_gives_its_newest_checkpoint_and_takes_overrides(trained_run: Path, motion_set: Path) -> None:
    trained = open_trained(trained_run, ["evaluate.clips=3"])
    assert trained.path.name == "step_00000020.pt" and trained.step == 20 and trained.run_path == trained_run
    assert trained.spec.model.shift_direction == "past" and trained.spec.evaluate.clips == 3
    assert list(trained.classes) == (motion_set / "classes.txt").read_text().split() and trained.has_names


def test_a_checkpoint_alone_is_enough_and_other_ranks_get_the_same(trained_run: Path, tmp_path: Path) -> None:
    theirs = open_trained(trained_run, ["evaluate.clips=3"])
    alone = shutil.copy(theirs.path, tmp_path / "weights.pt")
    ours = open_trained(alone, ["evaluate.clips=3"])
    assert ours.run_path is None
    assert (ours.spec, ours.step, ours.classes) == (theirs.spec, theirs.step, theirs.classes)
    clip = torch.rand(1, 4, 3, 32, 32)
    with torch.inference_mode():
        plain, fast = ours.network(CPU, ready=False), theirs.network(CPU)
        assert plain.execution == "plain" and not plain.training and not fast.training
        assert_near(plain(clip), fast(clip), 1e-5)
    for trained in (ours, theirs):
        other = Trained.of_message(received(trained.message()))
        assert _equal(other.weights, trained.weights)
        assert replace(other, weights={}) == replace(trained, weights={})


def test_what_is_refused(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("no checkpoint")
    changed_copy(trained_run, tmp_path / "old.pt", spec=None)
    changed_copy(trained_run, tmp_path / "torn.pt", step=1)
    (tmp_path / "torn.pt.sha256").write_text(f"{'0' * 64}  torn.pt\n")
    for name, reason in (
        ("empty", "no checkpoint in this folder"),
        ("nowhere", "no such run folder or checkpoint"),
        ("text.pt", "cannot be read as a file"),
        ("old.pt", "lacks its spec"),
        ("torn.pt", "the file is damaged"),
    ):
        line = _refused(tmp_path / name)
        assert reason in line and str(tmp_path / name) in line


def test_safetensors_files_with_the_spec_of_earlier_versions_are_checkpoints(trained_run: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="the package safetensors is not installed")
    before, path = open_trained(trained_run), tmp_path / "model.safetensors"
    weights = {name: value.contiguous() for name, value in before.weights.items()}
    about = {"spec": before.spec.model_dump(mode="json"), "classes": list(before.classes), "step": 20, "optimizer": {}}
    path.write_bytes(safetensors.save(weights, {"format": "pt", SAFETENSORS_KEY: json.dumps(about)}))
    after = open_trained(path)
    assert (after.classes, after.step, after.spec) == (before.classes, 20, before.spec)
    assert _equal(before.weights, after.weights)
    for values, message in (
        ({}, "not a checkpoint of a run"),
        ({SAFETENSORS_KEY: "[1]"}, "must hold values by name, got list"),
        ({SAFETENSORS_KEY: "{"}, "cannot be read as a safetensors file"),
        ({SAFETENSORS_KEY: "[" * 200_000}, "are nested too deeply"),
    ):
        path.write_bytes(safetensors.save({"w": torch.ones(3)}, values))
        assert message in _refused(path)
    path.write_bytes(b"x" * 99)
    assert "cannot be read as a safetensors file" in _refused(path)


def test_of_a_strangers_safetensors_file_the_tensors_that_fit_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="the package safetensors is not installed")
    model, path = build_model("tsn", "resnet18", 8, 4, width=0.125), tmp_path / "a.safetensors"
    state = {name: torch.full_like(value, 2) for name, value in model.state_dict().items()}
    path.write_bytes(safetensors.save(state, {"format": "pt"}))
    load_pretrained(model, path)
    assert _equal(model.state_dict(), state)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UserError, match="pip install safetensors"):
        load_pretrained(model, path)


def test_a_run_gives_the_checkpoint_that_is_asked_for(trained_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    first, last = checkpoint_path(run, 10), checkpoint_path(run, 20)
    best_path(run).write_text('{"step": 10, "measure": "top1", "value": 50.0}')
    assert [open_trained(run, (), name).path for name in ("last", "best", str(first))] == [last, first, first]
    assert open_trained(run, (), "best").run_path == run
    copied = shutil.copy(first, tmp_path / "copied.pt")
    for path, name, reason in (
        (run, "first", f"checkpoint must be last, best or a file in {run}/checkpoints, got first"),
        (run, str(copied), f"best or a file in {run}/checkpoints, got {copied}"),
        (first, "best", f"checkpoint must be used with a run folder, got {first}"),
        (trained_run, "best", f"{trained_run}: has no best checkpoint; train with checkpoint.keep_best"),
    ):
        assert reason in _refused(path, name)
    # A best one that is torn or not named is refused, too: the newest is not taken in its place.
    with open(first, "ab") as file:
        file.write(b"more")
    for text, reason in (
        ("{", "best.json: must name the step of a checkpoint"),
        ('{"step": "../../x"}', "best.json: must name the step of a checkpoint"),
        (
            '{"step": 30}',
            f"checkpoint must be last, best or a file in {run}/checkpoints, got {checkpoint_path(run, 30)}",
        ),
        ('{"step": 10}', "the file is damaged"),
    ):
        best_path(run).write_text(text)
        assert reason in _refused(run, "best")


def test_names_of_the_classes(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nameless = str(changed_copy(trained_run, tmp_path / "a.pt", classes=None))

    def opened(classes: str | None) -> Trained:
        return open_named(argparse.Namespace(run=nameless, classes=classes, checkpoint="last"), [])

    trained = opened(None)
    assert trained.classes == ("0", "1", "2", "3") and not trained.has_names
    note = "lacks the names of its classes: numbers are shown; --classes FILE gives them names"
    assert capsys.readouterr().err == f"{nameless}: {note}\n"
    names = tmp_path / "names.txt"
    for text, reason in (
        (None, "no such file; it must name the 4 classes"),
        ("a\nb\nc\n", "has 3 names; it must name the 4 classes of .*, one a line"),
        ("a\nb\nc\na\n", "must be the name of another class, got 'a' again"),
    ):
        if text is not None:
            names.write_text(text)
        with pytest.raises(UserError, match=reason) as caught:
            opened(str(names))
        assert "names.txt" in str(caught.value) and "\n" not in str(caught.value)
    names.write_text("a\nb\nc\nd\n")
    trained = opened(str(names))
    assert (trained.classes, trained.has_names) == (("a", "b", "c", "d"), True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("words", [("cam", "run", "a.mp4", "--out"), ("export", "run", "--out"), ("stream", "run")])
def test_several_ranks_are_refused_where_the_work_is_for_one(
    words: tuple[str, ...], tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    reason = "is one process and shares no work among ranks; start it without mpirun, srun, jsrun or torchrun"
    said = say(*words, tmp_path / "out")
    assert said == (2, "", f"summit-train: {words[0]} {reason}\n") and list(tmp_path.iterdir()) == []
