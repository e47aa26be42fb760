"""The state that a run begins with: its newest whole checkpoint, pretrained weights, or neither."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from summit_train.core.checkpoints import CheckpointError
from summit_train.core.comm import World
from summit_train.core.errors import UserError
from summit_train.core.saved import CheckLearners, bound_of, check_learners, load_newest
from summit_train.core.watch import Watchdog
from summit_train.data.dataset import Dataset
from summit_train.models import VideoNetwork
from summit_train.models.foreign import check_norms
from summit_train.models.weights import load_pretrained
from summit_train.plan import Plan
from summit_train.spec import Spec
from summit_train.training.agreement import experiment_differences, experiment_of
from summit_train.training.metrics import last_extension

State = dict[str, Any]  # the content of a checkpoint


def first_state(
    spec: Spec,
    plan: Plan,
    train: Dataset | None,
    model: VideoNetwork,
    check: CheckLearners = check_learners,
    *,
    more_epochs: tuple[int, int] | None = None,
) -> tuple[State, list[str]]:
    """Return the newest whole checkpoint of the run, or {} after loading pretrained weights into `model`; and notes.

    train: as in experiment_of. check: as in load_newest. more_epochs: the epochs before and after; asked for, or
    recorded, the run may be of another length than that of the checkpoint, or continue one that has stopped early. Its
    step then is the lineage of later ones ("line"). Raises CheckpointError if the checkpoint is of another experiment
    otherwise or none is whole, and UserError for weights that are missing or of another network, and for a foreign
    network whose norms depend on the ranks.
    """
    if plan.virtual_gpus > 1:
        check_norms(model)
    path, state, complaints = load_newest(spec.run_path, bound_of(model), check)
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
    trained, longer = more_epochs or last_extension(spec.run_path) or (0, 0)
    # With as many epochs as the run had before its early stop, the length does not differ.
    is_stopped = not differing and state["step"] <= trained * plan.steps_per_epoch
    if longer == epochs and (is_length or is_stopped):
        lr = f"LR continues at {plan.learning_rate(state['step']):.6g}, as in a run of {epochs} epochs"
        notes.append(f"more epochs: {epochs} instead of {trained}; {lr}")
        begun = {key: value for key, value in state.items() if not key.startswith(("best_", "early_stop"))}
        state = begun | {"line": state["step"]}
    elif differing:
        right = f"Give this run another name; to begin it with these weights, set model.pretrained to {spec.run_path}"
        if is_length and before < epochs:
            right = f"To train it longer: train {spec.run_path} --more-epochs {epochs - before}"
        raise CheckpointError(f"{path} is of another experiment: {'; '.join(differing.values())}. {right}")
    return state, [*notes, f"resumes from {path}"]


def state_of_first(
    first: Callable[[CheckLearners], tuple[State, list[str]]], world: World, watchdog: Watchdog
) -> tuple[State, list[str]]:
    """Return what `first` returns on rank 0, ({}, []) elsewhere. All ranks check the learners' files that it offers."""

    def check(path: Path, digests: list[str]) -> None:
        wrong = None
        try:
            check_learners(path, digests, world.rank, world.size, watchdog.at)
        except CheckpointError as error:
            wrong = str(error)
        watchdog.at("waiting for the other ranks' learners", waits=True)
        if found := list(filter(None, world.gather(wrong) or [])):
            raise CheckpointError(found[0])

    if world.rank > 0:
        while offered := world.broadcast(list[Any]()):
            check(*offered)
        return {}, []
    try:
        state, notes = first(lambda *it: check(*world.broadcast(it)))
    finally:
        world.broadcast([])
    if state.get("learner_digests"):
        del state["optimizer"]  # each learner has its own in its file
    if (before := state.get("backend", world.backend)) != world.backend:
        notes.append(f"continues over {world.backend}; earlier steps ran over {before}, which rounds sums otherwise")
    return state, notes
