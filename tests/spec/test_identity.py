"""Which keys count: for a checkpoint, for the ranks of a run, and for the scores of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import create_model
from pydantic.fields import FieldInfo

from summit_train.spec import (
    Spec,
    changes_scores,
    experiment_defaults,
    experiment_keys,
    flat_keys,
    rank_keys,
    smallest_spec,
    spec_from_values,
)
from summit_train.spec.typed import Scope, Section, section_in

# Keys of training that change no score of a checkpoint, and those that change them where precise BN reads the batches.
TRAINING = """
parallel.method parallel.period parallel.optimizer_state parallel.bn parallel.grow_batch
optimizer.name optimizer.momentum optimizer.alpha optimizer.betas optimizer.eps optimizer.weight_decay
optimizer.decay_norms optimizer.base_lr optimizer.base_batch optimizer.lr_scaling optimizer.head_lr_factor
optimizer.first_lr_factor optimizer.layer_decay optimizer.lr_factors optimizer.freeze optimizer.clip_norm
optimizer.trust_ratio optimizer.compression
schedule.epochs schedule.early_stop schedule.warmup_epochs schedule.warmup schedule.warmup_scaling schedule.decay
schedule.options schedule.power schedule.milestones schedule.factor
loss.options loss.label_smoothing loss.class_weights ema.decay
"""
BATCHES = "seed scale.gpus scale.clips_per_gpu"
# Keys of training and of scores.
BOTH = """
precision loss.kind loss.like
model.arch model.options model.backbone model.width model.num_classes model.dropout model.zero_init_residual
model.shift_fraction model.shift_place model.shift_direction model.non_local model.pool1 model.adapter model.positions
model.drop_path model.freeze_trunk model.freeze_bn model.detector
data.region data.modality data.flow_length data.num_frames data.frame_stride data.sampling data.augment data.short_side
data.long_side data.crop_scales data.rand_augment data.crop data.flip data.span_frames data.balance data.repeats
data.erase data.mix
"""
SCORES = """
data.on_bad_clip data.max_bad_fraction
evaluate.mode evaluate.clips evaluate.crops evaluate.short_side evaluate.measures evaluate.last_checkpoints
evaluate.precise_bn
"""
NEITHER = """
name task run_dir model.pretrained data.clip_seconds data.workers evaluate.every_epochs
checkpoint.every_epochs checkpoint.every_minutes checkpoint.keep checkpoint.keep_best checkpoint.background
watch.nonfinite_steps watch.stall_seconds noise_scale.every_steps execution.recompute execution.compile
"""
# Keys that ranks need not agree on: those of no score, of the batches that precise BN reads, and of scores.
PLACES = {"data.root": "", "data.stage": "", "data.train": BATCHES, "data.val": SCORES}


def _spec(**sections: Any) -> Spec:
    values: dict[str, Any] = {
        "name": "t",
        "model": {"arch": "tsm", "num_classes": 4},
        "data": {"train": "a", "val": "b"},
    }
    return spec_from_values(values | {name: values.get(name, {}) | section for name, section in sections.items()}, "t")


def _written(*texts: str) -> set[str]:
    return set(" ".join(texts).split())


def test_every_key_counts_where_it_must() -> None:
    """A new key is added to one of the lists above on purpose."""
    spec = smallest_spec()
    empty = {"model.options", "optimizer.lr_factors", "schedule.options", "loss.options"}  # no flat keys below them
    assert set(experiment_keys(spec)) == _written(TRAINING, BATCHES, BOTH)
    assert set(rank_keys(spec)) == _written(TRAINING, BATCHES, BOTH, SCORES, NEITHER) - empty
    assert set(flat_keys(spec)) == set(rank_keys(spec)) | set(PLACES)
    keys = [*flat_keys(spec), *empty]
    of_scores = [place for place, scope in PLACES.items() if scope == SCORES]
    assert {key for key in keys if changes_scores(spec, key)} == {*_written(BOTH, SCORES), *of_scores}
    precise = _spec(evaluate={"precise_bn": 1})
    of_batches = [place for place, scope in PLACES.items() if scope == BATCHES]
    found = {key for key in keys if changes_scores(precise, key)}
    assert found == {*_written(BOTH, SCORES, BATCHES), *of_scores, *of_batches}


def _wider(name: str) -> Spec:
    """A spec with two more keys in a section, one of them marked, and with one beside the sections."""
    field = Spec.model_fields[name]
    assert isinstance(field.annotation, type)
    marked = (Annotated[int | None, Scope.RUN], None)
    section: Any = create_model("Wider", __base__=field.annotation, forgotten=(int, 0), marked=marked)
    for mark in field.metadata:
        section = Annotated[section, mark]
    wider = create_model("WiderSpec", __base__=Spec, **{name: (section, {}), "forgotten": (int, 0)})  # type: ignore[call-overload]
    values = {"model": {"arch": "tsm", "num_classes": 4}, "data": {"train": "a", "val": "b"}}
    spec = wider.model_validate({"name": "t", name: {}} | values)
    assert isinstance(spec, Spec)
    return spec


@pytest.mark.parametrize("name", [name for name, field in Spec.model_fields.items() if section_in(field.annotation)])
def test_a_key_without_a_mark_counts_in_every_section(name: str) -> None:
    """It is compared with checkpoints and by ranks, and changes scores unless its section is of training alone."""
    spec = _wider(name)
    added = {"forgotten", f"{name}.forgotten"}
    assert added <= set(experiment_keys(spec)) and f"{name}.marked" not in experiment_keys(spec)
    assert {*added, f"{name}.marked"} <= set(rank_keys(spec))
    is_of_training = name in ("scale", "parallel", "optimizer", "schedule", "loss", "ema")
    assert changes_scores(spec, "forgotten") and changes_scores(spec, f"{name}.forgotten") != is_of_training
    assert not changes_scores(spec, f"{name}.marked")


def fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if (inner := section_in(field.annotation)) is not None:
            yield from fields(inner, f"{prefix}{name}.")


def test_a_scope_is_that_of_a_section_or_of_its_keys() -> None:
    """A section within a section is one value in a checkpoint, so a mark in it would be half true."""
    deep = {key for key, field in fields(Spec) if any(isinstance(mark, Scope) for mark in field.metadata)}
    assert deep and all(key.count(".") <= 1 for key in deep)


def test_a_key_within_a_nested_section_or_the_options_counts_as_the_section_does() -> None:
    spec = _spec(data={"mix": {"mixup": 1}}, optimizer={"trust_ratio": {"kind": "lars"}, "lr_factors": {"fc.bias": 2}})
    assert {key: changes_scores(spec, key) for key in flat_keys(spec) if key.count(".") > 1} == {
        "data.mix.mixup": True, "data.mix.cutmix": True, "data.mix.probability": True, "data.mix.switch": True,
        "optimizer.trust_ratio.kind": False, "optimizer.trust_ratio.coefficient": False,
        "optimizer.trust_ratio.lower": False, "optimizer.trust_ratio.upper": False,
        "optimizer.lr_factors.fc.bias": False,
    }  # fmt: skip
    assert changes_scores(spec, "model.options.depth") and not changes_scores(spec, "loss.options.depth")
    assert changes_scores(spec, "model.gone") and not changes_scores(spec, "optimizer.gone"), "keys of other versions"


def test_values_are_those_that_checkpoints_hold() -> None:
    """Those of `data` are texts; a section within a section is a whole."""
    spec = _spec(data={"mix": {"mixup": 0.5}, "short_side": [256, 320]}, optimizer={"trust_ratio": {"kind": "lars"}})
    keys = experiment_keys(spec)
    assert keys["data.num_frames"] == "8" and keys["data.flip"] == "True" and keys["data.region"] == "None"
    assert keys["data.short_side"] == "[256, 320]"
    assert keys["data.mix"] == "{'mixup': 0.5, 'cutmix': 0.0, 'probability': 1.0, 'switch': 0.5}"
    assert keys["optimizer.trust_ratio"] == {"kind": "lars", "coefficient": 0.001, "lower": 0.1, "upper": 10.0}
    assert (keys["seed"], keys["precision"], keys["scale.gpus"], keys["model.options"]) == (0, "fp32", None, {})


def test_null_settings_of_rand_augment_are_its_defaults() -> None:
    null = experiment_keys(_spec(data={"augment": "rand_augment"}))
    assert null == experiment_keys(_spec(data={"augment": "rand_augment", "rand_augment": {"std": 0.5}}))
    assert "'std': 0.5" in null["data.rand_augment"]
    assert experiment_keys(_spec())["data.rand_augment"] == "None"


@pytest.mark.parametrize(
    "sections",
    [
        {"schedule": {"early_stop": {"measure": "top1", "epochs": 3}}},
        {"parallel": {"method": "averaging", "grow_batch": {}}},
    ],
)
def test_how_often_a_run_validates_counts_where_validations_decide(sections: dict[str, Any]) -> None:
    spec = _spec(evaluate={"every_epochs": 2}, **sections)
    assert experiment_keys(spec)["evaluate.every_epochs"] == 2
    assert "evaluate.measures" not in experiment_keys(spec)


def test_the_measure_that_ends_a_run_counts() -> None:
    measures = ["m.py:first", {"kind": "m.py:second", "options": {"k": 3}}]
    spec = _spec(evaluate={"measures": measures}, schedule={"early_stop": {"measure": "second", "epochs": 3}})
    assert experiment_keys(spec)["evaluate.measures"] == "{'kind': 'm.py:second', 'options': {'k': 3}}"


def test_a_checkpoint_older_than_a_key_is_of_the_same_experiment() -> None:
    """Every key of the recipe has a default, which is what runs did before the key."""
    now = experiment_keys(_spec())
    same = {key: value for key, value in experiment_defaults().items() if key in now}
    assert set(now) - set(same) == {"model.arch", "model.num_classes"}
    differing = {key for key, value in same.items() if now[key] != value}
    assert differing <= {"model.backbone"}  # every checkpoint has it
    assert json.loads(json.dumps(now)) == now
    assert same["data.mix"] == "None" and same["ema.decay"] is None
