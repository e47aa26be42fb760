"""The spec: what is accepted, what is refused, and that each refusal can be acted on."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from summit_train.core.errors import UserError
from summit_train.data.video.augment import mirrored_x
from summit_train.models.precision import Normalise
from summit_train.spec import DataSpec, Spec, dump_spec, load_spec, spec_from_values
from summit_train.spec.catalog import ARCHITECTURES, BACKBONES, FLOW_ZERO, RGB, VIT_BACKBONES, flow
from summit_train.spec.typed import BUILT_IN, OWN, ReadWith
from tests.spec.test_identity import fields

# Four lines: name 1, model 2, data 3, scale 4.
TEXT = """name: t
model: {arch: tsm, num_classes: 400}
data: {train: train.csv, val: val.csv}
scale: {gpus: 6, clips_per_gpu: 16}
"""


def _values(**sections: Any) -> dict[str, Any]:
    values = {"name": "t", "model": {"arch": "tsm", "num_classes": 400}, "data": {"train": "a", "val": "b"}}
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section  # type: ignore[dict-item]
    return values


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Spec]:
    """Loads TEXT with more lines behind it and overrides."""

    def load(more: str = "", *overrides: str) -> Spec:
        path = tmp_path / "spec.yaml"
        path.write_text(TEXT + more)
        return load_spec(path, overrides)

    return load


@pytest.fixture
def refused(load: Callable[..., Spec], tmp_path: Path) -> Callable[..., list[str]]:
    """The lines of the refusal, without the folder."""

    def refused(more: str = "", *overrides: str) -> list[str]:
        with pytest.raises(UserError) as caught:
            load(more, *overrides)
        return str(caught.value).replace(f"{tmp_path}/", "").split("\n")

    return refused


def test_every_mistake_of_a_spec_is_told_at_once_each_with_its_line(refused: Callable[..., list[str]]) -> None:
    lines = refused("optimizer:\n  momentun: 0.9\n  base_lr: fast\nprecision: fp8\nseed: -1\n", "model.width=0")
    assert sorted(lines) == [
        "override 'model.width=0': model.width: Input should be greater than 0, got 0",
        "spec.yaml:6: optimizer.momentun: unknown key; did you mean momentum? valid: name, momentum, alpha, "
        "betas, eps, weight_decay, decay_norms, base_lr, base_batch, lr_scaling, head_lr_factor, first_lr_factor, "
        "layer_decay, lr_factors, freeze, clip_norm, trust_ratio, compression",
        "spec.yaml:7: optimizer.base_lr: Input should be a valid number, got 'fast'",
        "spec.yaml:8: precision: 'fp8' is not a choice; valid: fp32, fp16, bf16, fp64",
        "spec.yaml:9: seed: Input should be greater than or equal to 0, got -1",
    ]


def _rows() -> list[tuple[str, str]]:
    lines = Path(__file__).with_name("specs.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(" -> ") for line in lines if line and not line.startswith("#"))
    return [(words, message) for words, _, message in pairs]


@pytest.mark.parametrize(("words", "message"), _rows())
def test_a_spec_is_accepted_or_refused_in_a_line(
    load: Callable[..., Spec], refused: Callable[..., list[str]], words: str, message: str
) -> None:
    more = f"{words[2:]}\n" if words.startswith("+ ") else ""
    overrides = [] if more else shlex.split(words)
    if not message:
        load(more, *overrides)
        return
    (line,) = refused(more, *overrides)
    for override in overrides:
        line = line.removeprefix(f"override {override!r}: ")
    assert line.startswith(message.removesuffix("...")) if message.endswith("...") else line == message


def test_keys_without_their_reader_are_refused_once_each(refused: Callable[..., list[str]]) -> None:
    only_vit = "with model.arch tsm: only arch vit reads it"
    assert refused("", "model.adapter=st", "model.positions=grid") == [
        f"override 'model.adapter=st': model.adapter: must be none {only_vit}",
        f"override 'model.positions=grid': model.positions: must be index {only_vit}",
    ]
    streamed = ("task=detection", "model.arch=tsn", "data.augment=whole", "evaluate.mode=stream", "evaluate.crops=full")
    lines = refused("", *streamed, "model.non_local=tsm")
    assert [line.split(": ")[1] for line in lines] == ["model.non_local", "evaluate.mode"]
    assert lines[0].endswith("must be false with task detection: only task classification reads it")


def test_every_key_with_a_reader_is_accepted_and_refused_in_the_list() -> None:
    marked = {key for key, field in fields(Spec) if any(isinstance(mark, ReadWith) for mark in field.metadata)}
    rows = _rows()
    assert marked == {message.partition(":")[0] for _, message in rows if " reads it" in message} | {"model.non_local"}
    accepted = " ".join(words for words, message in rows if not message)
    assert [key for key in marked if f" {key}" not in f" {accepted}"] == []


def test_a_reader_is_a_key_and_one_of_its_values() -> None:
    by_key = dict(fields(Spec))
    marks = [(key, mark) for key, field in by_key.items() for mark in field.metadata if isinstance(mark, ReadWith)]
    assert len(marks) > 20
    for key, mark in marks:
        sibling = f"{key.rpartition('.')[0]}.{mark.key}"
        reader = by_key[sibling if sibling in by_key else mark.key]
        assert mark.value in (OWN, BUILT_IN) or f"'{mark.value}'" in repr(reader), key


def test_parts_that_are_frozen_for_some_epochs_are_trained_in_the_last_one(load: Callable[..., Spec]) -> None:
    freeze = "optimizer.freeze=[conv1, {names: [layer1, fc], until_epoch: %d}]"
    spec = load("", "schedule.epochs=9", freeze % 8)
    assert [(part.names, part.until_epoch) for part in spec.optimizer.freeze] == [
        (("conv1",), None), (("layer1", "fc"), 8),
    ]  # fmt: skip
    assert load("", "optimizer.freeze=conv1").optimizer.freeze == load("", "optimizer.freeze=[conv1]").optimizer.freeze
    with pytest.raises(UserError, match=r"optimizer\.freeze: until_epoch must be below the run's 9 epochs, got 9"):
        load("", "schedule.epochs=9", freeze % 9)


def test_choices_and_limits_are_those_of_the_networks() -> None:
    schema = Spec.model_json_schema()["$defs"]["ModelSpec"]["properties"]
    assert set(schema["arch"]["anyOf"][0]["enum"]) == set(ARCHITECTURES)
    assert set(schema["backbone"]["anyOf"][0]["enum"]) == {*BACKBONES, *VIT_BACKBONES}


def test_rgb_is_normalised_as_torchvisions_weights_want_it() -> None:
    assert RGB.channels == len(RGB.mean) == len(RGB.std) == 3
    assert RGB.mean == pytest.approx((123.675, 116.28, 103.53))
    assert RGB.std == pytest.approx((58.395, 57.12, 57.375))


@pytest.mark.parametrize(
    ("keys", "height", "width"),
    [
        ({}, 224, 224),
        ({"long_side": 1000, "short_side": (480, 600)}, 224, 224),
        ({"augment": "whole", "short_side": (480, 600), "long_side": 1000}, 600, 1000),
        ({"augment": "whole", "short_side": (480, 600), "long_side": 500}, 500, 500),  # not above the long side
        ({"augment": "whole", "short_side": (480, 600)}, 600, 600),
    ],
)
def test_a_clips_shape_is_that_of_the_loader(keys: dict[str, Any], height: int, width: int) -> None:
    """(T, H, W, C); of whole frames it is the largest."""
    data = DataSpec(train="x", val="x", num_frames=16, **keys)
    assert data.clip_shape == (16, height, width, 3)


def test_flow_is_normalised_about_no_motion() -> None:
    """The deviation is the mean of ImageNet's three, as in the TSM authors' code; their mean is 127.5."""
    five = flow(5)
    assert (five.channels, len(five.mean), len(five.std)) == (10, 10, 10)
    assert five.mean == (128.0,) * 10 and five.std == pytest.approx((57.63,) * 10)
    assert five.std[0] / 255 == pytest.approx(sum(RGB.std) / 3 / 255, abs=5e-4)
    assert DataSpec(train="x", val="x", modality="flow").clip_shape == (8, 224, 224, 10)
    # The encoding's zero: round(255 (0 + 20) / 40), half to even.
    assert round(255 * 20 / 40) == FLOW_ZERO


def test_a_mirrored_component_is_the_negative_of_what_the_network_saw() -> None:
    normalise = Normalise(torch.float64, torch.device("cpu"), flow(1))
    values = torch.arange(1, 256, dtype=torch.uint8).view(1, 1, 1, -1, 1).expand(-1, -1, -1, -1, 2)
    mirrored = torch.from_numpy(mirrored_x(values.numpy()))
    assert torch.equal(normalise(mirrored), -normalise(values))
    assert normalise(values)[0, 0, 0, 0, FLOW_ZERO - 1] == 0.0


def test_paths_are_expanded(load: Callable[..., Spec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    overrides = ["data.train=~/t.csv", "data.val=$SCRATCH/v.csv", "data.root=${SCRATCH}x", "run_dir='a~$ b'"]
    spec = load("", *overrides)
    assert (spec.data.train, spec.data.val, spec.data.root) == ("/home/of me/t.csv", "/scratch/v.csv", "/scratchx")
    assert spec.run_dir == "a~$ b"
    assert load("", "model.arch=$SCRATCH/a.py:net").model.arch == "/scratch/a.py:net"


HOSTILE = ["a b", "-rf", "$(reboot)", "`id`", "a;b", "a'b\"c", "<script>", "{{7*7}}", "%s%n", "é漢🎬", "1e5",
           "null", "true", "a: b", "# no", "- a", "*", "C:\\x", "...", "~", "[",
           "é" * 100]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_a_name(tmp_path: Path, name: str) -> None:
    spec = spec_from_values(_values(name=name, run_dir=str(tmp_path)), "here")
    assert spec.name == name
    path = tmp_path / "spec.yaml"
    path.write_text(dump_spec(spec), encoding="utf-8")
    assert load_spec(path) == spec
    spec.run_path.mkdir()
    assert spec.run_path.parent == tmp_path


def test_a_removed_key_may_be_null_and_else_names_what_to_do() -> None:
    """Specs and checkpoints of earlier versions have every key."""
    values = _values()
    values["data"]["quarantine"] = None
    assert spec_from_values(values, "checkpoint") == spec_from_values(_values(), "checkpoint")
    values["data"]["quarantine"] = "bad.csv"
    with pytest.raises(UserError, match=r"^checkpoint: data\.quarantine: was removed; .* data scan LIST --out CLEAN"):
        spec_from_values(values, "checkpoint")
    values["data"].pop("quarantine")
    values["model"]["quarantine"] = None  # a key of no version
    with pytest.raises(UserError, match=r"^checkpoint: model\.quarantine: unknown key"):
        spec_from_values(values, "checkpoint")


def _sections() -> list[BaseModel]:
    spec = spec_from_values(_values(), "here")
    return [spec, *(part for name in Spec.model_fields if isinstance(part := getattr(spec, name), BaseModel))]


@pytest.mark.parametrize("section", _sections(), ids=lambda section: type(section).__name__)
def test_every_section_is_frozen_and_strict(section: BaseModel) -> None:
    for name in type(section).model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, getattr(section, name))
    with pytest.raises(ValidationError, match=r"frozen|no field"):
        section.something_new = 1  # type: ignore[attr-defined]
    with pytest.raises(ValidationError, match="Extra inputs"):
        type(section).model_validate({**section.model_dump(), "something_new": 1})


def test_values_of_a_checkpoint_are_checked_too() -> None:
    with pytest.raises(UserError, match=r"^step_00000001\.pt: model\.arch: 'resnext' is not a choice"):
        spec_from_values(_values(model={"arch": "resnext"}), "step_00000001.pt")


# Text of a path: without NUL, variables and a home.
PATHS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0$~"), min_size=1, max_size=12)
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=40).filter(
    lambda name: name not in (".", "..") and name.isprintable()
)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Specs of many kinds, each possible."""
    arch = draw(st.sampled_from(list(ARCHITECTURES)))
    model = {"arch": arch, "backbone": draw(st.sampled_from([None, *ARCHITECTURES[arch].backbones]))}
    model |= {"width": draw(st.floats(0.01, 8)), "pretrained": draw(st.none() | PATHS)}
    optimizer = {
        "base_lr": draw(st.floats(1e-300, 1e300)),
        "name": draw(st.sampled_from(["sgd", "rmsprop", "adagrad", "adam", "adamw", "lamb"])),
        "momentum": draw(st.none() | st.floats(0, 0.99)),
        "trust_ratio": draw(st.none() | st.builds(dict, kind=st.just("bounded"), upper=st.floats(0.1, 1e3))),
        "clip_norm": draw(st.none() | st.floats(1e-9, 1e9)),
    }
    sections = {
        "model": model,
        "data": {"train": draw(PATHS), "root": draw(st.none() | PATHS), "num_frames": 8 * draw(st.integers(2, 8))},
        "optimizer": optimizer,
        "schedule": {
            "warmup_epochs": draw(st.floats(0, 100)),
            "milestones": draw(st.lists(st.floats(0, 300), max_size=3)),
        },
        "evaluate": {"crops": draw(st.sampled_from([1, 3] if arch == "vit" else [1, 3, "full"])), "short_side": 224},
    }
    return spec_from_values(_values(name=draw(NAMES), seed=draw(st.integers(0, 2**63 - 1)), **sections), "drawn")


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(specs())
def test_a_dumped_spec_loads_as_the_same_spec(tmp_path_factory: pytest.TempPathFactory, spec: Spec) -> None:
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump_spec(spec), encoding="utf-8")
    assert load_spec(path) == spec
    assert spec_from_values(spec.model_dump(mode="json"), "checkpoint") == spec
