"""Whole runs in processes of their own: a killed one resumes to the bit, a NaN ends one and is named.

torch.use_deterministic_algorithms(True, warn_only=True) names every operator that has no deterministic form. The run
dies of SIGKILL in the middle of an epoch of 10 steps and resumes from a checkpoint within it.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import WriteSpec
from tests.gpu.devices import start
from tests.runs import assert_bit_equal, final_state, steps_of
from tests.worlds import PATIENCE_S

DETERMINISTIC = """
import sys, torch
torch.use_deterministic_algorithms(True, warn_only=True)
from tests.worlds import main_without_reports
sys.exit(main_without_reports(sys.argv[1:]))
"""
KILLED_AFTER, STEPS = 13, 20


@pytest.mark.nightly
def test_a_killed_run_resumes_to_the_bit(device: torch.device, write_spec: WriteSpec, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"checkpoint": {"every_minutes": 0.0001}, "ema": {"decay": 0.9}}
    specs = {name: write_spec(name, **sections) for name in ("whole", "killed")}
    runs = {name: tmp_path / "runs" / name for name in specs}
    begun = [start(DETERMINISTIC, specs[name], device, tmp_path / name) for name in specs]
    try:
        ends = time.monotonic() + PATIENCE_S
        while begun[1].poll() is None and max(steps_of(runs["killed"]), default=0) < KILLED_AFTER:
            assert time.monotonic() < ends, "the run did not come to the step at which it is killed"
            time.sleep(0.005)
        os.killpg(begun[1].pid, signal.SIGKILL)
        begun[1].wait()
        saved = sorted(int(path.stem[5:]) for path in (runs["killed"] / "checkpoints").glob("step_*.pt"))
        assert saved and saved[-1] % 10 and saved[-1] < STEPS, f"killed in the middle of an epoch? checkpoints {saved}"
        begun.append(start(DETERMINISTIC, specs["killed"], device, tmp_path / "resumed"))
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
    assert_bit_equal(final_state(runs["whole"]), final_state(runs["killed"]))


# Four virtual GPUs: the ninth pass is the first of the third step. The plan counts on the meta device.
BREAKS = """
import sys
from summit_train.__main__ import main
from summit_train.models import VideoNetwork
honest, calls = VideoNetwork.forward, 0
def forward(self, clips):
    global calls
    calls += not clips.is_meta
    logits = honest(self, clips)
    return logits * float("nan") if calls > 8 else logits
VideoNetwork.forward = forward
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.nightly
def test_a_nan_ends_the_run_and_is_named(device: torch.device, write_spec: WriteSpec, tmp_path: Path) -> None:
    """The third step is skipped, the fourth ends the run."""
    process = start(BREAKS, write_spec("nan", watch={"nonfinite_steps": 2}), device, tmp_path / "log")
    try:
        status = process.wait(PATIENCE_S)
    finally:
        process.kill()
    log = (tmp_path / "log").read_text(encoding="utf-8", errors="replace")
    assert status == 1, log
    message = next((line for line in log.splitlines() if "2 steps in a row" in line), log)
    assert re.search(r"rank 0 on \S+:", message), message
    assert "step 3," in message and "step 4," in message, message
    assert message.count("train_") == 16, f"clips are missing: {message}"
    assert steps_of(tmp_path / "runs" / "nan")[-1:] <= [4], "a step followed"
