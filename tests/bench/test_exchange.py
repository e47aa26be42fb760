"""bench/exchange.py: every exchange, on two ranks and a tiny network."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.worlds import ROOT, bench_script, lines, needs_ranks, run

EXCHANGE = bench_script("exchange")
TINY = ("--spec", "configs/motion/tsm.yaml", "--size", "32", "--rounds", "1", "--steps", "1", "--warm-up", "2")


@needs_ranks
def test_exchanges_are_measured_and_leave_the_same_gradient() -> None:
    """Norms are of the averaged gradients, not of a rank's own. That of Horovod has tests of its own."""
    kinds = ["torch", "ddp", "ddp loop"]
    status, output = run(0, "bench/exchange.py", *TINY, "--precision", "fp32", "--json", "--kinds", *kinds)
    assert status == 0, output
    found = json.loads(lines(output)[-1])["results"]["fp32"]
    assert list(found["exchanges"]) == kinds and list(found["ratios"]) == ["torch / ddp", "torch / ddp loop"]
    norms = [rounds[0]["gradient_norm"] for rounds in found["rounds"].values()]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5) and norms[0] > 0
    for kind, measured in found["exchanges"].items():
        assert measured["bytes"] == 4 * 702_612 and measured["messages"] == 2, kind
        assert 0 < measured["waits"]["median"] < measured["step"]["median"], kind
        assert measured["peak_bytes"]["median"] > 1e8, kind
    for pair, ratios in found["ratios"].items():
        a, b = (found["rounds"][kind][0]["step"] for kind in pair.split(" / "))
        assert ratios["step"]["median"] == pytest.approx(a / b)


def test_the_exchange_before_runs_from_its_worktree(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str]] = []

    def answer(command: list[str], timeout: float, environment: dict[str, str]) -> dict[str, Any]:
        started.append((environment["PYTHONPATH"], environment["SUMMIT_TRAIN_COMM"]))
        return _measured(1.0)

    monkeypatch.setattr("sys.argv", ["exchange.py", "--rounds", "1", "--before", "/old"])
    monkeypatch.setattr(EXCHANGE, "answer", answer)
    result = EXCHANGE.measure("fp32", EXCHANGE.arguments())
    own = str(ROOT)
    assert started == [(own, "horovod"), ("/old", "horovod"), *[(own, "torch")] * 3]
    assert list(result["ratios"]) == [f"{a} / {b}" for a, b in EXCHANGE.PAIRS]


def _measured(norm: float) -> dict[str, Any]:
    return {
        "step": 1.5,
        "waits": 0.25,
        "cpu": 1.25,
        "peak_bytes": 2e9,
        "gradient_norm": norm,
        "messages": 3,
        "bytes": 8,
    }


def test_a_faster_exchange_that_leaves_another_gradient_is_no_exchange() -> None:
    EXCHANGE.check_same({"torch": [_measured(1.0)], "ddp": [_measured(1.0001)]})
    with pytest.raises(SystemExit, match=r"must leave the same gradient, got norms of .*'ddp': 1\.01"):
        EXCHANGE.check_same({"torch": [_measured(1.0)], "ddp": [_measured(1.01)]})


def test_without_a_worktree_the_exchange_before_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["exchange.py", "--rounds", "2", "--precision", "bf16"])
    monkeypatch.setattr(EXCHANGE, "on_ranks", lambda kind, precision, args: _measured(1.0))
    assert EXCHANGE.main() == 0
    said = capsys.readouterr().out
    assert re.search(r"torch / ddp loop +1\.000 \(1\.000 \.\. 1\.000\)", said) and "before" not in said
