"""Training where models/fast cannot be imported: it runs, says so, and its losses are the same to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import WriteSpec
from tests.runs import records
from tests.worlds import run, train

PROGRAM = """
import sys
sys.modules["summit_train.models.fast"] = None  # Python then refuses the import
from tests.worlds import main_without_reports
sys.exit(main_without_reports(["train", *sys.argv[1:]]))
"""


def test_a_tiny_training_without_the_fast_path(write_spec: WriteSpec, tmp_path: Path) -> None:
    spec = write_spec("fast", precision="fp64", schedule={"epochs": 1})
    status, said = run(0, "-c", PROGRAM, str(spec), "name=plain")
    assert status == 0 and "network: plain: models/fast is missing" in said, said
    assert "network: C++ kernels" in train(0, spec)
    plain, fast = ([step["loss"] for step in records(tmp_path / "runs" / name, "step")] for name in ("plain", "fast"))
    assert len(fast) == 10 and plain == pytest.approx(fast, rel=1e-9)
