from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from summit_train.__main__ import main
from summit_train.bench import weak
from tests.networks import counted
from tests.worlds import forked

Bench = Callable[..., dict[str, Any]]
SHORT = ("--repeats", "2", "--steps", "1", "--warm-up", "1")
TINY = counted("tsm", "resnet18", frames=4, crop=32, width=0.125, classes=4)  # what write_spec writes


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs `summit-train bench WORDS --json` with one thread; returns what it prints."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*words: str) -> dict[str, Any]:
        assert main(["bench", *words, "--json"]) == 0
        printed: dict[str, Any] = json.loads(capsys.readouterr().out)
        return printed

    return run


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench scaling` forks its ranks in the place of mpirun, as importing torch takes longer than the steps."""

    def answer(command: list[str], timeout: float, environment: dict[str, str]) -> Any:
        ranks = int(command[command.index("-np") + 1]) if "-np" in command else 0
        status, output = forked(ranks, partial(main, command[command.index("summit_train") + 1 :]))
        assert status == 0 and environment["OMP_NUM_THREADS"] == "1", output
        return json.loads(next(line for line in output.splitlines() if line.startswith("{")))

    monkeypatch.setattr(weak, "answer", answer)
    monkeypatch.setattr(weak, "find_mpirun", lambda: "mpirun")
