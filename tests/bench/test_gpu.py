"""bench/gpu.sh and gpu.py on a machine without a GPU: options, what is measured, and the report of what was found."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from summit_train.__main__ import _COMMANDS
from tests.worlds import ROOT, bench_script

gpu = bench_script("gpu")


def _script(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable} | more
    return subprocess.run(["bench/gpu.sh", *words], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = _script(str(tmp_path / "out"))
    assert done.returncode == 0 and not (tmp_path / "out").exists()
    assert done.stdout == "skipped: torch sees no NVIDIA GPU; REHEARSE=1 runs the same code on the CPU\n"


def test_wrong_words_and_a_python_without_torch_end_with_status_2() -> None:
    for words, more, said in (
        ((), {}, "bench/gpu.sh OUT "),
        (("--help",), {}, "REHEARSE=1 bench/gpu.sh OUT"),
        (("x",), {"PYTHON": "/no/python"}, "/no/python cannot import torch; name a Python that can: PYTHON=..."),
    ):
        done = _script(*words, **more)
        assert done.returncode == 2 and said in done.stderr


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


def test_a_rehearsal_measures_and_says_that_it_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the training of TSM next to the 2D network, whose goal is worked out."""
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


def _trained(rate: float, seconds: float = 10.0) -> dict[str, Any]:
    spread = dict.fromkeys(("min", "median", "max"), rate)
    spec = {"name": "n", "clips_per_second": spread, "mfu": None, "shares": {"data_wait": 0.03}}
    values = {"specs": [spec], "ratios": {"step": {"median": 1.04}}}
    return {"values": values, "seconds": seconds, "error": None}


def test_advice_wants_more_than_5_percent_and_its_time_back() -> None:
    def lines(**rates: float) -> list[str]:
        results = {f"training, {name}": _trained(rate) for name, rate in rates.items()}
        return [line.split("  #")[0] for line in gpu.advice(results)]

    assert lines(fp32=100, bf16=104, fp16=103) == ["precision: fp32"]
    assert lines(fp32=100, bf16=150, fp16=157) == ["precision: bf16"]
    assert lines(fp32=100, bf16=150, fp16=160) == ["precision: fp16"]
    assert lines(bf16=150) == []  # next to what?
    for rate, seconds, pays in ((104, 60.0, "false"), (110, 60.0, "true"), (110, 9000.0, "false")):
        results = {"training, bf16": _trained(100.0), "training, compiled, bf16": _trained(rate, seconds)}
        (line,) = gpu.advice(results)
        assert line.startswith(f"execution: {{compile: {pays}}}  # ")


def test_goals_that_are_missed_are_named() -> None:
    results = {"training, bf16": _trained(100), "training, images, bf16": _trained(900)}
    results |= {"training from JPEG, bf16": _trained(90)}
    text = gpu.as_text(results, rehearsal=False)
    assert "MISSED: training, bf16: step of TSM / step of TSN: 1.040, goal <= 1.03" in text
    assert "MISSED: training, bf16: TSM's frames/s / images/s of a plain ResNet-50: 0.889, goal >= 0.97" in text
    assert "MISSED: training from JPEG, bf16: share that waits for data: 0.030, goal <= 0.02" in text
