"""bench/gpu/memory.py on the CPU: what autograd keeps is the plan's estimate, and a wrong estimate fails."""

from __future__ import annotations

import pytest
import torch

from summit_train.spec import load_spec
from summit_train.spec.source import shipped
from tests.worlds import bench_script

outcome = bench_script("gpu/outcome")
bench = bench_script("gpu/memory")


@pytest.mark.parametrize("name", bench.CASES)
def test_each_case_is_a_valid_spec(name: str) -> None:
    file, words = bench.CASES[name]
    spec = load_spec(shipped("configs/kinetics") / f"{file}.yaml", [*bench.LARGE, *words])
    assert spec.precision in name and spec.scale.clips_per_gpu == 8


def test_what_autograd_keeps_is_estimated() -> None:
    file, words = bench.CASES["tsm, fp32"]
    spec = load_spec(shipped("configs/kinetics") / f"{file}.yaml", [*bench.SMALL, *words, "model.width=0.125"])
    row = {"network": "tsm, fp32", **bench.step_memory(spec, torch.device("cpu"))}
    result = outcome.Outcome()
    bench.judge(row, result)
    assert result.passes and len(result.checks) == 2
    assert row["estimate"] == row["state_bytes"] + row["activation_bytes"]


@pytest.mark.parametrize(("peak", "passes"), [(84, False), (86, True), (114, True), (116, False)])
def test_the_peak_keeps_to_the_estimate_both_ways(peak: int, passes: bool) -> None:
    result = outcome.Outcome()
    bench.judge({"network": "x, recomputed", "peak": peak, "estimate": 100}, result)
    assert result.passes is passes


def test_out_of_memory_is_a_failure_with_its_reason() -> None:
    result = outcome.Outcome()
    bench.judge({"network": "x", "out_of_memory": "tried to allocate"}, result)
    assert not result.passes and result.checks[0].note == "tried to allocate"
