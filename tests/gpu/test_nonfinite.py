"""A run whose loss becomes NaN ends: exit status 1, and a message that names rank, step and clips."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tests.conftest import WriteSpec
from tests.gpu.processes import start
from tests.runs import steps_of
from tests.worlds import PATIENCE_S

# Four virtual GPUs: the ninth pass is the first of the third step. The plan counts on the meta device.
PROGRAM = """
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


def test_a_nan_ends_the_run_and_is_named(device: torch.device, write_spec: WriteSpec, tmp_path: Path) -> None:
    """The third step is skipped, the fourth ends the run."""
    process = start(PROGRAM, write_spec("nan", watch={"nonfinite_steps": 2}), device, tmp_path / "log")
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
