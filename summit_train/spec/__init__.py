"""A run's keys: their types and defaults, YAML with places, overrides."""

from summit_train.spec.checks import dump_spec as dump_spec
from summit_train.spec.checks import load_spec as load_spec
from summit_train.spec.checks import own_parts as own_parts
from summit_train.spec.checks import run_spec as run_spec
from summit_train.spec.checks import spec_from_tree as spec_from_tree
from summit_train.spec.checks import spec_from_values as spec_from_values
from summit_train.spec.identity import changes_scores as changes_scores
from summit_train.spec.identity import experiment_defaults as experiment_defaults
from summit_train.spec.identity import experiment_keys as experiment_keys
from summit_train.spec.identity import flat_keys as flat_keys
from summit_train.spec.identity import rank_keys as rank_keys
from summit_train.spec.identity import smallest_spec as smallest_spec
from summit_train.spec.keys import MAIN_MEASURES as MAIN_MEASURES
from summit_train.spec.keys import CheckpointSpec as CheckpointSpec
from summit_train.spec.keys import EvaluateSpec as EvaluateSpec
from summit_train.spec.keys import Spec as Spec
from summit_train.spec.model_data import ArchName as ArchName
from summit_train.spec.model_data import DataSpec as DataSpec
from summit_train.spec.model_data import ModelSpec as ModelSpec
from summit_train.spec.model_data import NetworkSpec as NetworkSpec
from summit_train.spec.typed import folder_name as folder_name
