"""Which keys must be equal: for a checkpoint, for the ranks of one run, and for the scores of a checkpoint.

The marks of the keys decide it (`Scope`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from summit_train.spec.keys import Spec
from summit_train.spec.model_data import DataSpec, ModelSpec
from summit_train.spec.typed import Scope, Section, section_in


def flat_keys(spec: Spec) -> dict[str, Any]:
    """Return all values of a spec, as in JSON, as flat `key: value`, then `section.key: value` at any depth."""

    def flat(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in sorted(values.items(), key=lambda item: isinstance(item[1], dict)):
            yield from flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]

    return dict(flat(spec.model_dump(mode="json"), ""))


class _Key(NamedTuple):
    scope: Scope
    is_required: bool


@cache
def _keys(section: type[Section], inherited: Scope = Scope.EXPERIMENT) -> Mapping[str, _Key]:
    """Return the keys of a section and of those below it, by `section.key`."""
    keys = dict[str, _Key]()
    for name, field in section.model_fields.items():
        scope = next((mark for mark in field.metadata if isinstance(mark, Scope)), inherited)
        keys[name] = _Key(scope, field.is_required())
        below = section_in(field.annotation)
        if below is not None:
            keys |= {f"{name}.{key}": found for key, found in _keys(below, scope).items()}
    return keys


def _known(spec: Spec, key: str) -> _Key:
    """Return a key of the spec; for one below the last that it knows, such as an option, that one."""
    keys = _keys(type(spec))
    while key not in keys:
        key = key.rpartition(".")[0]
    return keys[key]


def rank_keys(spec: Spec) -> dict[str, Any]:
    return {key: value for key, value in flat_keys(spec).items() if Scope.PLACE not in _known(spec, key).scope}


def changes_scores(spec: Spec, key: str) -> bool:
    """True if another value of a key, `section.key`, can change the scores of a checkpoint."""
    scope = _known(spec, key).scope
    return Scope.SCORES in scope or (Scope.PRECISE_BN in scope and spec.evaluate.precise_bn > 0)


def experiment_keys(spec: Spec) -> dict[str, Any]:
    """Return the keys that define an experiment, as flat `section.key: value`, in the form that checkpoints have."""
    values = spec.model_dump(mode="json")
    if spec.data.built_in_augment == "rand_augment":  # null is its defaults
        values["data"]["rand_augment"] = spec.data.rand_augment_settings.model_dump(mode="json")
    flat = dict[str, Any]()
    for name, value in values.items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    counting = {key: value for key, value in flat.items() if Scope.TRAINING in _known(spec, key).scope}
    stop = spec.schedule.early_stop
    if spec.parallel.grow_batch is not None or stop is not None:  # validations decide
        counting["evaluate.every_epochs"] = spec.evaluate.every_epochs
    own = spec.evaluate.own_names
    if stop is not None and stop.measure in own:
        counting["evaluate.measures"] = str(flat["evaluate.measures"][own.index(stop.measure)])
    return {key: str(value) if key.startswith("data.") else value for key, value in counting.items()}


def smallest_spec() -> Spec:
    """Return a spec in which every key that has a default has it."""
    return Spec(name="any", model=ModelSpec(arch="tsm", num_classes=1), data=DataSpec(train="any", val="any"))


def experiment_defaults() -> dict[str, Any]:
    """Return the values of `experiment_keys` that have defaults: those of a checkpoint that is older than the key."""
    spec = smallest_spec()
    keys = experiment_keys(spec)
    return {key: value for key, value in keys.items() if not _known(spec, key).is_required}
