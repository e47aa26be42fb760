"""Read specs from files and plain values, write them, and open the code of the user's own that they name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from summit_train.core.errors import UserError
from summit_train.core.own_parts import OwnPart
from summit_train.spec.catalog import is_foreign
from summit_train.spec.checks import problems
from summit_train.spec.keys import Spec
from summit_train.spec.model_data import TASK_SECTIONS
from summit_train.spec.source import Tree, read_tree, to_yaml
from summit_train.spec.typed import validated
from summit_train.tasks.task import TASKS, task_named


def load_spec(path: str | Path, overrides: Sequence[str] = ()) -> Spec:
    """Read a spec file with what it extends, apply `section.key=value` overrides, check everything.

    Raises UserError; its message has one line a mistake: `file:line: key: what is wrong and what would be right`.
    """
    return spec_from_tree(read_tree(path, overrides))


def run_spec(path: str, overrides: Sequence[str] = ()) -> Spec:
    """Return the spec in a file, or that of a run folder, wherever the folder is now. Raises UserError."""
    if not Path(path).is_dir():
        return load_spec(path, overrides)
    file = Path(path) / "spec.yaml"
    if not file.is_file():
        raise UserError(f"{path}: must be a spec or a run folder; no spec.yaml found in it")
    spec = load_spec(file, overrides)
    run = Path(os.path.abspath(path))
    if spec.run_path.exists() and spec.run_path.samefile(run):
        return spec
    return spec.model_copy(update={"run_dir": str(run.parent), "name": run.name})


def spec_from_values(values: dict[str, Any], place: str) -> Spec:
    """Return the spec of plain values, such as those saved in a checkpoint; `place` names their source in an error."""
    return spec_from_tree(Tree(values, {(): place}))


def dump_spec(spec: Spec) -> str:
    """Return the resolved spec as YAML; `load_spec` of it gives an equal spec."""
    return to_yaml(spec.model_dump(mode="json"))


def spec_from_tree(tree: Tree) -> Spec:
    """Return the spec of values that know their places. Raises UserError as load_spec does."""
    spec = validated(Spec, replace(tree, values=_with_task(tree.values)))
    lines = [f"{tree.place(tuple(key.split('.')))}: {key}: {wrong}" for key, wrong in problems(spec)]
    if lines:
        raise UserError(*lines)
    return spec


def _with_task(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with the keys that the task implies, where they are not given."""
    task, model, loss = values.get("task", TASKS[0]), values.get("model"), values.get("loss", {})
    if task not in TASKS or not isinstance(model, dict) or not isinstance(loss, dict):
        return values
    if (section := TASK_SECTIONS.get(task)) is not None and model.get(section) is None:
        model = {**model, section: {}}
    loss = loss if task == TASKS[0] else {"kind": next(iter(task_named(task).kinds)), **loss}
    return {**values, "model": model, "loss": loss}


def own_parts(spec: Spec, *sections: str) -> list[OwnPart]:
    """Open the parts of the user's own that these sections name. Raises UserError for one without a file."""
    parts = list[OwnPart]()
    if "loss" in sections and is_foreign(spec.loss.kind):
        parts.append(OwnPart.open("loss.kind", spec.loss.kind, spec.loss.options))
    if "schedule" in sections:
        parts += spec.schedule.open_decay()
    if "data" in sections:
        parts += spec.data.open_augment()
    if "evaluate" in sections:
        parts += [
            OwnPart.open("evaluate.measures", measure.kind, measure.options) for measure in spec.evaluate.measures
        ]
    return parts
