"""Write checkpoints whole or not at all, and read the newest that is whole."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from summit_train.errors import RunFailed, UserError
from summit_train.files import file_sha256, replacing, write_text


class CheckpointError(UserError):
    """A checkpoint cannot be read, or not be used for this run."""


def checkpoint_path(run_path: Path, step: int) -> Path:
    """Return the file of the checkpoint after `step` updates."""
    return run_path / "checkpoints" / f"step_{step:08d}.pt"


def learner_path(path: Path, number: int) -> Path:
    """Return the file beside a checkpoint with the state of one learner, where learners differ."""
    return path.with_name(f"{path.stem}.learner_{number:04d}.pt")


def find_checkpoints(run_path: Path) -> list[Path]:
    """Return the run's checkpoints, oldest first."""
    return sorted((run_path / "checkpoints").glob(f"step_{'[0-9]' * 8}.pt"))


def step_of(path: Path) -> int:
    """Return the number of updates in the name of a checkpoint, step_XXXXXXXX.pt."""
    return int(path.stem.removeprefix("step_"))


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> str:
    """Write `state` so that `path` is at no time a part of a file; return its SHA-256.

    The digest is taken in memory, so it is not of what a disk made of the bytes. They are flushed under a temporary
    name, then the digest is written, then the file gets its name. A run that is killed in between leaves files that
    nothing reads. Raises RunFailed if the disk is full or fails; earlier checkpoints are untouched.
    """
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    content = buffer.getbuffer()
    digest = hashlib.sha256(content).hexdigest()
    try:
        with replacing(path) as file:
            file.write(content)
            file.flush()
            # Within the block, so that the file gets its name after its digest is there.
            write_text(digest_path(path), f"{digest}  {path.name}\n")
        _sync_folder(path.parent)
    except OSError as error:
        last = find_checkpoints(path.parent.parent)
        kept = f"the last good one is {last[-1]}" if last else "there is no earlier one"
        raise RunFailed(f"{path}: the checkpoint could not be written: {error.strerror}; {kept}") from error
    return digest


def load_checkpoint(path: Path, *, may_be_alone: bool = False) -> dict[str, Any]:
    """Check the digest of a checkpoint, then load it on the CPU.

    may_be_alone: accept a file that was copied without its digest, unchecked.
    Raises CheckpointError if the file is missing, torn, changed, or no checkpoint of plain values.
    """
    digest_file = digest_path(path)
    try:
        found = file_sha256(path)
        wanted = found if may_be_alone and not digest_file.exists() else digest_file.read_text().split()[0]
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
    """Return the newest checkpoint that is whole: (path, state, complaints about newer ones that are not).

    One that lists learners is whole with their files, by the SHA-256 of each. (None, {}, []) without any checkpoint.
    Raises CheckpointError if there are some and none is whole: to begin anew would throw the run away in silence.
    """
    paths = find_checkpoints(run_path)
    complaints: list[str] = []
    for path in reversed(paths):
        try:
            state = load_checkpoint(path)
            _check_learners(path, state.get("learner_digests", ()))
            return path, state, complaints
        except CheckpointError as error:
            complaints.append(str(error))
    if paths:
        reasons = "; ".join(complaints)
        raise CheckpointError(f"no checkpoint of {run_path} can be read ({reasons}); move them away to begin anew")
    return None, {}, []


def _check_learners(path: Path, digests: Sequence[str]) -> None:
    """Raise CheckpointError where a learner's file is missing or is not the one of this checkpoint."""
    for file, digest in ((learner_path(path, number), digest) for number, digest in enumerate(digests)):
        if not file.exists():
            raise CheckpointError(f"{path}: {file} is missing")
        if file_sha256(file) != digest:
            raise CheckpointError(f"{path}: {file} is damaged: its SHA-256 is not that in the checkpoint")


def prune_checkpoints(run_path: Path, keep: int, steps_per_epoch: int) -> None:
    """Keep the newest checkpoint and the `keep` newest of whole epochs, which the final accuracy is the mean over.

    The files of their learners stay with them. What a killed run left half written is deleted too.
    """
    paths = find_checkpoints(run_path)
    kept = {*paths[-1:], *epoch_checkpoints(run_path, steps_per_epoch)[-keep:]}
    for path in paths:
        if path not in kept:
            path.unlink(missing_ok=True)
            digest_path(path).unlink(missing_ok=True)  # after its file
    stems = {path.stem for path in kept}
    for path in (run_path / "checkpoints").glob("step_*.learner_*"):
        if path.name.partition(".")[0] not in stems:
            path.unlink(missing_ok=True)
    for leftover in (run_path / "checkpoints").glob(".step_*.writing"):
        leftover.unlink(missing_ok=True)


def epoch_checkpoints(run_path: Path, steps_per_epoch: int) -> list[Path]:
    """Return the checkpoints at the ends of epochs, oldest first."""
    return [path for path in find_checkpoints(run_path) if step_of(path) % steps_per_epoch == 0]


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return what two experiments differ in, key by key: `key: the checkpoint has a, this run b`."""
    return [
        f"{key}: the checkpoint has {saved.get(key)!r}, this run {wanted.get(key)!r}"
        for key in sorted(saved.keys() | wanted.keys())
        if saved.get(key) != wanted.get(key)
    ]


def digest_path(path: Path) -> Path:
    """Return the file beside a checkpoint with its SHA-256, in sha256sum's format."""
    return path.with_name(path.name + ".sha256")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
