"""Checkpoints: never torn, never another's, never more than data."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from summit_train.training.checkpoint import (
    CheckpointError,
    checkpoint_path,
    differences,
    digest_path,
    epoch_checkpoints,
    find_checkpoints,
    load_checkpoint,
    load_newest,
    prune_checkpoints,
    save_checkpoint,
    step_of,
)
from tests.worlds import environment


def _state(step: int) -> dict[str, object]:
    return {"model": {"w": torch.arange(1000.0) + step}, "optimizer": {"state": {}}, "step": step}


def _saved(run: Path, *steps: int) -> list[Path]:
    paths = [checkpoint_path(run, step) for step in steps]
    for path, step in zip(paths, steps, strict=True):
        save_checkpoint(path, _state(step))
    return paths


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    (path,) = _saved(tmp_path, 12)
    assert path.name == "step_00000012.pt" and step_of(path) == 12
    state = load_checkpoint(path)
    assert state["step"] == 12 and torch.equal(state["model"]["w"], torch.arange(1000.0) + 12)
    assert torch.load(path, weights_only=True)["step"] == 12
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, f"{path.name}.sha256"]


def test_the_digest_is_that_of_sha256sum(tmp_path: Path) -> None:
    (path,) = _saved(tmp_path, 3)
    done = subprocess.run(
        ["sha256sum", "--check", digest_path(path).name], cwd=path.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_torn_file_is_never_loaded(tmp_path: Path) -> None:
    """Cut anywhere: every length from nothing to one byte less than all, in 60 steps."""
    (path,) = _saved(tmp_path, 1)
    whole = path.read_bytes()
    cuts = {*range(0, len(whole), len(whole) // 60), len(whole) - 1}
    for length in cuts:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="damaged"):
            load_checkpoint(path)
    path.write_bytes(whole)
    assert load_checkpoint(path)["step"] == 1


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    (path,) = _saved(tmp_path, 1)
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 40):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match="damaged"):
            load_checkpoint(path)


def test_the_newest_whole_one_is_taken_and_the_others_named(tmp_path: Path) -> None:
    first, second, third = _saved(tmp_path, 10, 20, 30)
    third.write_bytes(third.read_bytes()[:100])
    digest_path(second).unlink()
    path, state, complaints = load_newest(tmp_path)
    assert path == first and state["step"] == 10
    assert str(third) in complaints[0] and str(second) in complaints[1] and "missing" in complaints[1]


def test_to_begin_anew_where_none_is_whole_would_lose_the_run(tmp_path: Path) -> None:
    assert load_newest(tmp_path) == (None, {}, [])
    (path,) = _saved(tmp_path, 10)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* can be read"):
        load_newest(tmp_path)


class _Harm:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("harmed",)


def test_a_checkpoint_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = checkpoint_path(tmp_path, 1)
    path.parent.mkdir()
    for writer in (lambda file: pickle.dump(_Harm(), file), lambda file: torch.save({"step": _Harm()}, file)):
        with open(path, "wb") as file:
            writer(file)
        digest = subprocess.run(["sha256sum", str(path)], capture_output=True, text=True, check=True).stdout
        digest_path(path).write_text(digest)
        with pytest.raises(CheckpointError, match="is no checkpoint"):
            load_checkpoint(path)
    assert not (tmp_path / "harmed").exists()


def test_a_file_that_is_no_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 1)
    save_checkpoint(path, {"model": {}})
    with pytest.raises(CheckpointError, match="model, optimizer and step are wanted"):
        load_checkpoint(path)


_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import torch
from summit_train.errors import RunFailed
from summit_train.training.checkpoint import checkpoint_path, save_checkpoint
run = Path(sys.argv[1])
state = {"model": {"w": torch.zeros(1_000_000)}, "optimizer": {}, "step": 20}
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_checkpoint(checkpoint_path(run, 20), state)
except RunFailed as error:
    print(error)
"""


def test_a_full_disk_leaves_the_old_one(tmp_path: Path) -> None:
    """A file may not grow beyond 100 kB: the kernel refuses the write, as a full disk does."""
    (old,) = _saved(tmp_path, 10)
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path)],
        capture_output=True, text=True, check=True, env=environment(),
    )  # fmt: skip
    assert "step_00000020.pt: the checkpoint could not be written: File too large" in done.stdout
    assert f"the last good one is {old}" in done.stdout
    assert find_checkpoints(tmp_path) == [old] and load_checkpoint(old)["step"] == 10
    assert sorted(p.name for p in old.parent.iterdir()) == [old.name, digest_path(old).name]


def test_whole_epochs_are_kept_and_the_newest(tmp_path: Path) -> None:
    """10 steps an epoch, two kept: 13 was asked for by a signal and is passed by 20."""
    _saved(tmp_path, 10, 13, 20, 30, 34)
    (tmp_path / "checkpoints" / ".step_00000035.pt.writing").write_bytes(b"half")
    prune_checkpoints(tmp_path, 2, 10)
    assert [step_of(path) for path in find_checkpoints(tmp_path)] == [20, 30, 34]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 6
    assert [step_of(path) for path in epoch_checkpoints(tmp_path, 10)] == [20, 30]


def test_differences_are_named_key_by_key() -> None:
    saved, wanted = {"seed": 0, "model.width": 1.0, "old": 1}, {"seed": 1, "model.width": 1.0}
    assert differences(saved, wanted) == [
        "old: the checkpoint has 1, this run None",
        "seed: the checkpoint has 0, this run 1",
    ]
