"""docs/scaling.md and docs/large_batches.md: tables and figures are what the program works out."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from summit_train.__main__ import main
from summit_train.core.text import duration
from summit_train.plan import make_plan
from summit_train.scaling.machines import load_machine
from summit_train.spec import load_spec
from summit_train.spec.keys import OptimizerSpec, TrustRatioSpec
from tests.worlds import bench_script

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
KINETICS = ROOT / "configs" / "kinetics"
SPECS = {"TSM": [str(KINETICS / "tsm_r50_8f_1536gpu.yaml")]}
ROWS = re.findall(r"^\| `(TSM [^`]*)` \| ([\d.]+) \| (\d+) \|$", PAGE, re.M)
BATCHES = (ROOT / "docs/large_batches.md").read_text(encoding="utf-8")
PRESETS = re.findall(r"^\|([\d,]+)\|([\d,]+)\|([\d,]+)\|(\w+)\|([\d.]+)\|(\d+)\|([\d.]+)\|$", BATCHES, re.M)
SUFFIX = {"linear": "", "date": "_date", "lars": "_lars"}


def test_all_rows_are_read() -> None:
    assert len(ROWS) == len(re.findall(r"^\| `", PAGE, re.M)) >= 4


@pytest.mark.parametrize(("command", "step", "efficiency"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_what_its_command_prints(
    command: str, step: str, efficiency: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command.split()
    assert main(["simulate", *SPECS[name], *options, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert (f"{row['step_s']:.3f}", f"{100 * row['efficiency']:.0f}") == (step, efficiency)


def test_what_failures_cost_the_papers_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for words in ([], ["checkpoint.background=true"]):
        assert main(["simulate", *SPECS["TSM"], "--machine", "summit", "--nodes", "256", "--json", *words]) == 0
        row = json.loads(capsys.readouterr().out)["rows"][0]
        found.append(row["losses"])
    prose = " ".join(PAGE.split())
    epoch, every_epoch, stall, daly, best = re.findall(
        r"Saving every epoch, ([\d.]+) s, leaves a goodput of ([\d.]+) %: the steps wait ([\d.]+) s for each "
        r"checkpoint. Daly's interval is ([^,]+), with ([\d.]+) %",
        prose,
    )[0]
    (beside,) = re.findall(r"saving every epoch leaves ([\d.]+) %", prose)
    one = found[0]
    assert (epoch, stall, daly) == (f"{one['own_interval_s']:.1f}", f"{one['stall_s']:.2f}", duration(one["daly_s"]))
    shares = (one["own_goodput"], one["goodput"], found[1]["own_goodput"])
    assert (every_epoch, best, beside) == tuple(f"{100 * share:.1f}" for share in shares)


def test_table_3_beside_the_prediction() -> None:
    shown = re.findall(r"^\|(\d+)[^|]*\|[^|]*\|([\d,]+) s\|([+-][\d.]+) %\|", PAGE, re.M)
    errors = bench_script("fit_summit").errors_of(load_machine("summit"))
    found = []
    for row in bench_script("published").TIMED_ROWS:
        seconds = (row.seconds or 0) * (1 + errors[row.nodes])
        found.append((str(row.nodes), f"{seconds:,.0f}", f"{100 * errors[row.nodes]:+.2f}"))
    assert shown == found


def test_the_table_has_three_sizes_of_each_preset() -> None:
    assert [(row[0], row[3]) for row in PRESETS] == [(n, p) for n in ("1,536", "3,072", "6,144") for p in SUFFIX]


@pytest.mark.parametrize("row", PRESETS, ids=lambda row: f"{row[0]}-{row[3]}")
def test_the_kinetics_run_under_each_preset(row: tuple[str, ...]) -> None:
    gpus, batch, steps = (int(cell.replace(",", "")) for cell in row[:3])
    spec = load_spec(ROOT / f"configs/kinetics/tsm_r50_8f_1536gpu{SUFFIX[row[3]]}.yaml", [f"scale.gpus={gpus}"])
    plan = make_plan(spec, gpus, 240_000)
    assert (plan.global_batch, plan.total_steps, plan.warmup_steps) == (batch, steps, int(row[5]))
    assert f"{plan.peak_lr:.4g}" == row[4]
    assert f"{plan.warmup_steps / plan.steps_per_epoch:.3g}" == row[6]


def test_the_constants_are_the_defaults() -> None:
    trust = TrustRatioSpec(kind="bounded")
    assert f"within [{trust.lower:g}, {trust.upper:g}]" in BATCHES and f"times {trust.coefficient:g} norm(w)" in BATCHES
    rows = re.findall(r"^\|`(\w+)`\|.*\|(.*)\|$", BATCHES, re.M)
    assert len(rows) == 6
    for name, cells in rows:
        spec = OptimizerSpec.model_validate({"name": name})
        for key, values in re.findall(r"`(\w+)` ([\d.e, -]*\d)", cells):
            default = getattr(spec, key)
            found = [float(value) for value in values.split(", ")]
            assert found == (list(default) if isinstance(default, tuple) else [default]), (name, key)


def test_the_example_of_averaging_is_planned_as_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```yaml\n(extends: .*?)^```", BATCHES, re.M | re.S)
    (shown,) = re.findall(r"^  averaging .*\n  growing batch .*\n", BATCHES, re.M)
    (tmp_path / "averaged.yaml").write_text(example)
    assert main(["plan", str(tmp_path / "averaged.yaml"), "--clips", "9537"]) == 0
    assert shown in capsys.readouterr().out


def test_what_averaging_gains_on_a_slow_network(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall(r"^summit-train (simulate .*\\\n.*)$", BATCHES, re.M)
    *words, averaging = shlex.split(command.replace("\\\n", ""))
    found = []
    for keys in ([], [averaging, "parallel.period=4"], [averaging]):
        assert main([*words, *keys, "--json"]) == 0
        row = json.loads(capsys.readouterr().out)["rows"][-1]
        found.append(f"{100 * row['efficiency']:.1f}")
    shown = re.findall(
        r"([\d.]+) % for synchronous training, ([\d.]+) % with period 4, and ([\d.]+) % once an epoch",
        " ".join(BATCHES.split()),
    )
    assert shown == [tuple(found)]
