"""`summit-train plan` counts the time of validations and of the final evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import WriteSpec
from tests.worlds import main_said


def test_plan_says_how_long_the_evaluation_takes(write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]) -> None:
    """Two validations of 41 videos, and one checkpoint with 10 clips of each; unknown where no manifest is read."""
    spec: Path = write_spec(evaluate={"every_epochs": 1, "clips": 10}, scale={"gpus": 6})

    def plan(*words: str) -> dict[str, object]:
        status, out, err = main_said(capsys, "plan", spec, "--speed", "0.1", *words)
        assert (status, err) == (0, "")
        found: dict[str, object] = json.loads(out)
        return found

    hours = 41 * (2 + 10) / 6 / 0.1 / 3_600
    assert plan("--json")["evaluation_hours"] == pytest.approx(hours)
    site = plan("--json", "--site", "summit", "--nodes", "1")["site"]
    assert isinstance(site, dict) and site["evaluation_hours"] == pytest.approx(hours)
    assert plan("--json", "--clips", "960")["evaluation_hours"] is None
    assert f"rank-hours, and {hours:.2f} h of evaluation" in main_said(capsys, "plan", spec, "--speed", "0.1")[1]
