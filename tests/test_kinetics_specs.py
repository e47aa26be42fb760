"""The shipped Kinetics specs against the papers' tables: "Training Kinetics in 15 Minutes" and TSM's."""

from __future__ import annotations

from pathlib import Path

import pytest

from summit_train.plan import make_plan
from summit_train.spec import load_spec
from summit_train.spec.catalog import ARCHITECTURES

FOLDER = Path(__file__).resolve().parents[1] / "configs/kinetics"
CLIPS = 240_000


# Name -> frames a batch, at 6 GPUs, 96 clips, an LR of 0.015 and 250,000 steps but for the exceptions.
PLANS = {
    "tsm_r50_8f": 768, "tsn_r50_8f": 768, "tsm_r50_16f": 1_536, "i3d_3x3x3_r50_16f": 1_536, "i3d_3x1x1_r50_32f": 3_072,
    "tsm_mobilenet_v2_8f": 768, "tsm_online_r50_8f": 768, "tsn_mobilenet_v2_8f": 768, "tsm_resnext101_8f": 768,
    "tsn_resnext101_8f": 768, "tsm_nl_r50_8f": 768, "tsn_nl_r50_8f": 768, "i3d_3x1x1_nl_r50_32f": 3_072,
    "tsm_r50_8f_1536gpu": 98_304,
}  # fmt: skip
EXCEPTIONS = {"tsm_r50_8f_1536gpu": (1536, 12_288, 1.92, 1_900), "tsm_r50_16f": (12, 96, 0.015, 250_000)}


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_has_the_papers_numbers(name: str) -> None:
    gpus, batch, peak_lr, steps = EXCEPTIONS.get(name, (6, 96, 0.015, 250_000))
    spec = load_spec(FOLDER / f"{name}.yaml")
    plan = make_plan(spec, gpus, CLIPS)
    assert spec.name == name
    assert (plan.virtual_gpus, plan.global_batch, plan.frames_per_batch) == (gpus, batch, PLANS[name])
    assert (plan.total_steps, plan.warmup_steps) == (steps, steps // 20)
    assert plan.peak_lr == pytest.approx(peak_lr)
    assert plan.memory_bytes_per_rank < 16 * 2**30  # a Summit V100
    assert spec.data.num_frames * spec.data.frame_stride == 64


@pytest.mark.parametrize(
    ("name", "batch", "frames", "window", "peak_lr", "epochs", "warmup_epochs"),
    [
        ("eco_lite_16f", 96, 16, None, 0.015, 100, 5),
        ("slowfast_r50_4x16", 64, 32, 64, 0.1, 196, 34),
        ("x3d_m", 128, 16, 80, 0.1, 300, 35),
        ("ir_csn_152_32f", 96, 32, 64, 0.015, 100, 5),
    ],
)
def test_the_comparators_recipes(
    name: str, batch: int, frames: int, window: int | None, peak_lr: float, epochs: int, warmup_epochs: int
) -> None:
    spec = load_spec(FOLDER / f"{name}.yaml")
    plan = make_plan(spec, spec.scale.gpus or 1, CLIPS)
    data, schedule = spec.data, spec.schedule
    assert (plan.global_batch, data.num_frames, schedule.epochs, schedule.warmup_epochs) == (
        batch, frames, epochs, warmup_epochs,
    )  # fmt: skip
    assert plan.peak_lr == pytest.approx(peak_lr)
    assert plan.memory_bytes_per_rank < 16 * 2**30
    assert spec.model.pretrained is None
    assert data.sampling == "uniform" if window is None else frames * data.frame_stride == window


def test_videomaes_recipe() -> None:
    """Its script: 64 GPUs of 6 clips twice, LR 5e-4 x 384 / 256, 75 epochs of 625 steps of 384 clips."""
    spec = load_spec(FOLDER / "tsm_r50_16f_recipe.yaml")
    plan = make_plan(spec, 64, CLIPS)
    assert (plan.global_batch, plan.order().clips_per_gpu, plan.steps_per_epoch, plan.total_steps) == (
        768, 6, 625, 46_875,
    )  # fmt: skip
    assert plan.peak_lr == pytest.approx(7.5e-4)
    assert (spec.optimizer.name, spec.optimizer.weight_decay, spec.optimizer.layer_decay) == ("adamw", 0.05, 0.75)
    assert (spec.data.augment, spec.data.erase, spec.loss.label_smoothing) == ("rand_augment", 0.25, 0.1)


def test_all_shipped_specs_are_looked_at() -> None:
    names = {path.stem for path in FOLDER.glob("*.yaml")} - {"base"}
    archs = {load_spec(FOLDER / f"{name}.yaml").model.arch for name in names}
    # Of the other two the papers have figures on Something-Something alone.
    assert archs == set(ARCHITECTURES) - {"i3d_replace", "trn"}
    assert len(names) == 22


@pytest.mark.parametrize("backbone", ["r50", "mobilenet_v2", "resnext101", "nl_r50"])
def test_the_twin_differs_from_tsm_in_the_network_alone(backbone: str) -> None:
    tsm, tsn = (load_spec(FOLDER / f"{name}_{backbone}_8f.yaml").model_dump() for name in ("tsm", "tsn"))
    assert tsm["model"].pop("arch") == "tsm" and tsn["model"].pop("arch") == "tsn"
    assert {key for key in tsm if tsm[key] != tsn[key]} == {"name"}


@pytest.mark.parametrize("backbone", ["mobilenet_v2", "resnext101", "nl_r50"])
def test_the_specs_of_table_3_differ_in_the_backbone_alone(backbone: str) -> None:
    base, other = (load_spec(FOLDER / f"tsm_{name}_8f.yaml").model_dump() for name in ("r50", backbone))
    for model in (base["model"], other["model"]):
        del model["backbone"], model["non_local"], model["pretrained"]
    assert {key for key in base if base[key] != other[key]} <= {"name", "execution"}


def test_the_online_network_differs_in_the_shift_and_the_test_alone() -> None:
    offline, online = (load_spec(FOLDER / f"{name}.yaml").model_dump() for name in ("tsm_r50_8f", "tsm_online_r50_8f"))
    assert (offline["model"].pop("shift_direction"), online["model"].pop("shift_direction")) == ("both", "past")
    assert (offline["evaluate"].pop("mode"), online["evaluate"].pop("mode")) == ("clips", "stream")
    assert {key for key in offline if offline[key] != online[key]} == {"name"}
