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
    load_spec,
    spec_from_tree,
    spec_from_values,
)
from summit_train.spec.identity import (
    changes_scores,
    experiment_defaults,
    experiment_keys,
    flat_keys,
    rank_keys,
)

__all__ = [
    "CheckpointSpec",
    "DataSpec",
    "EvaluateSpec",
    "ExecutionSpec",
    "ModelSpec",
    "PathText",
    "Spec",
    "changes_scores",
    "dump_spec",
    "experiment_defaults",
    "experiment_keys",
    "flat_keys",
    "load_spec",
    "rank_keys",
    "spec_from_tree",
    "spec_from_values",
]
