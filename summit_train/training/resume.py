"""The state that a run begins with: its newest whole checkpoint, pretrained weights, or neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from summit_train.core.checkpoints import CheckpointError, checkpoint_path, find_checkpoints
from summit_train.core.comm import World
from summit_train.core.errors import UserError
from summit_train.core.files import read_file, write_json
from summit_train.core.saved import bound_of, check_learners, load_newest, without_numbers
from summit_train.core.text import from_json
from summit_train.core.watch import Watchdog
from summit_train.data.dataset import Dataset
from summit_train.models import VideoNetwork
from summit_train.models.foreign import check_norms
from summit_train.models.weights import load_pretrained
from summit_train.plan import Plan
from summit_train.spec import Spec, run_spec
from summit_train.training.agreement import experiment_differences, experiment_of
from summit_train.training.checkpoint import Validation

EXTENSION_FILE = "extension.json"
State = dict[str, Any]  # the content of a checkpoint


@dataclass(frozen=True)
class Extension:
    """The last `--more-epochs` of a run folder, in a file there: the epochs of the run before it and after.

    before: of one that stopped early, the trained ones. is_done: the run has come to its end since.
    """

    before: int
    after: int
    is_done: bool = False

    @classmethod
    def read(cls, run_path: Path) -> Extension | None:
        """Return that of a run folder, None without any. Raises CheckpointError if it cannot be read."""
        file = run_path / EXTENSION_FILE
        try:
            return cls(**from_json(read_file(file)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{file}: must hold the epochs before and after --more-epochs ({error})") from error

    @classmethod
    def asked(cls, path: str, more_epochs: int) -> Extension:
        """Return what `--more-epochs` asks for: until the run has come to its end, the same each time."""
        if more_epochs < 1:
            raise UserError(f"--more-epochs must be 1 or more, got {more_epochs}")
        if not Path(path).is_dir():
            raise UserError(f"--more-epochs must be used with a run folder, got {path}; try runs/NAME")
        spec = run_spec(path)
        last = cls.read(spec.run_path)
        if last is not None and not last.is_done and last.after - last.before == more_epochs:
            return last
        checkpoints = find_checkpoints(spec.run_path)
        found = Validation.read(checkpoints[-1]) if checkpoints else None
        epochs = found.epoch if found is not None and found.stops_early else spec.schedule.epochs
        return cls(epochs, epochs + more_epochs)

    def write(self, run_path: Path) -> None:
        write_json(run_path / EXTENSION_FILE, asdict(self))


def first_state(
    spec: Spec,
    plan: Plan,
    train: Dataset | None,
    model: VideoNetwork,
    damaged: Mapping[Path, str] | None = None,
    *,
    extension: Extension | None = None,
) -> tuple[State, list[str]]:
    """Return the newest whole checkpoint of the run, or {} after loading pretrained weights into `model`; and notes.

    train: as in experiment_of. damaged: as in load_newest. extension: asked for, or the last one. With it the run may
    be of another length than that of the checkpoint, or continue one that has stopped early; a new line of checkpoints
    then begins, with a best and an early stop of its own. Raises CheckpointError if the checkpoint is of
    another experiment otherwise or none is whole, and UserError for weights that are missing or of another network, and
    for a foreign network whose norms depend on the ranks.
    """
    if plan.virtual_gpus > 1:
        check_norms(model)
    path, state, complaints = load_newest(spec.run_path, bound_of(model), damaged)
    notes = [f"passed over: {complaint}" for complaint in complaints]
    if path is None:
        if (weights := spec.model.pretrained) is not None:
            try:
                report = load_pretrained(model, weights, None if train is None else train.manifest.classes)
            except UserError as error:
                raise UserError(f"model.pretrained: {error}") from error
            notes.append(f"pretrained: {report}")
        return {}, notes
    wanted = experiment_of(spec, plan, train, model)
    unknown = wanted.lists if train is None else ()
    saved = {key: value for key, value in state.get("experiment", {}).items() if key not in unknown}
    differing = experiment_differences(saved, wanted.values())
    epochs = spec.schedule.epochs
    is_length, before = differing.keys() == {"schedule.epochs"}, saved.get("schedule.epochs", epochs)
    extension = extension or Extension.read(spec.run_path)
    if extension is not None and extension.after == epochs:
        # With as many epochs as the run had before its early stop, the length does not differ.
        has_stopped = not differing and state["step"] <= extension.before * plan.steps_per_epoch
        if is_length or has_stopped:
            lr = f"LR continues at {plan.learning_rate(state['step']):.6g}, as in a run of {epochs} epochs"
            notes.append(f"more epochs: {epochs} instead of {extension.before}; {lr}")
            begun = {key: value for key, value in state.items() if not key.startswith(("best_", "early_stop"))}
            return begun | {"line": state["step"]}, [*notes, f"resumes from {path}"]
    if differing:
        right = f"Give this run another name; to begin it with these weights, set model.pretrained to {spec.run_path}"
        if is_length and before < epochs:
            right = f"To train it longer: train {spec.run_path} --more-epochs {epochs - before}"
        raise CheckpointError(f"{path} is of another experiment: {'; '.join(differing.values())}. {right}")
    return state, [*notes, f"resumes from {path}"]


def state_of_first(
    first: Callable[[Mapping[Path, str]], tuple[State, list[str]]], run_path: Path, world: World, watchdog: Watchdog
) -> tuple[State, list[str]]:
    """Return what `first` returns on rank 0: its state without the numbers of large tensors, and its notes. Collective.

    first: gets complaints about learners' files, by their checkpoint, and looks for one without. Each rank checks the
    files of its own learners.
    """
    damaged = dict[Path, str]()
    while True:
        state, notes = world.together(lambda: first(damaged) if world.rank == 0 else ({}, []))
        large = {part: without_numbers(state[part]) for part in ("model", "optimizer", "ema") if part in state}
        state = world.broadcast(state | large)
        digests = state.get("learner_digests", [])
        if not digests:
            break
        path = checkpoint_path(run_path, state["step"])
        wrong = None
        try:
            check_learners(path, digests, world.rank, world.size, watchdog.at)
        except CheckpointError as error:
            wrong = str(error)
        watchdog.at("waiting for the other ranks' learners", waits=True)
        complaints = world.broadcast(list(filter(None, world.gather(wrong) or [])))
        if not complaints:
            break
        damaged[path] = complaints[0]
    if state and (before := state.get("backend", world.backend)) != world.backend:
        notes.append(f"continues over {world.backend}; earlier steps ran over {before}, which rounds sums otherwise")
    return state, notes
