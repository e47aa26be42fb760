"""bench/gpu/accumulation.py on the CPU: right steps pass; wrong sums and statistics do not."""

from __future__ import annotations

import pytest
import torch

from summit_train.training.step import LossScale, RunningStatistics
from tests.worlds import bench_script

outcome = bench_script("gpu/outcome")
networks = bench_script("gpu/networks")
bench = bench_script("gpu/accumulation")

CPU = torch.device("cpu")
TINY = networks.Case("tsm", "resnet18", frames=4, crop=32, width=0.125)


def compared(name: str) -> list[str]:
    """The checks that fail."""
    result = outcome.Outcome()
    bench.compare(name, TINY, CPU, *bench.RUNS[name], result)
    return [check.name for check in result.checks if not check.passes]


@pytest.mark.parametrize("name", bench.RUNS)
def test_right_steps_pass(name: str) -> None:
    assert compared(name) == []


def test_statistics_of_the_last_micro_batch_alone_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    step = bench.trained(TINY, CPU, "fp64", {}, {})
    monkeypatch.setattr(RunningStatistics, "begin_pass", lambda self, micro_batch: None)
    wrong = bench.trained(TINY, CPU, "fp32", {}, {})
    answers = {"fp64": step, "fp32": wrong}
    monkeypatch.setattr(bench, "trained", lambda case, device, precision, *rest: answers[precision])
    assert compared("sgd") == ["sgd: error of the statistics after 3 steps, of their way"]


def test_a_virtual_gpu_that_is_left_out_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = bench.micro_batches
    calls: list[int] = []

    def repeated(case: object, step: int) -> list[object]:
        calls.append(step)
        batches = honest(case, step)
        return batches if len(calls) <= bench.STEPS else [*batches[:3], batches[0]]

    monkeypatch.setattr(bench, "micro_batches", repeated)
    assert "sgd: error of the weights after 3 steps, of their way" in compared("sgd")


def test_an_overflow_that_is_not_seen_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    result = outcome.Outcome()
    bench.overflow(TINY, CPU, result)
    assert result.passes and len(result.checks) == 5
    monkeypatch.setattr(LossScale, "update", lambda self, skipped: None)
    result = outcome.Outcome()
    bench.overflow(TINY, CPU, result)
    assert [check.name for check in result.checks if not check.passes] == ["fp16, overflow: the scale halves"]
