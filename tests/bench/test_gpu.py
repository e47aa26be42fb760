"""bench/gpu.sh and gpu.py on a machine without a GPU: options, what is measured, and the report of what was found."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from summit_train.__main__ import _COMMANDS, main
from tests.worlds import ROOT, bench_script

gpu = bench_script("gpu")


@pytest.mark.parametrize(
    ("words", "python", "status", "said"),
    [
        pytest.param(
            ("OUT",), sys.executable, 0,
            "skipped: torch sees no NVIDIA GPU; REHEARSE=1 runs the same code on the CPU\n",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here"),
        ),
        ((), sys.executable, 2, "bench/gpu.sh OUT "),
        (("--help",), sys.executable, 2, "REHEARSE=1 bench/gpu.sh OUT"),
        (("OUT",), "/no/python", 2, "/no/python cannot import torch; name a Python that can: PYTHON=..."),
    ],
)  # fmt: skip
def test_the_script_says_why_it_measures_nothing(
    words: tuple[str, ...], python: str, status: int, said: str, tmp_path: Path
) -> None:
    words = tuple(str(tmp_path / "out") if word == "OUT" else word for word in words)
    environment = os.environ | {"PYTHON": python}
    done = subprocess.run(["bench/gpu.sh", *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == status and said in (done.stderr if status else done.stdout)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("small", [False, True])
def test_every_command_is_one_that_the_product_takes(small: bool, tmp_path: Path) -> None:
    for name, line in gpu.commands(tmp_path, tmp_path, small=small).items():
        words = [word for word in shlex.split(line) if not word.startswith("NVIDIA_")]
        if words[0].endswith(".py"):
            assert (ROOT / words[0]).is_file()
            continue
        parser = argparse.ArgumentParser()
        importlib.import_module(f"summit_train.{_COMMANDS[words[0]][0]}").add_arguments(parser)
        _, left = parser.parse_known_args(words[1:])
        assert all("=" in word and not word.startswith("-") for word in left), f"{name}: {line}"


def test_a_rehearsal_measures_and_says_that_it_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the training of TSM next to the 2D network, in this process, whose goal is worked out."""

    honest = subprocess.run

    def run(command: list[str], **how: Any) -> Any:
        if command[:3] != [sys.executable, "-m", "summit_train"]:
            return honest(command, **how)
        with redirect_stdout(StringIO()) as out:
            status = main(command[3:])
        return subprocess.CompletedProcess(command, status, out.getvalue(), "")

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(gpu.subprocess, "run", run)
    assert gpu.main([str(tmp_path), "--small", "--seconds", "500", "--only", "training, bf16"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("REHEARSAL on a CPU with tiny networks")
    assert (tmp_path / "gpu.md").read_text() == printed
    results = json.loads((tmp_path / "gpu.json").read_text())["commands"]
    assert all(result["error"] is None for result in results.values()), printed
    assert [row["network"] for row in gpu.rows_of(results)] == ["tsm_r50_8f", "tsn_r50_8f"]
    assert [goal[0] for goal in gpu.goals_of(results)] == ["training, bf16: step of TSM / step of TSN"]


@pytest.mark.parametrize(
    ("program", "limit", "said"),
    [
        ("print('{\"a\": 1}')", 60.0, None),
        ("raise SystemExit('no such spec')", 60.0, "exit status 1: no such spec"),
        ("import time; time.sleep(100)", 1.0, "stopped after 1 s, its limit"),
        ("", 0.5, "no time was left"),
    ],
)
def test_how_a_command_ends(program: str, limit: float, said: str | None, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    result = gpu.result_of(f"X=1 {tmp_path}/program.py", limit)
    assert result["error"] == said
    assert result["values"] == ({"a": 1} if said is None else None)


def test_goals_that_are_missed_are_named() -> None:
    def trained(rate: float) -> dict[str, Any]:
        spread = dict.fromkeys(("min", "median", "max"), rate)
        spec = {"name": "n", "clips_per_second": spread, "mfu": None, "shares": {"data_wait": 0.03}}
        return {"values": {"specs": [spec], "ratios": {"step": {"median": 1.04}}}, "error": None}

    results = {"training, bf16": trained(100), "training, images, bf16": trained(900)}
    results |= {"training from JPEG, bf16": trained(90)}
    results |= {"kernels, bf16": {"values": {"busy_s": 0.96, "step_s": 1.0}, "error": None}}
    text = gpu.as_text(results, rehearsal=False)
    assert "MISSED: training, bf16: step of TSM / step of TSN: 1.040, goal <= 1.03" in text
    assert "MISSED: training, bf16: TSM's frames/s / images/s of a plain ResNet-50: 0.889, goal >= 0.97" in text
    assert "MISSED: training from JPEG, bf16: share that waits for data: 0.030, goal <= 0.02" in text
    assert "met: share of a step in which the GPU is busy: 0.960, goal >= 0.95" in text
