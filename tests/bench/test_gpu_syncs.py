"""bench/gpu/syncs.py on the CPU: the cases build and run, and a wait in a step is named."""

from __future__ import annotations

import argparse

import pytest
import torch

from summit_train.spec import load_spec
from summit_train.spec.source import shipped
from summit_train.training.step import TrainStep
from tests.worlds import bench_script

outcome = bench_script("gpu/outcome")
bench = bench_script("gpu/syncs")

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", bench.CASES)
def test_each_case_is_a_valid_spec(name: str) -> None:
    file, words = bench.CASES[name]
    spec = load_spec(shipped("configs/kinetics") / f"{file}.yaml", [*bench.COMMON, *words])
    assert spec.precision in name or spec.execution.recompute


def test_it_runs_on_a_cpu_and_says_what_it_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("tsm, lars, fp16", "tsm, averaging, sgd, fp16")
    monkeypatch.setattr(bench, "CASES", {name: bench.CASES[name] for name in names})
    result = outcome.Outcome()
    bench.part(argparse.Namespace(seconds=1000, small=True), CPU, result)
    assert result.passes and len(result.checks) == 3
    assert "debug mode" in next(iter(result.values["skipped"]))


def test_a_wait_is_named_and_an_item_of_a_cpu_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = TrainStep._gradient_norm, []

    def waiting(self: TrainStep) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        return honest(self)

    monkeypatch.setattr(TrainStep, "_gradient_norm", waiting)
    file, words = bench.CASES["tsm, sgd, fp32"]
    spec = load_spec(shipped("configs/kinetics") / f"{file}.yaml", [*bench.COMMON, *words, *bench.SMALL])
    check = bench.no_wait("tsm", spec, CPU)
    assert not check.passes and "training/step.py:" in check.note
    assert not bench.item_raises(CPU)
