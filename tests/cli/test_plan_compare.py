"""`summit-train plan --compare`: two plans beside each other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from summit_train.__main__ import main
from tests.conftest import WriteSpec

DATE = {"warmup_epochs": 0.5, "warmup_scaling": "linear", "decay": "linear"}


@pytest.fixture
def specs(write_spec: WriteSpec) -> list[str]:
    """Ten steps an epoch for two epochs, cosine; and for three epochs from a base batch of half the size, linear."""
    optimizer = {"base_lr": 0.01, "base_batch": 4, "lr_scaling": "sqrt"}
    long = write_spec("long", schedule={"epochs": 3, **DATE}, optimizer=optimizer)
    return [str(write_spec("short")), str(long)]


def test_the_other_spec_stands_in_a_second_column(specs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = specs
    assert main(["plan", first, "--compare", second]) == 0
    rows = [re.split(r"\s*│\s*", line.strip(" │")) for line in capsys.readouterr().out.splitlines() if "│" in line]
    by_name = {row[0]: row[1:] for row in rows}
    assert by_name["steps"] == ["20 = 2 epochs x 10", "30 = 3 epochs x 10"]
    # 80 clips: half an epoch of 20 updates of 4 clips are 10 updates, one epoch of the global batch of 8.
    assert by_name["warm-up"] == ["10 steps = 1 epochs, linear", "10 steps = 1 epochs, linear"]
    assert by_name["decay"] == ["cosine", "linear"]
    assert by_name["0.90"] == ["0.005", "####", "0.0141421", "############"]  # the peaks, drawn to one scale
    assert by_name["2.90"][0] == "—"  # the run of two epochs is over
    assert by_name["2.90"][2] == "1e-06"


def test_json_has_both_plans_and_overrides_hold_for_both(
    specs: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, second = specs
    assert main(["plan", first, "--compare", second, "--json", "scale.gpus=2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    other = plan["compare"]
    assert (plan["global_batch"], other["name"], other["global_batch"]) == (4, "long", 4)
    assert other["peak_lr"] == 0.01 and other["decay"] == "linear" and plan["decay"] == "cosine"
    assert other["learning_rates"][-1] == {"step": 59, "lr": 1e-6}


def test_a_mistake_in_the_other_spec_is_one_line(specs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", specs[0], "--compare", "gone.yaml"]) == 2
    assert "gone.yaml: cannot be read" in capsys.readouterr().err
