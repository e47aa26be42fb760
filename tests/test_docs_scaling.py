"""docs/scaling.md against the commands that it quotes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from summit_train.__main__ import main
from summit_train.scaling import published
from summit_train.scaling.machines import load_machine
from summit_train.spec import load_spec
from tests.worlds import bench_script

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
KINETICS = ROOT / "configs" / "kinetics"
SPECS = {
    "TSM": [str(KINETICS / "tsm_r50_8f_1536gpu.yaml")],
    "I3D33": [str(KINETICS / "i3d_3x3x3_r50_16f.yaml"), "scale.clips_per_gpu=8"],
    "I3D31": [str(KINETICS / "i3d_3x1x1_r50_32f.yaml"), "scale.clips_per_gpu=8"],
}
ROWS = re.findall(r"^\| `((?:TSM|I3D\d+) [^`]*)` \| ([\d.]+) \| (\d+) \|$", PAGE, re.M)


def test_all_rows_are_read() -> None:
    assert len(ROWS) == len(re.findall(r"^\| `", PAGE, re.M)) >= 10


@pytest.mark.parametrize(("command", "step", "efficiency"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_what_its_command_prints(
    command: str, step: str, efficiency: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command.split()
    assert main(["simulate", *SPECS[name], *options, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert (f"{row['step_s']:.3f}", f"{100 * row['efficiency']:.0f}") == (step, efficiency)


def test_table_3_beside_the_prediction() -> None:
    shown = re.findall(r"^\| (\d+)[^|]* \| [^|]* \| ([\d,]+) s \| ([+-][\d.]+) % \|", PAGE, re.M)
    errors = bench_script("fit_summit").errors_of(load_machine("summit"), load_spec(SPECS["TSM"][0]))
    found = []
    for row in published.timed_rows():
        seconds = (row.seconds or 0) * (1 + errors[row.nodes])
        found.append((str(row.nodes), f"{seconds:,.0f}", f"{100 * errors[row.nodes]:+.2f}"))
    assert shown == found
