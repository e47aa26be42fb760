"""bench/gpu/resume.py and nonfinite.py: what they read from runs, and that other runs than right ones fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from summit_train.spec import load_spec
from summit_train.spec.source import shipped
from tests.worlds import bench_script

outcome = bench_script("gpu/outcome")
runs = bench_script("gpu/runs")
resume = bench_script("gpu/resume")
nonfinite = bench_script("gpu/nonfinite")

CPU = torch.device("cpu")
# What a run says that ends as it should.
SAID = """
clips = lambda: ", ".join(f"videos/train_{i:06d}.mp4" for i in range(8))
print("summit-train: 2 steps in a row had a loss or gradient that is not finite. rank 0 on node7: "
      f"step 3, loss nan, clips {clips()}; step 4, loss nan, clips {clips()}")
raise SystemExit(1)
"""


def write_run(folder: Path, *, weight: float = 1.0, step: int = 60) -> Path:
    """A run directory with a last checkpoint."""
    (folder / "checkpoints").mkdir(parents=True)
    state = {
        "step": step,
        "model": {"w": torch.tensor([weight, 2.0]), "running_mean": torch.zeros(3)},
        "optimizer": {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]},
        "spec": {"name": folder.name},
    }
    torch.save(state, folder / "checkpoints" / f"step_{step:08d}.pt")
    return folder


def failed(found: Any) -> list[str]:
    return [check.name for check in found.checks if not check.passes]


def test_equal_checkpoints_pass_and_one_bit_fails(tmp_path: Path) -> None:
    one, same, other = (write_run(tmp_path / n, weight=w) for n, w in (("a", 1.0), ("b", 1.0), ("c", 1.0 + 2**-23)))
    result = outcome.Outcome()
    resume.same(one, same, "", result)
    assert failed(result) == [] and result.checks[-1].note.startswith("5 tensors and numbers")
    result = outcome.Outcome()
    resume.same(one, other, "", result)
    assert failed(result) == ["the killed and resumed run ends with the bits of the undisturbed one"]
    assert "model.w" in result.checks[-1].note


def test_a_run_that_did_not_end_fails_and_an_operator_is_named(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "a"), write_run(tmp_path / "b", step=55)
    result = outcome.Outcome()
    resume.same(one, other, "Warning: max_pool3d_backward does not have a deterministic implementation, but", result)
    assert failed(result) == ["every operator has a deterministic form", "both runs came to step 60"]
    assert result.values["without_a_deterministic_form"] == ["max_pool3d_backward"]


def test_a_nan_and_a_missing_tensor_differ() -> None:
    nan = {"x": torch.tensor([float("nan")])}
    assert runs.differing(nan, nan) == ["x"]
    assert runs.differing({"x": 1}, {}) == ["x"]


def test_the_shrunk_spec_is_valid(tmp_path: Path) -> None:
    path, *overrides = runs.words(tmp_path, "whole", *resume.OVERRIDES)
    spec = load_spec(path, overrides)
    assert Path(path) == shipped("configs/motion") / "tsm.yaml"
    assert (spec.scale.gpus, spec.scale.clips_per_gpu, spec.schedule.epochs) == (4, 2, 6)
    assert 80 // (4 * 2) * spec.schedule.epochs == resume.STEPS


@pytest.mark.parametrize(
    ("program", "fails"),
    [
        (SAID, []),
        ("raise SystemExit(0)", ["exit status is 1", "steps in a row", "the rank", "the steps", "the clips"]),
        (SAID.replace("rank 0", "someone"), ["the rank"]),
        (SAID.replace("SystemExit(1)", "SystemExit(2)"), ["exit status is 1"]),
    ],
)
def test_what_a_run_must_say(program: str, fails: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite, "PROGRAM", program)
    result = outcome.Outcome()
    nonfinite.check(tmp_path, "nan", CPU, 60, result)
    found = failed(result)
    assert len(found) == len(fails) and all(part in name for part, name in zip(fails, found, strict=True))


def test_a_run_that_does_not_end_is_killed(tmp_path: Path) -> None:
    process = runs.start("import time; time.sleep(100)", [], CPU, tmp_path / "log")
    assert runs.ended(process, 0.1) is None and process.poll() is not None
