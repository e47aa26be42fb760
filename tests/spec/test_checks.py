"""Keys that are read only with some value of another key are refused with the others, and so is what is impossible."""

from __future__ import annotations

import pytest
import yaml

from summit_train.core.errors import UserError
from summit_train.spec import Spec, spec_from_tree
from summit_train.spec.source import Tree, put
from summit_train.spec.typed import BUILT_IN, OWN, ReadWith
from tests.spec.test_identity import fields

VIT = "model.arch=vit model.backbone=vit_s evaluate.short_side=224"
MINE = "model.arch=a.py:net"
LOSS = "loss.kind=a.py:loss"
BOXES = "task=detection model.arch=tsn data.augment=whole evaluate.mode=stream evaluate.crops=full"
AVERAGING = "parallel.method=averaging evaluate.every_epochs=1"


def _spec(words: str) -> Spec:
    values = {"name": "t", "model": {"arch": "tsm", "num_classes": 4}, "data": {"train": "a", "val": "b"}}
    tree = Tree(values, {(): "here"})
    for word in words.split():
        key, _, value = word.partition("=")
        put(tree, key, yaml.safe_load(value), "here")
    return spec_from_tree(tree)


# A key that has not its default; the other keys with which it is read; those with which it is not.
READ_WITH = [
    ("model.options={depth}", MINE, ""),
    ("model.width=0.5", "", MINE),
    ("model.dropout=0.5", "", MINE),
    ("model.shift_fraction=0.25", "", MINE),
    ("model.shift_place=in_place", "", MINE),
    ("model.shift_direction=past", "", MINE),
    ("model.freeze_trunk=true", "model.pretrained=x", f"model.pretrained=x {MINE}"),
    ("model.pool1=1x3x3", "model.arch=i3d_3x1x1", "model.arch=i3d_replace"),
    ("model.adapter=st", VIT, ""),
    ("model.positions=grid", VIT, ""),
    ("model.positions=grid_uniform", VIT, f"{VIT} model.adapter=shift"),
    ("model.drop_path=0.1", VIT, ""),
    ("data.rand_augment={}", "data.augment=rand_augment", "data.augment=multi_scale_crop"),
    ("parallel.period=5", AVERAGING, ""),
    ("parallel.optimizer_state=local", AVERAGING, ""),
    ("parallel.bn=local", AVERAGING, ""),
    ("parallel.grow_batch={}", AVERAGING, "parallel.method=synchronous"),
    ("optimizer.layer_decay=0.5", "", MINE),
    ("execution.recompute=true", "", MINE),
    ("schedule.options={a}", "schedule.decay=a.py:decay", "schedule.decay=linear"),
    ("loss.options={a}", LOSS, "loss.kind=binary"),
    ("loss.like=binary", LOSS, "loss.kind=binary"),
    ("loss.label_smoothing=0.1", "", LOSS),
    ("loss.class_weights=balanced", "loss.kind=binary", LOSS),
    ("model.dropout=0.5", "", BOXES),
    ("model.non_local=tsm", "", BOXES),
    ("data.region=columns", "", BOXES),
    ("data.modality=flow", "", BOXES),
    ("data.sampling=uniform", "", BOXES),
    ("data.repeats=2", "", BOXES),
    ("data.erase=0.5", "", BOXES),
    ("data.mix.mixup=1", "", BOXES),
    ("loss.label_smoothing=0.1", "", BOXES),
    ("loss.class_weights=balanced", "", BOXES),
    ("evaluate.precise_bn=1", "", BOXES),
]


@pytest.mark.parametrize(("word", "reader", "other"), READ_WITH)
def test_a_key_that_is_not_read_is_refused(word: str, reader: str, other: str) -> None:
    _spec(f"{reader} {word}")
    with pytest.raises(UserError) as caught:
        _spec(f"{other} {word}")
    key = "data.mix" if word.startswith("data.mix.") else word.partition("=")[0]
    assert f"here: {key}: must be " in str(caught.value)


def test_a_key_with_two_readers_is_refused_once() -> None:
    with pytest.raises(UserError) as caught:
        _spec("model.adapter=st model.positions=grid")
    assert str(caught.value).split("\n") == [
        "here: model.adapter: must be none with model.arch tsm: only arch vit reads it",
        "here: model.positions: must be index with model.arch tsm: only arch vit reads it",
    ]


def test_every_key_with_a_reader_is_in_the_list() -> None:
    marked = {key for key, field in fields(Spec) if any(isinstance(mark, ReadWith) for mark in field.metadata)}
    assert marked == {word.partition("=")[0].removesuffix(".mixup") for word, *_ in READ_WITH}


def test_a_reader_is_a_key_and_one_of_its_values() -> None:
    by_key = dict(fields(Spec))
    marks = [(key, mark) for key, field in by_key.items() for mark in field.metadata if isinstance(mark, ReadWith)]
    assert len(marks) > 20
    for key, mark in marks:
        sibling = f"{key.rpartition('.')[0]}.{mark.key}"
        reader = by_key[sibling if sibling in by_key else mark.key]
        assert mark.value in (OWN, BUILT_IN) or f"'{mark.value}'" in repr(reader), key
