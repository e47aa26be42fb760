"""The shipped Kinetics specs against the paper's Tables 1 and 3 ("Training Kinetics in 15 Minutes")."""

from __future__ import annotations

from pathlib import Path

import pytest

from summit_train.plan import make_plan
from summit_train.spec import load_spec

FOLDER = Path(__file__).resolve().parents[1] / "configs/kinetics"
CLIPS = 240_000


@pytest.mark.parametrize(
    ("name", "gpus", "batch", "frames_per_batch", "peak_lr", "steps"),
    [
        ("tsm_r50_8f", 6, 96, 768, 0.015, 250_000),
        ("tsm_r50_8f_1536gpu", 1536, 12_288, 98_304, 1.92, 1_900),
        ("tsn_r50_8f", 6, 96, 768, 0.015, 250_000),
        ("i3d_3x3x3_r50_16f", 6, 96, 1_536, 0.015, 250_000),
        ("i3d_3x1x1_r50_32f", 6, 96, 3_072, 0.015, 250_000),
    ],
)
def test_the_plan_has_the_papers_numbers(
    name: str, gpus: int, batch: int, frames_per_batch: int, peak_lr: float, steps: int
) -> None:
    spec = load_spec(FOLDER / f"{name}.yaml")
    plan = make_plan(spec, gpus, CLIPS)
    assert spec.name == name
    assert (plan.virtual_gpus, plan.global_batch, plan.frames_per_batch) == (gpus, batch, frames_per_batch)
    assert (plan.total_steps, plan.warmup_steps) == (steps, steps // 20)
    assert plan.peak_lr == pytest.approx(peak_lr)
    assert plan.memory_bytes_per_rank < 16 * 2**30  # a Summit V100
    assert spec.data.num_frames * spec.data.frame_stride == 64


def test_all_shipped_specs_are_looked_at() -> None:
    names = {path.stem for path in FOLDER.glob("*.yaml")}
    networks = {name.split("_r50")[0] for name in names - {"base"}}
    assert networks == {"tsm", "tsn", "i3d_3x3x3", "i3d_3x1x1"} and len(names) == 6


def test_the_twin_differs_from_tsm_in_the_network_alone() -> None:
    tsm, tsn = (load_spec(FOLDER / f"{name}_r50_8f.yaml").model_dump() for name in ("tsm", "tsn"))
    assert tsm["model"].pop("arch") == "tsm" and tsn["model"].pop("arch") == "tsn"
    assert {key for key in tsm if tsm[key] != tsn[key]} == {"name"}
