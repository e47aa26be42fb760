"""The warning of a PyTorch that was not tested: of which, and how often."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from summit_train import __version__
from summit_train.core import tested
from summit_train.core.tested import TESTED_TORCH, untested, warn_untested
from tests.conftest import WriteSpec
from tests.worlds import Say, train

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of a user whose PyTorch was not tested."""
    monkeypatch.setattr(tested, "TESTED_TORCH", ("1.0", "1.1"))
    monkeypatch.setattr(tested, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("version", "known"),
    [("2.6.9", False), ("2.7.0", True), ("2.9.1+cu126", True), ("2.15.3", True), ("2.16.0a0+git1", False),
     ("3.0", False)],
)  # fmt: skip
def test_minor_versions_are_compared_as_numbers(version: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "TESTED_TORCH", ("2.7", "2.15"))
    text = f"torch {version} was not tested with summit_train {__version__} (tested: 2.7 to 2.15)"
    assert untested(version) == ("" if known else text)


def test_what_was_tested_is_in_the_page_and_reaches_down_to_the_requirement() -> None:
    page = (ROOT / "docs/install.md").read_text()
    table = page.partition("\n## What was tested\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\|.*torch (\d+\.\d+)\.\d", table, re.M)
    assert len(rows) >= 3 and (rows[0], rows[-1]) == TESTED_TORCH
    assert f"outside {TESTED_TORCH[0]} to {TESTED_TORCH[1]}" in table
    assert f"    torch >={TESTED_TORCH[0]}\n" in (ROOT / "setup.cfg").read_text()
    assert untested(torch.__version__) == ""


def test_evaluation_warns_once_and_beside_its_json(trained_run: Path, tmp_path: Path, cache: Path, say: Say) -> None:
    words = ["eval", trained_run / "spec.yaml", "--checkpoints", trained_run / "checkpoints/step_00000020.pt", "--json"]
    warning = f"warning: torch {torch.__version__} was not tested with summit_train {__version__} (tested: 1.0 to 1.1)"
    for known in (False, True):
        status, out, err = say(*words, f"run_dir={tmp_path}")
        assert status == 0 and json.loads(out)["checkpoints"]
        assert err == ("" if known else f"{warning}; `summit-train doctor` checks it\n")


def test_one_rank_of_a_training_warns_and_a_plan_does_not(write_spec: WriteSpec, cache: Path, say: Say) -> None:
    spec = write_spec(schedule={"epochs": 1})
    assert "was not tested" not in say("plan", spec)[2]
    cache.write_text("a file, so that each process that asks would warn")
    assert train(2, spec).count("was not tested") == 1


def test_each_environment_and_each_version_has_its_warning(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warns(version: str = "2.0") -> bool:
        warn_untested(version)
        return capsys.readouterr().err.count("\n") == 1

    assert warns() and not warns() and warns("2.1") and not warns("2.1")
    monkeypatch.setattr(sys, "prefix", "/another")
    assert warns() and not warns()
    cache.rename(cache.with_name("former"))
    cache.write_text("a file, so that no marker can be kept")
    assert warns() and warns()
