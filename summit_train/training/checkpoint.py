"""Checkpoints: written whole or not at all, checked before they are read, refused when they are of another run."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from summit_train.errors import RunFailed, UserError
from summit_train.files import replacing, write_text

_NAME = re.compile(r"step_(\d{8})\.pt")


class CheckpointError(UserError):
    """A checkpoint cannot be read, or not be used for this run."""


class CheckpointWriteError(RunFailed):
    """A checkpoint could not be written; the ones before it are as they were."""


def checkpoint_path(run_path: Path, step: int) -> Path:
    """The file of the checkpoint after `step` updates."""
    return run_path / "checkpoints" / f"step_{step:08d}.pt"


def find_checkpoints(run_path: Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    folder = run_path / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def step_of(path: Path) -> int:
    """The number of updates in a checkpoint's name; ValueError for another name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path}: no checkpoint's name; step_XXXXXXXX.pt is wanted")
    return int(match.group(1))


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write `state` so that `path` is at no time a part of a file.

    It is made in memory, so the digest is of what was meant and not of what a disk made of it. The bytes go to a
    temporary name and to the disk; then the digest is put beside, then the file gets its name. A run that is killed in
    between leaves a temporary file or a digest without a file, which nothing reads. Raises
    CheckpointWriteError, with what was there before untouched, when the disk is full or fails.
    """
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    content = buffer.getbuffer()
    try:
        with replacing(path) as file:
            file.write(content)
            file.flush()
            # Within the block: the file gets its name when its digest is there.
            write_text(digest_path(path), f"{hashlib.sha256(content).hexdigest()}  {path.name}\n")
        _sync_folder(path.parent)
    except OSError as error:
        last = find_checkpoints(path.parent.parent)
        kept = f"the last good one is {last[-1]}" if last else "there is no earlier one"
        raise CheckpointWriteError(f"{path}: the checkpoint could not be written: {error.strerror}; {kept}") from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint on the CPU after its digest was found right.

    Raises CheckpointError when the file is missing, torn, changed, or opens with anything but plain values.
    """
    digest_file = digest_path(path)
    try:
        wanted = digest_file.read_text().split()[0]
        found = _digest(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: {error.filename} is missing") from error
    except (OSError, IndexError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if wanted != found:
        raise CheckpointError(f"{path}: the file is damaged: its SHA-256 is not that in {digest_file.name}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load has no common base for what it raises
        raise CheckpointError(f"{path}: is no checkpoint: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict) or not {"model", "optimizer", "step"} <= state.keys():
        raise CheckpointError(f"{path}: is no checkpoint of a run: model, optimizer and step are wanted in it")
    return state


def load_newest(run_path: Path) -> tuple[Path | None, dict[str, Any], list[str]]:
    """The newest checkpoint that is whole: (path, state, complaints about newer ones that are not).

    (None, {}, []) when there is none at all. Raises CheckpointError when there are some and none is whole: to begin
    anew would throw the run away in silence.
    """
    paths = find_checkpoints(run_path)
    complaints: list[str] = []
    for path in reversed(paths):
        try:
            return path, load_checkpoint(path), complaints
        except CheckpointError as error:
            complaints.append(str(error))
    if paths:
        reasons = "; ".join(complaints)
        raise CheckpointError(f"no checkpoint of {run_path} can be read ({reasons}); move them away to begin anew")
    return None, {}, []


def prune_checkpoints(run_path: Path, keep: int, steps_per_epoch: int) -> None:
    """Keep the newest checkpoint and the `keep` newest of whole epochs, which the final accuracy is the mean over.

    Digests go after their files. What a killed run left half written goes too.
    """
    paths = find_checkpoints(run_path)
    kept = {*paths[-1:], *epoch_checkpoints(run_path, steps_per_epoch)[-keep:]}
    for path in paths:
        if path not in kept:
            path.unlink(missing_ok=True)
            digest_path(path).unlink(missing_ok=True)
    for leftover in (run_path / "checkpoints").glob(".step_*.writing"):
        leftover.unlink(missing_ok=True)


def epoch_checkpoints(run_path: Path, steps_per_epoch: int) -> list[Path]:
    """The checkpoints at the ends of epochs, oldest first."""
    return [path for path in find_checkpoints(run_path) if step_of(path) % steps_per_epoch == 0]


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What two experiments differ in: `key: the checkpoint has a, the spec b`, key by key."""
    return [
        f"{key}: the checkpoint has {saved.get(key)!r}, this run {wanted.get(key)!r}"
        for key in sorted(saved.keys() | wanted.keys())
        if saved.get(key) != wanted.get(key)
    ]


def digest_path(path: Path) -> Path:
    """The file beside a checkpoint with its SHA-256, in sha256sum's format."""
    return path.with_name(path.name + ".sha256")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
