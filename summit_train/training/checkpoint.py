"""Write checkpoints whole or not at all, keep those that are needed, and find the one that a run resumes from.

A checkpoint can be written alongside the steps that follow: its bytes are a copy. The next one waits until it is whole.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from summit_train.core.comm import World
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import read_file, replacing, write_text
from summit_train.core.run_folder import (
    CheckpointError,
    checkpoint_path,
    digest_path,
    find_checkpoints,
    measures_path,
    step_of,
)
from summit_train.core.saved import (
    bound_of,
    check_fit,
    check_learners,
    load_checkpoint,
    load_newest,
    peek,
    without_numbers,
)
from summit_train.core.text import from_json
from summit_train.core.watch import Watchdog
from summit_train.data.dataset import Dataset
from summit_train.models import VideoNetwork
from summit_train.models.foreign import check_norms
from summit_train.models.weights import load_pretrained
from summit_train.optim.solvers import kept_state
from summit_train.plan import Plan, is_due
from summit_train.spec import Spec
from summit_train.training.agreement import experiment_differences, experiment_of
from summit_train.training.state import Extension, Origin

# Keys that `train RUN --from STEP` may change: no weight depends on them, nor a state of the solver. Validations are
# among the keys where an early stop depends on them.
_MAY_CHANGE = re.compile(
    r"schedule\..*|loss\.(class_weights|label_smoothing)|optimizer\.(base_\w+|lr_scaling|weight_decay|momentum|clip_norm)"
    r"|data\.(augment.*|balance|crop_scales|erase|flip|long_side|mix|rand_augment|short_side)"
    r"|evaluate\.(every_epochs|measures.*)"
)

State = dict[str, Any]  # the content of a checkpoint


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
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    @property
    def has_failed(self) -> bool:
        """True if `wait` would raise at once."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None


def prune_checkpoints(spec: Spec, steps_per_epoch: int, newest: Path, best: Path | None = None) -> None:
    """Keep `newest`, `best`, and the newest of whole epochs, which the final accuracy is the mean over.

    Checkpoints after `newest` stay and do not count: the run passed over them as damaged, and will write them again.
    Learners' files go with their checkpoint.
    """
    run_path = spec.run_path
    due = [path for path in epoch_checkpoints(spec, steps_per_epoch) if path <= newest]
    kept = {best, *due[-spec.checkpoint.keep :]}
    for path in find_checkpoints(run_path):
        if path < newest and path not in kept:
            path.unlink(missing_ok=True)
            digest_path(path).unlink(missing_ok=True)  # after its file
            measures_path(path).unlink(missing_ok=True)
    stems = {path.stem for path in find_checkpoints(run_path)}
    for path in (run_path / "checkpoints").glob("step_*.learner_*"):
        if path.name.partition(".")[0] not in stems:
            path.unlink(missing_ok=True)


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
    epochs = [(path, *divmod(step_of(path), steps_per_epoch)) for path in find_checkpoints(spec.run_path)]
    return [path for path, epoch, inside in epochs if inside == 0 and is_due(spec, epoch)]


def current_line(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return the checkpoints of the newest one's line, and a text for each that is left out.

    A line begins with the run, and again where --more-epochs takes the checkpoint of a shorter one.
    """
    kept = list[Path]()
    left_out = list[str]()
    newest: Mapping[str, Any] = {}
    line = 0
    for path in reversed(paths):
        content = peek(path)
        content = content if isinstance(content, dict) else {}
        experiment = content.get("experiment")
        # A checkpoint without one is kept here; loading it may refuse it.
        experiment = experiment if isinstance(experiment, dict) else newest
        if not kept:
            newest = experiment
            line = content.get("line", 0)
        if differing := experiment_differences(experiment, newest):
            left_out.append(f"{path} is of another experiment: {'; '.join(differing.values())}")
        elif content.get("line", 0) != line:
            left_out.append(f"{path} is from before another experiment took over, at step {line}")
        else:
            kept.append(path)
    return kept[::-1], left_out[::-1]


def begin_solver_state(path: Path, optimizer: torch.optim.Optimizer, saved: Any) -> dict[str, torch.Tensor]:
    """Create a solver's state as in a checkpoint, but with no numbers read yet; its options stay.

    Returns the tensors to fill, by their names in the checkpoint. Raises CheckpointError for another solver's state.
    """
    current = optimizer.state_dict()
    groups = [group["params"] for group in current["param_groups"]]
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
    begun = current["state"]
    fits = isinstance(state, Mapping) and state.keys() <= known and (begun or state).keys() == state.keys()
    if not fits or saved_groups != groups:
        raise CheckpointError(f"{path}: does not fit: optimizer has other groups of parameters than this run")
    kept = kept_state(optimizer)
    restored = {}
    for number, tensors in state.items():
        weight = parameters[number].detach()
        patterns = {name: weight if has_shape else torch.zeros(()) for name, has_shape in kept.items()}
        check_fit(path, f"optimizer.state.{number}", tensors, patterns)
        # Strides must be the weight's, because the fused solvers ignore them.
        usable = {n: t for n, t in begun.get(number, {}).items() if t.stride() == patterns[n].stride()}
        restored[number] = {n: usable[n] if n in usable else torch.empty_like(patterns[n]) for n in tensors}
    optimizer.load_state_dict({**current, "state": restored})
    return {
        f"optimizer.state.{number}.{name}": optimizer.state[parameters[number]][name]
        for number, tensors in restored.items()
        for name in tensors
    }


def starting_state(
    spec: Spec,
    plan: Plan,
    train: Dataset | None,
    model: VideoNetwork,
    damaged: Mapping[Path, str] | None = None,
    *,
    extension: Extension | None = None,
    origin: Origin | None = None,
) -> tuple[State, list[str]]:
    """Return the newest whole checkpoint of the run, or {} after loading pretrained weights into `model`; and notes.

    train: as in experiment_of. damaged: as in load_newest. extension: of this start; None: the run folder's last one.
    With it the checkpoint may come from a shorter run, or one that stopped early; a new line of checkpoints then
    begins, without a best one or an early stop so far. origin: of this start; None: the run folder's own.
    Raises CheckpointError if the checkpoint is of another experiment or none is whole, and UserError for weights that
    are missing or of another network, and for a foreign network whose norms depend on the ranks.
    """
    if plan.virtual_gpus > 1:
        check_norms(model)
    path, state, complaints = load_newest(spec.run_path, bound_of(model), damaged)
    notes = [f"passed over: {complaint}" for complaint in complaints]
    if path is None:
        if (origin := origin or Origin.read(spec.run_path)) is not None:
            return _state_of_origin(origin, spec, plan, train, model)
        if (weights := spec.model.pretrained) is not None:
            try:
                report = load_pretrained(model, weights, None if train is None else train.manifest.classes)
            except UserError as error:
                raise UserError(f"model.pretrained: {error}") from error
            notes.append(f"pretrained: {report}")
        return {}, notes
    saved, wanted = _comparable(state, spec, plan, train, model)
    differing = experiment_differences(saved, wanted)
    epochs = spec.schedule.epochs
    is_length = differing.keys() == {"schedule.epochs"}
    before = saved.get("schedule.epochs", epochs)
    extension = extension or Extension.read(spec.run_path)
    if extension is not None and extension.after == epochs:
        # With as many epochs as the run had before its early stop, the length does not differ.
        may_have_stopped = spec.schedule.early_stop is not None and not differing
        has_stopped = may_have_stopped and state["step"] <= extension.before * plan.steps_per_epoch
        if is_length or has_stopped:
            lr = f"LR continues at {plan.learning_rate(state['step']):.6g}, as in a run of {epochs} epochs"
            notes.append(f"more epochs: {epochs} instead of {extension.before}; {lr}")
            kept = {key: value for key, value in state.items() if not key.startswith(("best_", "early_stop"))}
            return kept | {"line": state["step"]}, [*notes, f"resumes from {path}"]
    if differing:
        right = f"Give this run another name; to begin it with these weights, set model.pretrained to {spec.run_path}"
        if is_length and before < epochs:
            right = f"To train it longer: train {spec.run_path} --more-epochs {epochs - before}"
        elif all(map(_MAY_CHANGE.fullmatch, differing)):
            right = f"To continue with the new values: train {spec.run_path} --from {state['step']} KEY=VALUE"
        raise CheckpointError(f"{path} is of another experiment: {'; '.join(differing.values())}. {right}")
    return state, [*notes, f"resumes from {path}"]


def _comparable(
    state: State, spec: Spec, plan: Plan, train: Dataset | None, model: VideoNetwork
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a checkpoint's experiment and this run's; both without the fingerprints of lists that were not read."""
    wanted = experiment_of(spec, plan, train, model)
    unknown = wanted.lists if train is None else ()
    saved = {key: value for key, value in state.get("experiment", {}).items() if key not in unknown}
    return saved, wanted.values()


def _state_of_origin(
    origin: Origin, spec: Spec, plan: Plan, train: Dataset | None, model: VideoNetwork
) -> tuple[State, list[str]]:
    """Return another run's checkpoint as the first state of this run, and notes.

    Its entry `origin` has the values of an Origin with what changes. Raises UserError for keys that may not change.
    """
    path = Path(origin.checkpoint)
    state = load_checkpoint(path, bound_of(model))
    saved, wanted = _comparable(state, spec, plan, train, model)
    differing = experiment_differences(saved, wanted)
    # Without momentum, a solver has another state.
    momenta = [values.get("optimizer.momentum") for values in (saved, wanted)]
    fixed = [
        text
        for key, text in differing.items()
        if not _MAY_CHANGE.fullmatch(key) or (key == "optimizer.momentum" and 0 in momenta)
    ]
    if fixed:
        raise UserError(f"--from {state['step']}: must keep its network, data, batch and solver: {'; '.join(fixed)}")
    if spec.parallel.method != "synchronous":
        raise UserError(f"--from must be used with parallel.method synchronous, got {spec.parallel.method}")
    if state["step"] >= plan.total_steps:
        raise UserError(f"--from must be before the last step, {plan.total_steps}, got {state['step']}")
    kept = {key: value for key, value in state.items() if not key.startswith(("best_", "early_stop"))}
    kept |= {"line": state["step"], "origin": {"checkpoint": origin.checkpoint, "changes": differing}}
    return kept, [f"begins with {path}", *differing.values()]


def shared_starting_state(
    find: Callable[[Mapping[Path, str]], tuple[State, list[str]]], run_path: Path, world: World, watchdog: Watchdog
) -> tuple[State, list[str]]:
    """Return rank 0's starting state, without the numbers of large tensors, on every rank, and its notes. Collective.

    Each rank checks the files of its own learners. find: starting_state with the run's arguments. Rank 0 calls it with
    the complaints so far, and again whenever a rank finds a damaged learner file.
    """
    damaged = dict[Path, str]()
    while True:
        state, notes = world.together(lambda: find(damaged) if world.rank == 0 else ({}, []))
        large = {part: without_numbers(state[part]) for part in ("model", "optimizer", "ema") if part in state}
        state = world.broadcast(state | large)
        digests = state.get("learner_digests", [])
        if not digests:
            break
        path = checkpoint_path(run_path, state["step"])
        complaint = None
        try:
            check_learners(path, digests, world.rank, world.size, watchdog.at)
        except CheckpointError as error:
            complaint = str(error)
        watchdog.at("waiting for the other ranks' learners", waits=True)
        complaints = world.broadcast(list(filter(None, world.gather(complaint) or [])))
        if not complaints:
            break
        damaged[path] = complaints[0]
    if state and (before := state.get("backend", world.backend)) != world.backend:
        notes.append(f"continues over {world.backend}; earlier steps ran over {before}, which rounds sums otherwise")
    return state, notes
