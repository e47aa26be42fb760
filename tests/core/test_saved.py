"""What is loaded of files that torch saved: nothing torn, nothing that runs, nothing larger than its network needs."""

from __future__ import annotations

import os
import pickle
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from summit_train.core import saved
from summit_train.core.comm import World
from summit_train.core.errors import UserError
from summit_train.core.run_folder import CheckpointError, checkpoint_path, digest_path
from summit_train.core.saved import (
    Checkpoint,
    bound_of,
    check_fit,
    load_newest,
    load_saved,
    tensors_of,
    without_numbers,
)
from summit_train.training.checkpoint import save_checkpoint
from tests.runs import LARGE, load_any, small_checkpoints


def test_a_torn_file_or_one_with_a_flipped_bit_is_never_loaded(tmp_path: Path) -> None:
    """Cut to any length from nothing to one byte less than all, in 60 steps; a bit flipped at 40 places."""
    (path,) = small_checkpoints(tmp_path, 1)
    whole = path.read_bytes()
    cuts = {*range(0, len(whole), len(whole) // 60), len(whole) - 1}
    flips = range(0, len(whole), len(whole) // 40)
    damaged = [whole[:length] for length in cuts]
    damaged += [whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in flips]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="damaged"):
            load_any(path)
    path.write_bytes(whole)
    assert load_any(path)["step"] == 1


def test_the_newest_whole_one_is_taken_and_the_others_named(tmp_path: Path) -> None:
    first, second, third = small_checkpoints(tmp_path, 10, 20, 30)
    third.write_bytes(third.read_bytes()[:100])
    digest_path(second).unlink()
    path, state, complaints = load_newest(tmp_path, LARGE)
    assert path == first and state["step"] == 10
    assert str(third) in complaints[0] and str(second) in complaints[1] and "missing" in complaints[1]


@pytest.mark.parametrize("place", ["check_digest", "load_saved", "_unpacked_size", "_stored_size", "_load"])
def test_a_checkpoint_deleted_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The run writes step 20 and deletes step 10 between two operations that load it."""
    (first,) = small_checkpoints(tmp_path, 10)
    honest = getattr(saved, place)

    def pruned(*arguments: object, **options: object) -> object:
        if first.exists():
            small_checkpoints(tmp_path, 20)
            first.unlink()
            digest_path(first).unlink()
        return honest(*arguments, **options)

    monkeypatch.setattr(saved, place, pruned)
    path, state, complaints = load_newest(tmp_path, LARGE)
    assert (path, state["step"], complaints) == (checkpoint_path(tmp_path, 20), 20, [])


def test_a_run_whose_checkpoints_vanish_does_not_start_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one of which no checkpoint is whole."""
    assert load_newest(tmp_path, LARGE) == (None, {}, [])
    (first,) = small_checkpoints(tmp_path, 10)
    monkeypatch.setattr(saved, "load_saved", lambda path, bound: first.unlink() or saved.peek(path))
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* can be read"):
        load_newest(tmp_path, LARGE)
    first.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* can be read"):
        load_newest(tmp_path, LARGE)


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
        with pytest.raises(CheckpointError, match=r"cannot be read as a file|pickled objects"):
            load_any(path)
    assert not (tmp_path / "harmed").exists()


def test_a_file_that_unpacks_to_more_than_it_has_is_refused(tmp_path: Path) -> None:
    """Its numbers are compressed, 16 MiB of zeros among them."""
    path = tmp_path / "bomb.pt"
    torch.save({"w": torch.zeros(10)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content + bytes(1 << 24 if name.endswith("data/0") else 0))
    assert path.stat().st_size < 1 << 16
    with pytest.raises(CheckpointError, match=r"bomb\.pt: unpacks to 16,777,\d+ bytes of .* torch never compresses"):
        load_saved(path, LARGE)


def test_a_file_is_no_larger_than_its_network_needs(tmp_path: Path) -> None:
    """Four copies in double, and 256 MiB for what is not of the network."""
    path, network = tmp_path / "large.pt", nn.Linear(3, 4)
    assert bound_of(network)(path, None) == (1 << 28) + 4 * 8 * 16
    torch.save({"w": torch.zeros(1000)}, path)
    assert load_saved(path, lambda path, content: 10_000)["w"].shape == (1000,)
    with pytest.raises(CheckpointError, match=r"large\.pt: unpacks to [\d,]+ bytes; its network needs 4,000 at most"):
        load_saved(path, lambda path, content: 4000)


def test_a_checkpoint_of_other_parts_is_named_in_one_line(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 1)
    save_checkpoint(path, {"model": {}})
    with pytest.raises(CheckpointError, match="which has model, optimizer and step"):
        load_any(path)
    for change, reason in (
        ({"model": {"w": "text"}}, "model must hold tensors by name"),
        ({"step": -1}, "step must be a number of updates, got -1"),
        ({"step": True}, "step must be a number of updates, got True"),
        ({"ema": {"model": None}}, r"ema\.model must hold tensors by name, got NoneType"),
        ({"ema": 3}, "ema must hold values by name, got int"),
        ({"experiment": [1]}, "experiment must hold values by name, got list"),
        ({"learner_digests": 7}, "learner_digests must be a list of SHA-256, got int"),
    ):
        save_checkpoint(path, {"model": {}, "optimizer": {}, "step": 1, **change})
        with pytest.raises(CheckpointError, match=f"step_00000001.pt: {reason}") as caught:
            load_any(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("saved", "reason"),
    [
        ({"w": torch.zeros(2), "n": 1}, r"part\.w must be float32 \(3,\), got float32 \(2,\)"),
        ({"w": torch.zeros(3, dtype=torch.int64), "n": 1}, r"part\.w must be float32 \(3,\), got int64 \(3,\)"),
        ({"w": 3, "n": 1}, r"part\.w must be float32 \(3,\), got int"),
        ({"n": 1}, "part has no w"),
        ({"w": torch.zeros(3), "n": 1, "v": 2}, "part must not have v"),
        ({"w": torch.zeros(3), "n": "1"}, r"part\.n must be int, got str"),
        ([], "part must be values by name, got list"),
    ],
)
def test_a_part_of_another_run_does_not_fit(saved: object, reason: str) -> None:
    own = {"w": torch.zeros(3), "n": 1}
    check_fit(Path("a.pt"), "part", {"w": torch.zeros(3, dtype=torch.float64), "n": 1.0}, own)
    with pytest.raises(UserError, match=f"^a.pt: does not fit: {reason}$"):
        check_fit(Path("a.pt"), "part", saved, own)


def test_the_tensors_of_a_file_are_copied_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In more pieces than there are maps; one that occurs twice, one of another precision and layout, a scalar."""
    monkeypatch.setattr(saved, "_LEAST_OF_A_MAP", 1)
    path, large = tmp_path / "a.pt", torch.arange(300_000.0)
    kernel = torch.arange(48.0).view(2, 2, 3, 4)
    state = {
        "a": {"w": large, "n": 3, 7: {"k": kernel, "s": torch.tensor(5.0)}},
        "again": large,
        "many": {str(number): torch.full((9,), number) for number in range(40)},
    }
    torch.save(state, path)
    assert list(tensors_of(state, "x"))[:5] == ["x.a.w", "x.a.7.k", "x.a.7.s", "x.again", "x.many.0"]
    shapes = without_numbers(state)
    assert shapes["a"]["n"] == 3 and shapes["a"][7]["k"].is_meta and shapes["a"][7]["k"].shape == kernel.shape
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(state).items() if name != "a.w"}
    targets["a.7.k"] = torch.zeros(2, 2, 3, 4, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    checkpoint = Checkpoint(path, shapes, World())
    checkpoint.fill(targets)
    path.write_bytes(b"")  # none of it is in the file any more
    for name, tensor in tensors_of(state).items():
        assert name == "a.w" or torch.equal(targets[name], tensor.to(targets[name].dtype)), name


def test_a_network_takes_the_weights_of_a_checkpoint_or_none_of_them(tmp_path: Path) -> None:
    path, network = checkpoint_path(tmp_path, 1), torch.nn.Linear(2, 3)
    weights = {"weight": torch.ones(3, 2), "bias": torch.ones(3)}
    save_checkpoint(path, {"model": weights})
    with pytest.raises(CheckpointError, match=r"step_00000001\.pt: does not fit: model has no bias"):
        Checkpoint(path, {"model": {"weight": weights["weight"]}}, World()).restore(network)
    assert not torch.equal(network.weight, weights["weight"])
    Checkpoint(path, without_numbers({"model": weights}), World()).restore(network)
    assert torch.equal(network.weight, weights["weight"]) and torch.equal(network.bias, weights["bias"])
