"""papers/veth.py, two network namespaces: it says why it cannot, and leaves nothing behind. Its times are no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds import bench_script

VETH = bench_script("veth")


def test_where_it_cannot_run_it_says_why_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["veth.py", "model", "--json"])
    monkeypatch.setenv("PATH", str(tmp_path))
    for user, why in (
        (1000, "network namespaces need root"),
        (0, "ip is not on PATH; apt-get install iproute2 util-linux"),
    ):
        monkeypatch.setattr("os.geteuid", lambda user=user: user)
        assert VETH.main() == 0
        assert json.loads(capsys.readouterr().out) == {"skipped": why}


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


def test_an_epochs_seconds_are_those_of_its_steps(tmp_path: Path) -> None:
    records = [
        {"kind": "step", "epoch": 0, "step_s": 1.0},
        {"kind": "step", "epoch": 1, "step_s": 0.25},
        {"kind": "step", "epoch": 1, "step_s": 0.5},
        {"kind": "average", "epoch": 1, "seconds": 0.125},  # within the last step
        {"kind": "eval", "epoch": 2, "top1": 25.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert VETH.seconds_of_epochs(tmp_path) == [1.0, 0.75]


def test_start_and_end_of_a_run_are_no_part_of_an_epochs_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Three epochs of 100 bytes and 7 s here, 5 s without a limit; each run sends 40 bytes more."""

    def trained(names: object, method: str, mbit: int, epochs: int, folder: Path) -> tuple[list[float], int]:
        return [7.0 if mbit else 5.0] * max(1, epochs - 1), 40 + 100 * epochs

    monkeypatch.setattr(VETH, "trained", trained)
    assert VETH.averaging_row(("a", "b"), 100, "synchronous", tmp_path) == {
        "mbit": 100,
        "method": "synchronous",
        "bytes_per_epoch": 100.0,
        "epoch_s": 7.0,
        "unlimited_epoch_s": 5.0,
        "communication_s": 2.0,
    }
