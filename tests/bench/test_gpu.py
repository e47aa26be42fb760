"""bench/gpu.sh on a machine without a GPU: what it skips, how it runs parts, what it says of them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worlds import PATIENCE_S, ROOT, bench_script

# In the order in which they import each other.
outcome, parts, runner, _, _, summary, suite, feed, ranks, bench = (
    bench_script(f"gpu/{name}")
    for name in ("outcome", "parts", "runner", "figures", "verdict", "summary", "suite", "feed", "ranks", "run")
)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
CPU = torch.device("cpu")


def _bench(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable} | more
    return subprocess.run(["bench/gpu.sh", *words], cwd=ROOT, env=environment, capture_output=True, text=True)


# --- outcome


@pytest.mark.parametrize(
    ("value", "bound", "at_least", "passes"),
    [
        (1.0, 1.0, False, True),
        (1.1, 1.0, False, False),
        (1.0, 1.0, True, True),
        (0.9, 1.0, True, False),
        (float("nan"), 1.0, False, False),
        (float("nan"), 1.0, True, False),
    ],
)
def test_a_check_keeps_to_its_bound_and_a_nan_never_does(
    value: float, bound: float, at_least: bool, passes: bool
) -> None:
    assert outcome.Check("x", value, bound, at_least=at_least).passes is passes


def test_a_part_fails_by_a_check_but_not_by_a_goal(capsys: pytest.CaptureFixture[str]) -> None:
    found = outcome.Outcome()
    found.add(outcome.Check("speed", 2.0, 1.0, wanted=True, note="slow"))
    assert found.passes
    found.add(outcome.fact("the sky is up", False))
    assert not found.passes
    said = capsys.readouterr().err.splitlines()
    assert said == ["MISSED: speed: 2 (wanted <= 1); slow", "FAILED: the sky is up: 0 (wanted >= 1)"]


def test_a_part_that_raises_has_written_what_it_knew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def part(args: object, device: torch.device, found: Any) -> None:
        assert device == CPU
        found.add(outcome.Check("nothing", float("nan"), 1.0))
        found.values["rows"] = [1, 2]
        raise KeyError("a bug")

    monkeypatch.setattr(sys, "argv", ["part.py", "--out", str(tmp_path / "x.json"), "--device", "cpu"])
    with pytest.raises(KeyError, match="a bug"):
        outcome.run_part("", part)
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["rows"] == [1, 2] and written["checks"][0]["value"] is None


# --- parts and runner


def test_every_part_is_a_program_and_every_program_a_part() -> None:
    names = [part.name for part in parts.PARTS]
    assert len(set(names)) == len(names)
    programs = {path.stem for path in parts.HERE.glob("*.py") if "run_part(" in path.read_text()} - {"outcome"}
    assert set(names) == programs
    assert {part.group for part in parts.PARTS} == set(parts.GROUPS)
    for part in parts.PARTS:
        assert part.plans == ('"--seconds"' in (parts.HERE / f"{part.name}.py").read_text()), part.name


def test_a_part_that_plans_is_told_of_less_time_than_it_has(tmp_path: Path) -> None:
    part = parts.Part("speed", "fast", "speed", 100)
    assert part.command(tmp_path, False, 60)[-2:] == ["--seconds", "45"]
    assert part.command(tmp_path, True)[-5:] == ["--seconds", "75", "--device", "cpu", "--small"]


def _part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, limit_s: float = 60) -> Any:
    """A part of the given program, which finds its --out in sys.argv[2]."""
    (tmp_path / "part.py").write_text(program)
    monkeypatch.setattr(parts, "HERE", tmp_path)
    return runner.run(parts.Part("part", "right", "a part", limit_s, plans=False), tmp_path, rehearse=False, left_s=60)


_WRITE = "import json, sys; json.dump({'checks': [%s]}, open(sys.argv[2], 'w'));"
_CHECK = "{'name': 'x', 'passes': %s, 'wanted': %s}"


@pytest.mark.parametrize(
    ("program", "passes", "said"),
    [
        (_WRITE % (_CHECK % (True, False)), True, "1 checks pass"),
        (_WRITE % (_CHECK % (False, True)), True, "1 checks pass"),
        (_WRITE % (_CHECK % (False, False)) + "sys.exit(1)", False, "FAILED: x"),
        (
            _WRITE % "" + "raise ValueError('no such thing')",
            False,
            "FAILED with exit status 1: ValueError: no such thing",
        ),
        ("print('nothing written')", False, "FAILED with exit status 0: nothing written"),
        ("import os; os.kill(os.getpid(), 11)", False, "FAILED with exit status -11: it printed nothing"),
    ],
)
def test_how_a_part_ends(
    program: str, passes: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = _part(tmp_path, monkeypatch, program)
    assert ended.passes is passes
    assert ended.as_text().startswith(said + " (")


def test_a_part_is_stopped_at_its_limit_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    program = f"""
import subprocess, sys, time
process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
open({str(child)!r}, "w").write(str(process.pid))
time.sleep(100)
"""
    ended = _part(tmp_path, monkeypatch, program, limit_s=5)
    assert not ended.passes and ended.problem == "STOPPED after 5 s, its limit; see part.log"
    stat = Path(f"/proc/{child.read_text()}/stat")
    deadline = time.monotonic() + PATIENCE_S
    while stat.exists() and stat.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_a_part_for_which_no_time_is_left_is_named(tmp_path: Path) -> None:
    ended = runner.run(parts.PARTS[0], tmp_path, rehearse=True, left_s=4)
    assert not ended.passes and ended.problem == "left out: the time of all parts is over"


def test_what_is_missing_goes_by_the_package_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner.missing_packages() == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in {"yaml", "av"} else object())
    assert runner.missing_packages() == ["av", "pyyaml"]


# --- the command


@no_gpu
def test_without_a_gpu_every_part_is_skipped_with_the_reason(tmp_path: Path) -> None:
    done = _bench(str(tmp_path / "out"))
    said = done.stdout.splitlines()
    assert done.returncode == 0 and len(said) == len(parts.PARTS)
    for part, line in zip(parts.PARTS, said, strict=True):
        assert line.startswith(f"skipped: {part.name} ({part.about}): torch")
    assert not (tmp_path / "out").exists()


def test_a_dry_run_shows_each_parts_command(tmp_path: Path) -> None:
    done = _bench(str(tmp_path), "--dry-run", "--only", "suite", "ranks")
    assert done.returncode == 0
    first, command, *_ = done.stdout.splitlines()
    assert first == "suite (right, at most 90 s): the tests marked gpu, none skipped"
    assert command == f"  {sys.executable} {ROOT}/bench/gpu/suite.py --out {tmp_path}/suite.json"


@pytest.mark.parametrize(
    ("words", "more", "said"),
    [
        ((), {}, "the following arguments are required: OUT"),
        (("x", "--only", "lunch"), {}, "invalid choice: 'lunch'"),
        (("x", "--wheels"), {}, "--wheels needs a folder"),
        (("x", "--wheels", "/nowhere"), {}, "there are no wheels in /nowhere"),
        (("x",), {"PYTHON": "/no/python"}, "there is no /no/python; name a Python that has torch"),
    ],
)
def test_wrong_options(words: tuple[str, ...], more: dict[str, str], said: str) -> None:
    done = _bench(*words, **more)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]


def test_the_figures_of_a_rehearsal_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = bench.main([str(tmp_path), "--rehearse", "--only", "ranks"])
    said = capsys.readouterr().out
    assert status == 0, said
    assert said.startswith("REHEARSAL on a CPU with tiny networks")
    assert "all 1 parts pass" in said and "ranks: left out: Horovod:" in said
    values = json.loads((tmp_path / "gpu.json").read_text())
    assert values["passes"] and values["environment"]["rehearsal"]
    assert [part["name"] for part in values["parts"]] == ["ranks"] and len(values["parts"][0]["checks"]) == 4
    assert (tmp_path / "gpu.md").read_text() == said


# --- summary


def test_the_table_names_what_failed_and_what_was_missed() -> None:
    def check(name: str, **more: Any) -> dict[str, Any]:
        return outcome.Check(name, 2.0, 1.0, **more).as_json()

    def ended(name: str, checks: list[dict[str, Any]], problem: str | None = None) -> Any:
        values = {"checks": checks, "skipped": {"graphs": "no memory"}} if checks else {}
        return runner.Ended(parts.Part(name, "right", f"about {name}", 60), 3.0, problem, values)

    rows = [ended("good", [check("goal", wanted=True)]), ended("bad", [check("law")]), ended("dead", [], "STOPPED")]
    values = summary.values_of(rows, {"device": "a GPU", "torch": "2", "cuda": "13", "rehearsal": False})
    said = summary.show(values).splitlines()
    assert not values["passes"] and said[0] == "a GPU, torch 2, CUDA 13"
    assert said[-7:] == [
        "good: wanted, missed: goal: 2, not <= 1",
        "good: left out: graphs: no memory",
        "bad: FAILED: law: 2, not <= 1",
        "bad: left out: graphs: no memory",
        "dead: STOPPED (3 s)",
        "",
        "FAILED: bad, dead",
    ]


# --- suite, feed, ranks


def test_the_suite_finds_the_gpu_tests_and_reads_their_results(tmp_path: Path) -> None:
    files = [path.relative_to(ROOT / "tests").as_posix() for path in suite.gpu_files(ROOT / "tests")]
    assert {"models/test_shift.py", "training/test_step.py"} <= set(files)
    xml = tmp_path / "tests.xml"
    xml.write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1"><testcase classname="a" name="b"/>'
        '<testcase classname="a" name="c"><failure message="1 != 2"/></testcase>'
        '<testcase classname="a" name="d"><skipped message="no GPU"/></testcase></testsuite></testsuites>'
    )
    counts, words = suite.read_results(xml)
    assert counts == {"tests": 3, "failures": 1, "errors": 0, "skipped": 1}
    assert words == ["a::c: failure: 1 != 2", "a::d: skipped: no GPU"]
    found = outcome.Outcome()
    suite.judge(counts | {"failures": 0}, torch.device("cuda"), found)
    assert [check.passes for check in found.checks] == [True, True, False]


def test_a_step_that_waits_for_data_is_reported_and_fails_nothing() -> None:
    found = outcome.Outcome()
    found.values["fed"] = [{"kind": "raw", "workers": 3, "data_wait_share": share} for share in (0.02, 0.03)]
    feed.report_waits(found)
    assert [check.passes for check in found.checks] == [True, False] and found.passes


def test_ranks_that_differ_are_found() -> None:
    state = {"weight": torch.ones(3, dtype=torch.float64), "loss": torch.tensor(1.0)}
    other = state | {"weight": torch.tensor([1, 1, 1 + 1e-9], dtype=torch.float64)}
    for states, alone, passes in (
        ([state, state], state, [True, True]),
        ([state, other], state, [False, True]),
        ([state, state], other, [True, False]),
    ):
        found = outcome.Outcome()
        ranks.compare("synchronous", alone, states, found)
        assert [check.passes for check in found.checks] == passes
