"""bench/gpu/verdict.py turns measured ratios into lines of a spec: by hand, on both sides of each threshold."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import yaml

from summit_train.spec import ExecutionSpec, Spec
from tests.worlds import ROOT, bench_script

verdict = bench_script("gpu/verdict")


def row(precision: str, rate: float, execution: str = "accelerated", **more: float) -> dict[str, Any]:
    """A row of training."""
    names = {"network": "tsm", "mode": "train", "precision": precision, "batch": 16, "execution": execution}
    return names | more | {"clips_per_second": {"min": rate, "median": rate, "max": rate}}


def ratio(execution: str, seconds: float, mode: str = "train", batch: int = 16) -> dict[str, Any]:
    """A ratio of an execution's seconds over the default's."""
    of, over = ({"network": "tsm", "execution": name} for name in (execution, "accelerated"))
    spread = {"min": seconds - 0.01, "median": seconds, "max": seconds + 0.01}
    return {"of": of, "over": over, "mode": mode, "precision": "bf16", "batch": batch, "ratio": spread}


def speed(rates: dict[str, float], *ratios: dict[str, Any], compile_s: float = 60) -> dict[str, Any]:
    """A speed.json with so many clips a second in each precision."""
    rows = [row(precision, rate) for precision, rate in rates.items()]
    rows.append(row("bf16", 100, "compiled", compile_s=compile_s))
    return {"rows": rows, "ratios": list(ratios), "skipped": {}, "environment": {"device": "a GPU"}}


def lines(values: dict[str, Any], hours: float = 4) -> dict[str, Any]:
    """What the printed lines put into a spec."""
    return yaml.safe_load(verdict.as_text(verdict.verdict(values, hours), values)) or {}


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({"bf16": 100, "fp16": 101, "tf32": 60, "fp32": 30}, "bf16"),  # as fast, and no loss scale
        ({"bf16": 20, "fp16": 100, "tf32": 30, "fp32": 30}, "fp16"),  # a V100
        ({"bf16": 100, "fp16": 106, "fp32": 30}, "fp16"),
        ({"bf16": 104, "fp16": 104, "tf32": 100, "fp32": 50}, "fp32"),  # fp32 of a spec has TF32's convolutions
    ],
)
def test_the_precision_is_the_fastest_and_bf16_among_equals(rates: dict[str, float], chosen: str) -> None:
    assert lines(speed(rates))["precision"] == chosen
    assert chosen in str(Spec.model_fields["precision"].annotation)


@pytest.mark.parametrize(
    ("seconds", "compile_s", "hours", "compiles"),
    [
        (0.90, 60, 4, True),
        (0.95, 60, 4, True),  # 5.3 % more clips a second
        (0.96, 60, 4, False),  # 4.2 %
        (1.10, 60, 4, False),
        (0.90, 361, 1, False),  # an hour saves 360 s
        (0.90, 359, 1, True),
    ],
)
def test_compilation_needs_a_gain_and_a_run_that_pays_it_back(
    seconds: float, compile_s: float, hours: float, compiles: bool
) -> None:
    values = speed({"bf16": 100, "fp32": 30}, ratio("compiled", seconds), compile_s=compile_s)
    assert lines(values, hours)["execution"] == {"compile": compiles}
    assert "compile" in ExecutionSpec.model_fields


def test_what_was_not_measured_is_not_decided() -> None:
    values = speed({"bf16": 100}) | {"skipped": {"train tsm bf16 batch 16 compiled": "torch.compile needs triton"}}
    assert lines(values) == {}
    said = verdict.as_text(verdict.verdict(values), values)
    assert "undecided, measured: bf16" in said and "torch.compile needs triton" in said


def test_what_has_no_key_is_a_comment() -> None:
    ratios = [ratio("graph", 0.5, "inference", 1), ratio("graph", 0.97, "inference", 4), ratio("plain", 1.02)]
    values = speed({"bf16": 100, "fp32": 30}, *ratios)
    said = verdict.as_text(verdict.verdict(values), values).splitlines()
    (one,) = (line for line in said if "1 a pass" in line)
    (four,) = (line for line in said if "4 a pass" in line)
    assert one.startswith("#") and "+100.0%" in one and "would pay, and has no key" in one
    assert "keep the default" in four and "+3.1%" in four
    assert any(line.startswith("# plain network: -2.0%") for line in said)


def test_it_needs_no_torch() -> None:
    code = "import sys; sys.path.insert(0, 'bench/gpu'); import verdict; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
