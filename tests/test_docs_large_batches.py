"""docs/large_batches.md: its table is what `plan` works out, and its constants are the defaults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from summit_train.plan import make_plan
from summit_train.spec import load_spec
from summit_train.spec.optimizer import OptimizerSpec, TrustRatioSpec

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs/large_batches.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| (\w+) \| ([\d.]+) \| (\d+) \| ([\d.]+) \|$", TEXT, re.M)
SUFFIX = {"linear": "", "date": "_date", "lars": "_lars"}


def test_the_table_has_three_sizes_of_each_preset() -> None:
    assert [(row[0], row[3]) for row in ROWS] == [(n, p) for n in ("1,536", "3,072", "6,144") for p in SUFFIX]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[3]}")
def test_the_kinetics_run_under_each_preset(row: tuple[str, ...]) -> None:
    gpus, batch, steps = (int(cell.replace(",", "")) for cell in row[:3])
    spec = load_spec(ROOT / f"configs/kinetics/tsm_r50_8f_1536gpu{SUFFIX[row[3]]}.yaml", [f"scale.gpus={gpus}"])
    plan = make_plan(spec, gpus, 240_000)
    assert (plan.global_batch, plan.total_steps, plan.warmup_steps) == (batch, steps, int(row[5]))
    assert f"{plan.peak_lr:.4g}" == row[4]
    assert f"{plan.warmup_steps / plan.steps_per_epoch:.3g}" == row[6]


def test_the_constants_are_the_defaults() -> None:
    trust = TrustRatioSpec(kind="bounded")
    assert f"within [{trust.lower:g}, {trust.upper:g}]" in TEXT and f"times {trust.coefficient:g} norm(w)" in TEXT
    for name, cells in re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", TEXT, re.M):
        spec = OptimizerSpec.model_validate({"name": name})
        for key, values in re.findall(r"`(\w+)` ([\d.e, -]*\d)", cells):
            default = getattr(spec, key)
            found = [float(value) for value in values.split(", ")]
            assert found == (list(default) if isinstance(default, tuple) else [default]), (name, key)
