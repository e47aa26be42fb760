from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from summit_train.__main__ import main
from tests.networks import counted

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
