"""A run's keys: their types and defaults, YAML with places, overrides."""

from summit_train.spec.experiment import (
    CheckpointSpec,
    DataSpec,
    EvaluateSpec,
    ExecutionSpec,
    ModelSpec,
    PathText,
    Spec,
    dump_spec,
    experiment_defaults,
    experiment_keys,
    flat_keys,
    load_spec,
    spec_from_tree,
    spec_from_values,
)

__all__ = [
    "CheckpointSpec",
    "DataSpec",
    "EvaluateSpec",
    "ExecutionSpec",
    "ModelSpec",
    "PathText",
    "Spec",
    "dump_spec",
    "experiment_defaults",
    "experiment_keys",
    "flat_keys",
    "load_spec",
    "spec_from_tree",
    "spec_from_values",
]
