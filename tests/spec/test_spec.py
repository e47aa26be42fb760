"""The spec: what is accepted, what is refused, and that each refusal can be acted on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from summit_train.core.errors import UserError
from summit_train.spec import Spec, dump_spec, load_spec, spec_from_values
from summit_train.spec.catalog import ARCHITECTURES, BACKBONES, VIT_BACKBONES

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


@pytest.mark.parametrize(
    ("more", "overrides", "start", "parts"),
    [
        ("optimiser: {}\n", (), "spec.yaml:5: optimiser: unknown key", ("did you mean optimizer?", "schedule")),
        ("zzz: 1\n", (), "spec.yaml:5: zzz: unknown key; valid: name, task, seed, model", ("run_dir",)),
        ("", ("model.ach=tsm",), "override 'model.ach=tsm': model.ach: unknown key", ("did you mean arch?",)),
        ("", ("mdel.arch=tsm",), "override 'mdel.arch=tsm': mdel: unknown key", ("did you mean model?",)),
        ("", ("extends=a.yaml",), "override 'extends=a.yaml': extends: unknown key", ()),
        ("", ("model.arch=tsmm",), "override 'model.arch=tsmm': model.arch: 'tsmm' is not a choice", ("mean tsm?",)),
        ("", ("model.arch=nets.py:1",), "override 'model.arch=nets.py:1': model.arch: 'nets.py:1' is not a choice",
         ("package.module:callable, FILE.py:callable",)),
        ("", ("model.arch=a-b:c",), "override 'model.arch=a-b:c': model.arch: 'a-b:c' is not a choice", ()),
        ("", ('model.arch="a\\nb.py:c"',), "override 'model.arch=", (r"must be without control", r"got 'a\nb.py:c'")),
        ("", ("model={arch: tsm}",), "override 'model={arch: tsm}': model.num_classes: is missing", ("no default",)),
        ("schedule: 100\n", (), "spec.yaml:5: schedule: must be a section of keys, got 100", ()),
        ("schedule: {epochs: '100'}\n", (), "spec.yaml:5: schedule.epochs: ", ("integer", "got '100'")),
        ("optimizer: {base_lr: .nan}\n", (), "spec.yaml:5: optimizer.base_lr: ", ("finite", "got nan")),
        ("optimizer: {trust_ratio: lars}\n", (), "spec.yaml:5: optimizer.trust_ratio: must be a section of keys", ()),
        ("optimizer: {trust_ratio: {kind: lasr}}\n", (), "spec.yaml:5: optimizer.trust_ratio.kind: ", ("mean lars?",)),
        ("optimizer: {trust_ratio: {kind: lars, lowr: 1}}\n", (), "spec.yaml:5: optimizer.trust_ratio.lowr: unknown",
         ("did you mean lower?",)),
        ("evaluate: {crops: 2}\n", (), "spec.yaml:5: evaluate.crops: 2 is not a choice; valid: 1, 3, full", ()),
        ("", ("data.short_side=[256]",), "override 'data.short_side=[256]': data.short_side.1: is missing", ()),
        ("", ("data.crop_scales=[]",), "override 'data.crop_scales=[]': data.crop_scales: must be null or have", ()),
        ("", ("data.flip=1",), "override 'data.flip=1': data.flip: ", ("boolean",)),
        ("", ("data.train=''",), "override \"data.train=''\": data.train: the path must not be empty", ()),
        ("", ("data.train=$NO_SUCH_NAME/a",), "override 'data.train=$NO_SUCH_NAME/a': data.train: ",
         ("the environment variable $NO_SUCH_NAME is not set",)),
        ("", ("name=a/b",), "override 'name=a/b': name: the name becomes a folder", ("without '/'", "got 'a/b'")),
        ("", ("name=''",), "override \"name=''\": name: the name becomes a folder", ()),
        ("", ('name="a\\0"',), "override 'name=\"a\\\\0\"': name: the name becomes a folder", ()),
        ("", ("name=" + "é" * 101,), "override 'name=ééé", ("the name becomes a folder: must be 1 to 200 bytes",)),
        ("", ('name="a\\nb"',), "override 'name=\"a\\\\nb\"': name: ", ("without '/' and control", r"got 'a\nb'")),
        ("", (f"parallel.period={10**20}",), f"override 'parallel.period={10**20}': ", ("from 1 to 1,000,000",)),
    ],
)  # fmt: skip
def test_a_mistake_is_placed_and_the_right_value_is_told(
    refused: Callable[..., list[str]], more: str, overrides: tuple[str, ...], start: str, parts: tuple[str, ...]
) -> None:
    (line,) = refused(more, *overrides)
    assert line.startswith(start)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("overrides", "key", "part"),
    [
        ("data.short_side=[320,256]", "data.short_side", "must be [low, high], got [320, 256]"),
        ("data.crop=257", "data.crop", "must be at most the lowest data.short_side, 256, got 257"),
        ("schedule.epochs=5 schedule.warmup_epochs=5.5", "schedule.warmup_epochs", "the run's 5 epochs, got 5.5"),
        ("optimizer.trust_ratio.kind=bounded optimizer.trust_ratio.lower=11", "optimizer.trust_ratio.lower",
         "must be at most upper: lower is 11 and upper 10"),
        ("optimizer.name=lamb optimizer.trust_ratio.kind=lars", "optimizer.trust_ratio",
         "must be null with optimizer.name lamb, which already includes a trust ratio, got lars"),
        ("schedule.decay=steps", "schedule.milestones", "must be rising epochs between 0 and 100 with"),
        ("schedule.decay=cosinus", "schedule.decay", "did you mean cosine? valid: cosine, linear, polynomial, steps"),
        ("schedule.options.power=3", "schedule.options",
         "must be {} with schedule.decay cosine: only one of your own reads it; options of a built-in one are keys of"),
        ("schedule.decay=steps schedule.milestones=[30,30]", "schedule.milestones", "got [30, 30]"),
        ("schedule.decay=steps schedule.milestones=[0,30]", "schedule.milestones", "got [0, 30]"),
        ("schedule.decay=steps schedule.milestones=[30,100]", "schedule.milestones", "got [30, 100]"),
        ("data.num_frames=15 model.arch=i3d_3x3x3", "data.num_frames",
         "must be at least 16 for i3d_3x3x3, the product of its strides in time, got 15"),
        ("data.num_frames=7 model.arch=i3d_3x1x1", "data.num_frames", "must be at least 8 for i3d_3x1x1, the product"),
        ("data.num_frames=3 model.arch=eco_lite", "data.num_frames", "must be at least 4 for eco_lite, the product"),
        ("data.num_frames=20 model.arch=slowfast", "data.num_frames",
         "must be a multiple of 8 for slowfast, its slow pathway sees every 8th, got 20"),
        ("data.num_frames=1 model.arch=trn", "data.num_frames", "must be at least 2 for trn, those of its"),
        ("data.num_frames=129 model.arch=trn", "data.num_frames", "must be at most 128 for trn, got 129"),
        ("model.arch=a.b:c model.dropout=0.5", "model.dropout",
         "must be 0.0 with model.arch a.b:c: only a built-in one reads it; use model.options instead"),
        ("model.arch=a.b:c model.shift_direction=past", "model.shift_direction", "must be both with model.arch a.b:c"),
        ("model.arch=a.b:c model.freeze_trunk=true model.pretrained=a.pth", "model.freeze_trunk", "must be false with"),
        ("model.arch=a.b:c optimizer.layer_decay=0.5", "optimizer.layer_decay",
         "must be 1.0 with model.arch a.b:c: only a built-in one reads it; the blocks of others are not known"),
        ("model.arch=a.b:c model.backbone=resnet18", "model.backbone", "must be left out for a.b:c, which has no"),
        ("model.arch=a.b:c model.non_local=tsm", "model.non_local", "must be false for a.b:c; tsm, tsn"),
        ("model.arch=a.b:c evaluate.mode=stream", "evaluate.mode", "a.b:c cannot stream: it sees whole clips"),
        ("model.arch=a.b:c execution.recompute=true", "execution.recompute", "use torch.utils.checkpoint in the net"),
        ("model.options.depth=2", "model.options", "must be {} with model.arch tsm: only one of your own reads it"),
        ("model.arch=x3d_m model.backbone=resnet50", "model.backbone",
         "must be left out for x3d_m, which has no backbone, got resnet50"),
        ("model.arch=ir_csn model.backbone=resnet50", "model.backbone", "must be one of resnet152 for ir_csn, got"),
        ("model.arch=i3d_3x1x1 model.backbone=resnet18", "model.backbone", "must be one of resnet50, resnet101"),
        ("model.arch=trn model.backbone=mobilenet_v2", "model.backbone", "must be one of resnet18, resnet34,"),
        ("model.arch=eco_lite model.zero_init_residual=true", "model.zero_init_residual",
         "must be false for eco_lite, whose residual branches do not end in a norm"),
        ("model.arch=i3d_3x3x3 data.num_frames=16 model.pool1=1x3x3", "model.pool1",
         "must be 2x3x3 with model.arch i3d_3x3x3: only arch i3d_3x1x1 reads it"),
        ("model.adapter=st", "model.adapter", "must be none with model.arch tsm: only arch vit reads it"),
        ("model.positions=grid", "model.positions", "must be index with model.arch tsm: only arch vit reads it"),
        ("model.arch=vit model.adapter=st model.positions=grid evaluate.short_side=224", "model.positions",
         "must be index with model.adapter st: only adapter none reads it; the others learn their positions"),
        ("model.backbone=mobilenet_v2 model.non_local=tsm", "model.non_local", "must be false for tsm on mobi"),
        ("model.arch=vit model.backbone=vit_s", "evaluate.short_side",
         "must be data.crop, 224, for a vit that numbers the patches of its grid (model.positions index), got 256"),
        ("model.arch=vit model.backbone=vit_s evaluate.short_side=224 evaluate.crops=full", "evaluate.crops",
         "must be 1 or 3 for a vit that numbers the patches of its grid (model.positions index), got full"),
        ("model.arch=vit model.backbone=vit_s model.adapter=st data.crop=216", "data.crop",
         "must be a multiple of 16 for vit, as a patch has 16 x 16 pixels, got 216"),
        ("model.arch=vit model.backbone=vit_s model.adapter=st evaluate.short_side=8", "evaluate.short_side",
         "must be a multiple of 16 for vit, as a patch has 16 x 16 pixels, got 8"),
        ("model.non_local=true", "model.non_local", "True is not a choice; valid: false, tsm, original"),
        ("data.crop=16 model.non_local=tsm", "model.non_local", "must be false if data.crop is below 17"),
        ("checkpoint.keep_best=top1 evaluate.every_epochs=0", "checkpoint.keep_best", "must be null if evaluate.ev"),
        ("data.augment=rand_augment data.rand_augment.crop_area=[0.5,0.2]", "data.rand_augment.crop_area",
         "must be [low, high], got [0.5, 0.2]"),
        ("data.augment=rand_augment data.modality=flow", "data.augment", "must not be rand_augment with data.modality"),
        ("data.rand_augment.layers=2", "data.rand_augment",
         "must be null with data.augment scale_jitter: only augment rand_augment reads it"),
        ("data.augment=[multi_scale_crop,a.b:c] data.rand_augment={}", "data.rand_augment",
         "must be null with data.augment multi_scale_crop: only"),
        ("data.repeats=3", "data.repeats", "must divide scale.clips_per_gpu, 16, got 3"),
        ("data.mix.probability=0.5", "data.mix", "must have mixup or cutmix above 0; try {mixup: 0.8, cutmix"),
        ("data.mix.mixup=1 scale.clips_per_gpu=1", "data.mix", "scale.clips_per_gpu 1 with data.repeats 1 has on"),
        ("data.mix.cutmix=1 data.repeats=16", "data.mix", "clips_per_gpu 16 with data.repeats 16 has only one"),
        ("data.repeats=2 parallel.method=averaging parallel.grow_batch.max=17", "parallel.grow_batch.max",
         "must be a multiple of data.repeats, 2, got 17"),
        ("checkpoint.keep=3", "evaluate.last_checkpoints", "must be at most checkpoint.keep, 3, got 5"),
    ],
)  # fmt: skip
def test_impossible_combinations_are_refused(
    refused: Callable[..., list[str]], overrides: str, key: str, part: str
) -> None:
    (line,) = refused("", *overrides.split())
    assert f": {key}: " in line and part in line


@pytest.mark.parametrize(
    "overrides",
    [
        "data.crop=256",
        "data.crop=300 data.augment=multi_scale_crop",  # it scales its crop to the video
        "schedule.warmup_epochs=100",
        "schedule.warmup_epochs=0",
        "schedule.warmup_epochs=101 schedule.warmup_scaling=linear",  # of a batch that may be smaller
        "schedule.decay=steps schedule.milestones=[0.5,99.5]",
        "model.arch=i3d_3x3x3 data.num_frames=16 model.backbone=resnet18",
        "model.arch=i3d_3x1x1 data.num_frames=8",
        "model.arch=trn model.backbone=resnext101_32x4d data.num_frames=2",
        "model.arch=eco_lite data.num_frames=4",
        "model.arch=a.b:c model.options.depth=2 model.options.parts=[1,x] model.width=1.0 model.dropout=0.0",
        "model.arch=slowfast data.num_frames=8",
        "model.arch=x3d_m data.num_frames=1 model.backbone=null",
        "model.arch=vit model.backbone=vit_s data.crop=16 evaluate.short_side=16",
        "model.arch=vit model.backbone=vit_s model.positions=grid evaluate.crops=full evaluate.short_side=250",
        "model.arch=vit model.backbone=vit_s model.adapter=shift data.num_frames=7",
        "model.non_local=tsm data.crop=17",
        "model.non_local=original model.arch=i3d_3x1x1 data.num_frames=8",
        "model.non_local=false model.backbone=mobilenet_v2",
        "checkpoint.keep=5",
        "data.short_side=[256,256]",
        "scale.gpus=null evaluate.crops=full optimizer.clip_norm=20 optimizer.base_lr=2e-3 optimizer.weight_decay=1",
        "optimizer.trust_ratio.kind=bounded optimizer.trust_ratio.lower=1 optimizer.trust_ratio.upper=1",
        # Bounds are of the other kind.
        "optimizer.trust_ratio.kind=lars optimizer.trust_ratio.lower=20 optimizer.betas=[0,0.99]",
        "optimizer.trust_ratio=null optimizer.name=lamb",
        "optimizer.name=adamw optimizer.layer_decay=1 optimizer.decay_norms=true",
        "data.augment=rand_augment data.crop=300 data.rand_augment.layers=0 data.rand_augment.crop_area=[1,1]",
        "data.augment=[rand_augment,a.b:c] data.rand_augment={}",
        "model.arch=a.b:c optimizer.layer_decay=1 execution.recompute=false",
        "loss.kind=a.b:c loss.options.x=1 loss.like=binary",
        "schedule.decay=a.b:c schedule.options.x=1",
        "parallel.method=synchronous parallel.period=epoch parallel.grow_batch=null",
        "data.repeats=4 data.mix.mixup=0.8 data.erase=1 data.modality=flow",
    ],
)
def test_the_edge_of_the_possible_is_accepted(load: Callable[..., Spec], overrides: str) -> None:
    load("", *overrides.split())


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
