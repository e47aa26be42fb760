"""The state of a run in files next to its checkpoints: results of validations, the last --more-epochs, and --from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from summit_train.core.errors import UserError
from summit_train.core.files import read_file, write_json
from summit_train.core.run_folder import (
    ORIGIN_FILE,
    CheckpointError,
    checkpoint_path,
    find_checkpoints,
    measures_path,
    step_of,
)
from summit_train.core.saved import peek
from summit_train.core.text import from_json
from summit_train.spec import Spec, run_spec

T = TypeVar("T")
EXTENSION_FILE = "extension.json"


@dataclass(frozen=True)
class Validation:
    """The result of the validation after a checkpoint, stored in a file next to the checkpoint.

    measures: values by name. own_measures: as in Decisions. stops_early: this validation ended training.
    """

    epoch: int
    measures: dict[str, Any]
    own_measures: dict[str, str]
    stops_early: bool

    def write(self, checkpoint: Path) -> None:
        write_json(measures_path(checkpoint), asdict(self))

    @classmethod
    def read(cls, checkpoint: Path) -> Validation | None:
        """Return a checkpoint's validation, None if it has none. Raises CheckpointError if it cannot be read."""
        return _read(measures_path(checkpoint), cls)


@dataclass(frozen=True)
class Extension:
    """The last `--more-epochs` of a run folder: the run's number of epochs before and after it.

    before: for a run that stopped early, the epochs it trained. is_done: the run has finished since.
    """

    before: int
    after: int
    is_done: bool = False

    def write(self, run_path: Path) -> None:
        write_json(run_path / EXTENSION_FILE, asdict(self))

    @classmethod
    def read(cls, run_path: Path) -> Extension | None:
        """Return a run folder's extension, None if it has none. Raises CheckpointError if it cannot be read."""
        return _read(run_path / EXTENSION_FILE, cls)

    @classmethod
    def asked(cls, path: str, more_epochs: int) -> Extension:
        """Return the extension that `--more-epochs` asks for; the same one each time until the run has finished."""
        if more_epochs < 1:
            raise UserError(f"--more-epochs must be 1 or more, got {more_epochs}")
        if not Path(path).is_dir():
            raise UserError(f"--more-epochs must be used with a run folder, got {path}; try runs/NAME")
        spec = run_spec(path)
        last = cls.read(spec.run_path)
        if last is not None and not last.is_done and last.after - last.before == more_epochs:
            return last
        epochs = spec.schedule.epochs
        checkpoints = find_checkpoints(spec.run_path)
        if not checkpoints:
            return cls(epochs, epochs + more_epochs)
        validation = Validation.read(checkpoints[-1])
        if validation is None:
            return cls._of_earlier_version(path, checkpoints[-1], spec, more_epochs)
        epochs = validation.epoch if validation.stops_early else epochs
        return cls(epochs, epochs + more_epochs)

    @classmethod
    def _of_earlier_version(cls, path: str, newest: Path, spec: Spec, more_epochs: int) -> Extension:
        """Return the extension if the newest checkpoint has no measures file, as in versions up to 0.3.0.

        Those versions kept what --more-epochs began, and an early stop, in the log alone.
        """
        epochs = spec.schedule.epochs
        state = peek(newest)
        state = state if isinstance(state, dict) else {}
        experiment = state.get("experiment")
        planned = experiment.get("schedule.epochs", epochs) if isinstance(experiment, dict) else epochs
        if planned == epochs - more_epochs:
            return cls(planned, epochs)  # begun by that version, before its first longer checkpoint
        is_unfinished = state.get("epoch", epochs) < epochs
        if is_unfinished and (state.get("line", 0) or spec.schedule.early_stop is not None):
            why = "must have a record of its last validation, got none, as of version 0.3.0 or earlier"
            raise UserError(f"{path}: {why}; start it once without --more-epochs, then again with it")
        return cls(epochs, epochs + more_epochs)


@dataclass(frozen=True)
class Origin:
    """The checkpoint of another run that `train RUN --from STEP` begins with. changes: of its keys, once it has begun.

    checkpoint: an absolute path; the run reads it until it has a checkpoint of its own.
    """

    checkpoint: str
    changes: dict[str, str] = field(default_factory=dict)

    def check(self, run_path: Path) -> None:
        """Raise UserError where the new run's folder is that of a run of another origin."""
        former = Origin.read(run_path)
        if former is None and (run_path / "spec.yaml").exists():
            raise UserError(f"{run_path} must not exist, or begin with {self.checkpoint}; try name=OTHER")
        if former is not None and former.checkpoint != self.checkpoint:
            raise UserError(f"{run_path} begins with {former.checkpoint}, not {self.checkpoint}; try name=OTHER")

    def write(self, run_path: Path) -> None:
        write_json(run_path / ORIGIN_FILE, asdict(self))

    @classmethod
    def read(cls, run_path: Path) -> Origin | None:
        """Return a run folder's origin, None if it has none. Raises CheckpointError if it cannot be read."""
        return _read(run_path / ORIGIN_FILE, cls)

    @classmethod
    def asked(cls, path: str, run_path: Path, step: int, new_run: Path) -> Origin:
        """Return the origin that `train PATH --from STEP` names for `new_run`; run_path: the folder of the run there.

        Raises UserError unless that checkpoint exists, or the new run has begun with it and has checkpoints too.
        """
        origin = cls(str(checkpoint_path(run_path, step).absolute()))
        former = cls.read(new_run)
        has_begun = former is not None and former.checkpoint == origin.checkpoint and find_checkpoints(new_run)
        steps = [step_of(file) for file in find_checkpoints(run_path)]
        if step not in steps and not has_begun:
            raise UserError(f"--from must be the step of a checkpoint of {path}, one of {steps}, got {step}")
        return origin


def _read(file: Path, kind: type[T]) -> T | None:
    try:
        return kind(**from_json(read_file(file)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); restore it, or delete it") from error
