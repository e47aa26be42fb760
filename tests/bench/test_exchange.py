"""bench/exchange.py: every exchange, on two ranks and a tiny network."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.worlds import ROOT, bench_script, lines, needs_ranks, run

EXCHANGE = bench_script("exchange")
TINY = ("--spec", "configs/motion/tsm.yaml", "--size", "32", "--rounds", "1", "--steps", "1", "--warm-up", "2")


@needs_ranks
def test_exchanges_are_measured_and_leave_the_same_gradient() -> None:
    """Norms are of the averaged gradients, not of a rank's own. That of Horovod has tests of its own."""
    kinds = ["torch", "ddp"]
    words = (*TINY, "--precision", "fp32", "--json", "--kinds", *kinds)
    status, output = run(0, "bench/exchange.py", *words)
    assert status == 0, output
    found = json.loads(lines(output)[-1])["results"]["fp32"]
    assert list(found["exchanges"]) == kinds and list(found["ratios"]) == ["torch / ddp"]
    ours, ddp = (found["rounds"][kind][0] for kind in kinds)
    assert ours["gradient_norm"] == pytest.approx(ddp["gradient_norm"], rel=1e-5) and ours["gradient_norm"] > 0
    assert ours["bytes"] == ddp["bytes"] == 4 * 702_612
    for kind, measured in found["exchanges"].items():
        assert measured["messages"] == 2, kind
        assert 0 < measured["waits"]["median"] < measured["step"]["median"], kind
        assert measured["peak_bytes"]["median"] > 1e8, kind
    assert found["ratios"]["torch / ddp"]["step"]["median"] == pytest.approx(ours["step"] / ddp["step"])


def _measure(monkeypatch: pytest.MonkeyPatch, *words: str, norm_of_ddp: float = 1.0) -> tuple[Any, list[Any]]:
    """What is measured where all ranks answer the same, and (PYTHONPATH, back end) of each start."""
    started = []

    def answer(command: list[str], timeout: float, environment: dict[str, str]) -> dict[str, Any]:
        started.append((environment["PYTHONPATH"], environment["SUMMIT_TRAIN_COMM"]))
        measured = {"step": 1.5, "waits": 0.25, "cpu": 1.25, "peak_bytes": 2e9, "messages": 3, "bytes": 8}
        return measured | {"gradient_norm": norm_of_ddp if "ddp" in command else 1.0}

    monkeypatch.setattr("sys.argv", ["exchange.py", "--rounds", "1", *words])
    monkeypatch.setattr(EXCHANGE, "answer", answer)
    return EXCHANGE.measure("fp32", EXCHANGE.arguments()), started


def test_the_exchange_before_runs_from_its_worktree_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    result, started = _measure(monkeypatch, "--before", "/old")
    assert started == [(str(ROOT), "horovod"), ("/old", "horovod"), *[(str(ROOT), "torch")] * 2]
    assert list(result["ratios"]) == [f"{a} / {b}" for a, b in EXCHANGE.PAIRS]
    assert list(_measure(monkeypatch)[0]["exchanges"]) == ["horovod", "torch", "ddp"]


def test_a_faster_exchange_that_leaves_another_gradient_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _measure(monkeypatch, norm_of_ddp=1.0001)
    with pytest.raises(SystemExit, match=r"must leave the same gradient, got norms of .*'ddp': 1\.01"):
        _measure(monkeypatch, norm_of_ddp=1.01)
