"""A run's checkpoints as files: their names, which there are, and which is the best."""

from __future__ import annotations

from pathlib import Path

from summit_train.core.errors import UserError
from summit_train.core.files import read_file, remove_leftovers
from summit_train.core.text import from_json


class CheckpointError(UserError):
    """A checkpoint cannot be read, or not be used for this run."""


def learner_path(path: Path, number: int) -> Path:
    """Return the path of the file with one learner's state, which a checkpoint has if learners differ."""
    return path.with_name(f"{path.stem}.learner_{number:04d}.pt")


def digest_path(path: Path) -> Path:
    """Return the path of the file with a checkpoint's SHA-256, in sha256sum's format."""
    return path.with_name(path.name + ".sha256")


def measures_path(path: Path) -> Path:
    """Return the path of the file with the measures of the validation that followed a checkpoint."""
    return path.with_suffix(".measures.json")


def checkpoint_path(run_path: Path, step: int) -> Path:
    return run_path / "checkpoints" / f"step_{step:08d}.pt"


def step_of(path: Path) -> int:
    """Return the number of updates in the name of a checkpoint."""
    return int(path.stem.removeprefix("step_"))


def find_checkpoints(run_path: Path) -> list[Path]:
    """Return the run's checkpoints, oldest first."""
    return sorted((run_path / "checkpoints").glob(f"step_{'[0-9]' * 8}.pt"))


def best_path(run_path: Path) -> Path:
    """Return the path of the file that names the run's best checkpoint: step, measure and value."""
    return run_path / "checkpoints" / "best.json"


def best_checkpoint(run_path: Path) -> Path:
    """Return the checkpoint that checkpoint.keep_best keeps. Raises CheckpointError if there is none."""
    file = best_path(run_path)
    try:
        return checkpoint_path(run_path, from_json(read_file(file))["step"])
    except FileNotFoundError as error:
        why = "has no best checkpoint; train with checkpoint.keep_best, or use last or a file"
        raise CheckpointError(f"{run_path}: {why}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: must name the step of a checkpoint ({error}); use last or a file") from error


def remove_half_written(run_path: Path) -> None:
    """Remove what killed processes have left of files in a run folder. The caller holds its lock."""
    remove_leftovers(run_path)
    folder = run_path / "checkpoints"
    for digest in folder.glob("step_*.pt.sha256"):  # written before its checkpoint, or its learner's file, has its name
        if digest.is_file() and not digest.with_suffix("").exists():
            digest.unlink()
    known = set(map(measures_path, find_checkpoints(run_path)))
    for path in folder.glob("step_*.measures.json"):
        if path.is_file() and path not in known:
            path.unlink()
