"""Which keys must be equal: for a checkpoint, for the ranks of one run, and for the scores of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from summit_train.spec.data import DataSpec
from summit_train.spec.experiment import Spec
from summit_train.spec.model import ModelSpec

# Keys of `data` that change what is trained on; the others only say where the clips are and how fast they are read.
_TRAINED_DATA = (
    "modality", "flow_length", "num_frames", "frame_stride", "sampling", "augment", "short_side", "crop_scales", "crop",
    "flip", "balance", "region", "rand_augment", "repeats", "erase", "mix", "long_side", "span_frames",
)  # fmt: skip
_RECIPE = ("optimizer", "schedule", "loss", "ema", "scale", "parallel")
# Each node may read its own copy of the data; the contents of the lists are compared by their fingerprints.
_PLACES = {"data.train", "data.val", "data.root", "data.quarantine", "data.stage"}
# Keys of `data`, `evaluate` and `model` that change no score: where the data are, how fast they come, and when.
_NOT_IN_SCORES = {
    "data.root", "data.stage", "data.workers", "data.clip_seconds", "evaluate.every_epochs", "model.pretrained",
}  # fmt: skip


@dataclass(frozen=True)
class Identity:
    """What must be equal, by kind: keys of the spec, digests of lists of clips, versions and digests of code.

    The names are for people and files; no meaning is read from their text. The digest None is that of no list.
    """

    keys: Mapping[str, Any]
    lists: Mapping[str, Any]
    code: Mapping[str, Any]

    def values(self) -> dict[str, Any]:
        """Return all entries, as checkpoints hold them."""
        lists = {name: digest for name, digest in self.lists.items() if digest is not None}
        return {**self.keys, **lists, **self.code}


def flat_keys(spec: Spec) -> dict[str, Any]:
    """Return all values of a spec, as in JSON, as flat `key: value`, then `section.key: value` at any depth."""

    def flat(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in sorted(values.items(), key=lambda item: isinstance(item[1], dict)):
            yield from flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]

    return dict(flat(spec.model_dump(mode="json"), ""))


def rank_keys(spec: Spec) -> dict[str, Any]:
    return {key: value for key, value in flat_keys(spec).items() if key not in _PLACES}


def changes_scores(spec: Spec, key: str) -> bool:
    """Return whether another value of a key, `section.key`, can change the scores of a checkpoint."""
    if key in _NOT_IN_SCORES:
        return False
    if key.startswith(("data.train", "seed", "scale.")):  # what precise BN trains on
        return spec.evaluate.precise_bn > 0
    return key.startswith(("data.", "evaluate.", "model.", "precision", "loss.kind", "loss.like"))


def experiment_keys(spec: Spec) -> dict[str, Any]:
    """Return what makes a spec another experiment, as flat `section.key: value`: no places of data, no speed."""
    values = spec.model_dump(mode="json")
    same = {f"model.{key}": value for key, value in values["model"].items() if key != "pretrained"}
    same |= {f"data.{key}": str(values["data"][key]) for key in _TRAINED_DATA}
    if spec.data.built_in_augment == "rand_augment":  # null is its defaults
        same["data.rand_augment"] = str(spec.data.rand_augment_settings.model_dump(mode="json"))
    same |= {f"{section}.{key}": value for section in _RECIPE for key, value in values[section].items()}
    if spec.parallel.grow_batch is not None or spec.schedule.early_stop is not None:  # validations decide
        same["evaluate.every_epochs"] = spec.evaluate.every_epochs
    if (stop := spec.schedule.early_stop) is not None and stop.measure in (own := spec.evaluate.own_names):
        same["evaluate.measures"] = str(values["evaluate"]["measures"][own.index(stop.measure)])
    return same | {"seed": spec.seed, "precision": spec.precision}


def smallest_spec() -> Spec:
    """Return a spec in which every key that has a default has it."""
    return Spec(name="any", model=ModelSpec(arch="tsm", num_classes=1), data=DataSpec(train="any", val="any"))


def experiment_defaults() -> dict[str, Any]:
    """Return the values of `experiment_keys` that have defaults: those of a checkpoint that is older than the key."""
    spec = smallest_spec()
    always = ("model.arch", "model.num_classes", "scale.gpus", "scale.clips_per_gpu", "seed", "precision")
    return {key: value for key, value in experiment_keys(spec).items() if key not in always}
