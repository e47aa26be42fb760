"""bench/gpu/precision.py on the CPU: it passes right networks, and what is wrong does not pass."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from summit_train.models.resnet import ResidualBlock
from summit_train.models.shift import TemporalShift
from tests.worlds import bench_script

outcome = bench_script("gpu/outcome")
networks = bench_script("gpu/networks")
bench = bench_script("gpu/precision")

CPU = torch.device("cpu")
TINY = networks.Case("tsm", "resnet18", frames=4, crop=32, width=0.125)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> object:
    executions = [bench.Execution("fp32", fast, True) for fast in (False, True)]
    executions += [bench.Execution("bf16", False, False)]
    monkeypatch.setattr(bench, "executions", lambda name, device: executions)
    result = outcome.Outcome()
    result.values["rows"] = []
    return result


def failed(found: object) -> list[str]:
    return [check.name for check in found.checks if not check.passes]  # type: ignore[attr-defined]


def test_a_right_network_passes(found: object) -> None:
    bench.check_network("tsm", TINY, CPU, found)
    assert failed(found) == [] and len(found.checks) == 6  # type: ignore[attr-defined]


def test_a_shift_the_other_way_fails(found: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: nn.Module) -> str:
        for block in model.modules():
            if isinstance(block, ResidualBlock) and isinstance(block.shift, TemporalShift):
                block.shift = TemporalShift(block.shift.num_frames, direction="past")
        return "wrong"

    monkeypatch.setattr(bench, "accelerate", wrong)
    bench.check_network("tsm", TINY, CPU, found)
    kinds = ("logits", "gradients")
    assert failed(found) == [f"tsm, fp32 fast NHWC: error of the {kind}" for kind in kinds]


def test_a_nan_fails() -> None:
    result = outcome.Outcome()
    bench.judge("x", (1.0, 1.0), (math.nan, 0.5), (math.nan, 0.5), result)
    assert [check.passes for check in result.checks] == [False, True]


def test_the_shift_equals_indexing_and_a_changed_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    result = outcome.Outcome()
    bench.check_shift(CPU, result)
    assert len(result.checks) == 16 and result.passes
    shift = bench.temporal_shift
    monkeypatch.setattr(bench, "temporal_shift", lambda x, *rest: shift(x, *rest).roll(1, 0))
    bench.check_shift(CPU, result)
    assert not any(check.passes for check in result.checks[16:])


def test_every_architecture_is_among_the_cases() -> None:
    from summit_train.spec.catalog import ARCHITECTURES

    assert {case.arch for case in networks.CASES.values()} == set(ARCHITECTURES)


def test_a_perturbed_filter_fails(found: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """One filter of one layer, 30 % too large."""

    def perturbed(model: nn.Module) -> str:
        with torch.no_grad():
            model.get_submodule("layer2.0.conv1").get_parameter("weight")[0].mul_(1.3)
        return "perturbed"

    monkeypatch.setattr(bench, "accelerate", perturbed)
    bench.check_network("tsm", TINY, CPU, found)
    assert "tsm, fp32 fast NHWC: error of the gradients" in failed(found)
