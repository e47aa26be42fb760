from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.bench.conftest import forked_ranks as forked_ranks

Script = Callable[..., dict[str, Any]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Script:
    """Runs `python papers/SCRIPT.py WORDS --json` in this process, with one thread; returns what it prints."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(module: ModuleType, *words: str) -> dict[str, Any]:
        assert module.main([*words, "--json"]) == 0
        printed: dict[str, Any] = json.loads(capsys.readouterr().out)
        return printed

    return run
