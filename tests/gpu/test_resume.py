"""A run that is killed and started again ends with the bits of one that was not, under deterministic algorithms.

torch.use_deterministic_algorithms(True, warn_only=True) names every operator that has no deterministic form. The run
dies of SIGKILL in the middle of an epoch of 10 steps and resumes from a checkpoint within it.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.conftest import WriteSpec
from tests.gpu.processes import start, steps_of
from tests.worlds import PATIENCE_S

PROGRAM = """
import sys, torch
torch.use_deterministic_algorithms(True, warn_only=True)
from tests.worlds import main_without_reports
sys.exit(main_without_reports(sys.argv[1:]))
"""
KILLED_AFTER, STEPS = 13, 20


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.stem.rpartition("_")[2]) for path in (run / "checkpoints").glob("step_*.pt"))


def flat_state(value: Any, name: str = "") -> dict[str, Any]:
    """What is in nested dictionaries and lists, by dotted names."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {place: leaf for key, inner in items for place, leaf in flat_state(inner, f"{name}.{key}").items()}
    return {name: value}


def final_state(run: Path) -> dict[str, Any]:
    """What training resumes from in the checkpoint of the last step."""
    path = run / "checkpoints" / f"step_{STEPS:08d}.pt"
    saved = torch.load(path, weights_only=True, map_location="cpu")
    kept = ("step", "model", "optimizer", "loss_scale", "ema", "noise_scale", "bad_clips", "growth")
    return flat_state({name: saved[name] for name in kept if name in saved})


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names of what is not the same to the bit; a NaN equals nothing."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
        return bool(a == b)

    names = sorted(one.keys() | other.keys())
    return [name for name in names if name not in one or name not in other or not same(one[name], other[name])]


def test_a_killed_run_resumes_to_the_bit(device: torch.device, write_spec: WriteSpec, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"checkpoint": {"every_minutes": 0.0001}, "ema": {"decay": 0.9}}
    specs = {name: write_spec(name, **sections) for name in ("whole", "killed")}
    runs = {name: tmp_path / "runs" / name for name in specs}
    begun = [start(PROGRAM, specs[name], device, tmp_path / name) for name in specs]
    try:
        ends = time.monotonic() + PATIENCE_S
        while begun[1].poll() is None and max(steps_of(runs["killed"]), default=0) < KILLED_AFTER:
            assert time.monotonic() < ends, "the run did not come to the step at which it is killed"
            time.sleep(0.005)
        os.killpg(begun[1].pid, signal.SIGKILL)
        begun[1].wait()
        saved = checkpoints(runs["killed"])
        assert saved and saved[-1] % 10 and saved[-1] < STEPS, f"killed in the middle of an epoch? checkpoints {saved}"
        begun.append(start(PROGRAM, specs["killed"], device, tmp_path / "resumed"))
        statuses = [begun[number].wait(PATIENCE_S) for number in (0, 2)]
    finally:
        for process in begun:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    logs = {name: (tmp_path / name).read_text(errors="replace") for name in ("whole", "resumed")}
    assert statuses == [0, 0], logs
    assert "resumes from" in logs["resumed"], logs["resumed"]
    nondeterministic = re.findall(r"(\S+) does not have a deterministic implementation", "".join(logs.values()))
    assert nondeterministic == [], "operators without a deterministic form"
    assert differing(final_state(runs["whole"]), final_state(runs["killed"])) == []


def test_one_bit_a_nan_and_a_missing_tensor_are_found() -> None:
    one, nan = {"w": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([float("nan")])}
    assert differing(one, {"w": torch.tensor([1 + 2**-23, 2.0])}) == ["w"]
    assert differing(nan, nan) == ["x"] and differing({"x": 1}, {}) == ["x"]
    assert differing(one, {"w": torch.tensor([1.0, 2.0])}) == []
