"""Write checkpoints whole or not at all, keep those that are needed, and restore a solver from one.

One can be written alongside the steps that follow it: its bytes are a copy, and the next one waits until it is whole.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from summit_train.core.checkpoints import CheckpointError, digest_path, find_checkpoints, measures_path, step_of
from summit_train.core.errors import RunFailed
from summit_train.core.files import read_file, replacing, write_json, write_text
from summit_train.core.saved import check_fit, peek
from summit_train.core.text import from_json
from summit_train.optim.solvers import kept_state
from summit_train.plan import is_due
from summit_train.spec import Spec
from summit_train.training.agreement import experiment_differences


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> str:
    """Serialise and write a checkpoint; return its SHA-256. Raises RunFailed, see `write_checkpoint`."""
    return write_checkpoint(path, serialised(state))


def serialised(state: Mapping[str, Any]) -> memoryview:
    """Return a checkpoint's bytes. They are a copy: updates that follow do not change them."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getbuffer()


def write_checkpoint(path: Path, content: memoryview) -> str:
    """Write a checkpoint so that `path` is at no time a part of a file; return its SHA-256.

    The digest is taken in memory, so it is not of what a disk made of the bytes. They are flushed under a temporary
    name, then the digest is written, then the file gets its name. A run that is killed in between leaves files that
    nothing reads. Raises RunFailed if the disk is full or fails; earlier checkpoints are untouched.
    """
    digest = hashlib.sha256(content).hexdigest()
    try:
        with replacing(path) as file:
            file.write(content)
            file.flush()
            # Within the block, so that the file gets its name after its digest is there.
            write_text(digest_path(path), f"{digest}  {path.name}\n")
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        last = find_checkpoints(path.parent.parent)
        kept = f"the last good one is {last[-1]}" if last else "none was saved before"
        raise RunFailed(f"{path}: the checkpoint could not be written: {error.strerror}; {kept}") from error
    return digest


class Writer:
    """Writes one checkpoint at a time: in a thread, alongside the steps that follow, or in the foreground."""

    def __init__(self, *, background: bool) -> None:
        # hashing, writing and flushing release the interpreter's lock, so the steps go on meanwhile
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._writing: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Call `write` in the thread and return at once; without one return when it is done. First call `wait`."""
        if self._thread is None:
            write()
        else:
            self._writing = self._thread.submit(write)

    def wait(self) -> None:
        """Wait until the checkpoint is whole. Raises what its `write` raised, once."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    @property
    def has_failed(self) -> bool:
        """Return whether `wait` would raise at once."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None


def prune_checkpoints(spec: Spec, steps_per_epoch: int, newest: Path, best: Path | None = None) -> None:
    """Keep `newest`, `best`, and the newest of whole epochs, which the final accuracy is the mean over.

    Checkpoints after `newest` are left alone and do not count: the run passed over them as damaged, and will write
    them again. The files of learners stay with theirs.
    """
    run_path = spec.run_path
    due = [path for path in epoch_checkpoints(spec, steps_per_epoch) if path <= newest]
    for path in find_checkpoints(run_path):
        if path < newest and path != best and path not in due[-spec.checkpoint.keep :]:
            path.unlink(missing_ok=True)
            digest_path(path).unlink(missing_ok=True)  # after its file
            measures_path(path).unlink(missing_ok=True)
    stems = {path.stem for path in find_checkpoints(run_path)}
    for path in (run_path / "checkpoints").glob("step_*.learner_*"):
        if path.name.partition(".")[0] not in stems:
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Validation:
    """What the validation of a checkpoint has found, in a file beside it: state of the run, as the checkpoint is.

    measures: by name. own_measures: as in Decisions. stops_early: training ended with it.
    """

    epoch: int
    measures: dict[str, Any]
    own_measures: dict[str, str]
    stops_early: bool

    def write(self, path: Path) -> None:
        """Write the file beside the checkpoint `path`."""
        write_json(measures_path(path), asdict(self))

    @classmethod
    def read(cls, path: Path) -> Validation | None:
        """Return that of the checkpoint `path`, None without any. Raises CheckpointError if it cannot be read."""
        file = measures_path(path)
        try:
            return cls(**from_json(read_file(file)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{file}: must hold what a validation has found ({error}); delete it") from error


def steps_per_epoch(run_path: Path) -> int:
    """Return the steps of an epoch from the run's plan.json. Raises CheckpointError if it cannot be read."""
    try:
        steps = from_json(read_file(run_path / "plan.json"))["steps_per_epoch"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        steps = error
    if type(steps) is not int or steps < 1:
        problem = f"{run_path}/plan.json must tell which checkpoints are of whole epochs, and cannot be read"
        raise CheckpointError(f"{problem} ({steps}); try --checkpoints FILE")
    return steps


def epoch_checkpoints(spec: Spec, steps_per_epoch: int) -> list[Path]:
    """Return the run's checkpoints of the epochs that are due, oldest first."""
    places = [(path, *divmod(step_of(path), steps_per_epoch)) for path in find_checkpoints(spec.run_path)]
    return [path for path, epoch, inside in places if inside == 0 and is_due(spec, epoch)]


def current_line(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return the checkpoints of the newest one's line, and a text for each that is left out.

    A line begins with the run, and again where --more-epochs takes the checkpoint of a shorter one.
    """
    kept, left_out = list[Path](), list[str]()
    newest: Mapping[str, Any] = {}
    line = 0
    for path in reversed(paths):
        content = peek(path)
        content = content if isinstance(content, dict) else {}
        experiment = content.get("experiment")
        # A checkpoint without one is kept here; loading it may refuse it.
        experiment = experiment if isinstance(experiment, dict) else newest
        if not kept:
            newest, line = experiment, content.get("line", 0)
        if differing := experiment_differences(experiment, newest):
            left_out.append(f"{path} is of another experiment: {'; '.join(differing.values())}")
        elif content.get("line", 0) != line:
            left_out.append(f"{path} is from before another experiment took over, at step {line}")
        else:
            kept.append(path)
    return kept[::-1], left_out[::-1]


def begin_solver_state(path: Path, optimizer: torch.optim.Optimizer, saved: Any) -> dict[str, torch.Tensor]:
    """Give a solver the state that a checkpoint has of it, without its numbers; its options stay.

    Returns the tensors that the numbers go into, by their names in the checkpoint. Raises CheckpointError for another
    solver's state.
    """
    own = optimizer.state_dict()
    groups = [group["params"] for group in own["param_groups"]]
    try:
        state = saved["state"]
        saved_groups = [group["params"] for group in saved["param_groups"]]
    except (LookupError, TypeError) as error:
        raise CheckpointError(f"{path}: optimizer must hold a solver's state and its groups") from error
    known = set().union(*groups)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if isinstance(state, Mapping) and state.keys() <= known:  # earlier versions kept a state of frozen ones, too
        state = {number: tensors for number, tensors in state.items() if parameters[number].requires_grad}
    # A solver that has already begun, such as SGD with momentum, knows which parameters have a state.
    fits = isinstance(state, Mapping) and state.keys() <= known and (own["state"] or state).keys() == state.keys()
    if not fits or saved_groups != groups:
        raise CheckpointError(f"{path}: does not fit: optimizer has other groups of parameters than this run")
    kept = kept_state(optimizer)
    begun = {}
    for number, tensors in state.items():
        weight = parameters[number].detach()
        wanted = {name: weight if has_shape else torch.zeros(()) for name, has_shape in kept.items()}
        check_fit(path, f"optimizer.state.{number}", tensors, wanted)
        # In the layout of the weight: the fused solvers ignore strides.
        present = own["state"].get(number) or {name: torch.empty_like(wanted[name]) for name in tensors}
        begun[number] = {name: present[name] for name in tensors}
    optimizer.load_state_dict({**own, "state": begun})
    return {
        f"optimizer.state.{number}.{name}": optimizer.state[parameters[number]][name]
        for number, tensors in begun.items()
        for name in tensors
    }
