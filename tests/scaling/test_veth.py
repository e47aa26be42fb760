"""The bench on two network namespaces: it says why it cannot, and leaves nothing behind. Its times are no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds import bench_script

VETH = bench_script("veth")


def test_without_root_it_says_so_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["veth.py", "--json"])
    assert VETH.main() == 0
    assert json.loads(capsys.readouterr().out) == {"skipped": "network namespaces need root"}


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert VETH.why_not() == "there is no ip on PATH; apt-get install iproute2 util-linux"


@pytest.mark.skipif(VETH.why_not() is not None, reason=str(VETH.why_not()))
def test_the_cable_has_the_rate_and_is_gone_at_the_end() -> None:
    def shown(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with VETH.namespaces() as names:
        VETH.limit(names, 50)
        for name in names:
            assert "rate 50Mbit" in shown("ip", "netns", "exec", name, "tc", "qdisc", "show", "dev", "veth0")
        VETH.limit(names, 0)
        assert "tbf" not in shown("ip", "netns", "exec", names[0], "tc", "qdisc", "show", "dev", "veth0")
    assert not set(names) & set(shown("ip", "netns", "list").split())
