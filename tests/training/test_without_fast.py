"""Training where models/fast cannot be imported: it runs, says so, and its losses are the same to rounding."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import WriteSpec

PROGRAM = """
import sys
if {blocked}:
    sys.modules["summit_train.models.fast"] = None  # Python then refuses the import
from summit_train.__main__ import main
sys.exit(main(["train", sys.argv[1], "run_dir=" + sys.argv[2]]))
"""


def losses(spec: Path, run_dir: Path, *, blocked: bool) -> tuple[list[float], str]:
    """The losses of all steps, and what the run printed."""
    command = [sys.executable, "-c", PROGRAM.format(blocked=blocked), str(spec), str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (run_dir / "run/metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "step"], done.stdout


def test_a_tiny_training_without_the_fast_path(write_spec: WriteSpec, tmp_path: Path) -> None:
    spec = write_spec(precision="fp64")
    plain, said = losses(spec, tmp_path / "plain", blocked=True)
    fast, said_fast = losses(spec, tmp_path / "fast", blocked=False)
    assert "network: plain: models/fast is missing" in said
    assert "network: C++ kernels" in said_fast
    assert plain == pytest.approx(fast, rel=1e-9)
