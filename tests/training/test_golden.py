"""The losses of a tiny run, step by step, as they were when the file was written: a refactor must not move them.

A change that is meant to move them writes the file anew:
    python -m tests.training.test_golden
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch

from summit_train.core.comm import World
from summit_train.data.motion import MotionSet, write_motion_set
from summit_train.models.network import initial_network
from summit_train.spec import spec_from_values
from summit_train.training.run import Run, read_inputs

CPU = torch.device("cpu")

# In double. The narrow I3D at this LR multiplies a rounding error by ten at each step: 1e-16 becomes 1e-6 after twelve,
# whatever the order of its sums. The 2D networks do not.
TOLERANCE = {"tsn": 1e-12, "tsm": 1e-12, "i3d_3x3x3": 2e-6}
# Where torch has no AVX2, its random normal numbers, and so the first weights, are others in the last bits of fp32.
OTHER_WEIGHTS = {"tsn": 1e-5, "tsm": 1e-5, "i3d_3x3x3": 1e-3}

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_losses.json"


def tiny_losses(folder: Path) -> dict[str, list[float]]:
    """12 losses of each network on 24 videos, 2 virtual GPUs of 4 clips, 4 epochs."""
    for _ in write_motion_set(folder, 24, 4, MotionSet(size=32, num_frames=16)):
        pass
    losses = {}
    for arch in ("tsn", "tsm", "i3d_3x3x3"):
        values = {
            "name": arch,
            "model": {"arch": arch, "backbone": "resnet18", "width": 0.125, "num_classes": 4, "dropout": 0.1},
            "data": {
                "train": str(folder / "train.csv"), "val": str(folder / "val.csv"), "num_frames": 16,
                "frame_stride": 1, "short_side": [32, 40], "crop": 32, "workers": 0,
            },
            "scale": {"gpus": 2, "clips_per_gpu": 4},
            "optimizer": {"base_lr": 0.02},
            "schedule": {"epochs": 4, "warmup_epochs": 1},
            "precision": "fp64",
            "run_dir": str(folder / "runs"),
        }  # fmt: skip
        spec = spec_from_values(values, "golden")
        inputs = read_inputs(spec, 1)
        plan = inputs.plan
        run = Run(inputs, initial_network(spec, CPU), World(), CPU)
        with inputs.train.training_batches(plan.order(), 0, 1, range(plan.total_steps)) as batches:
            losses[arch] = [
                run.step([next(batches), next(batches)], plan.learning_rate(step)).read(8, 2, 1).loss
                for step in range(plan.total_steps)
            ]
    return losses


def test_the_losses_are_those_of_the_golden_file(tmp_path: Path) -> None:
    """In double, so that another CPU's order of sums does not matter; the videos go through an encoder all the same."""
    golden = json.loads(GOLDEN.read_text())
    found = tiny_losses(tmp_path)
    assert found.keys() == golden.keys()
    has_avx2 = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    tolerance, compared = (TOLERANCE, 12) if has_avx2 else (OTHER_WEIGHTS, 3)
    for arch, losses in golden.items():
        assert len(losses) == len(found[arch]) == 12
        assert found[arch][:compared] == pytest.approx(losses[:compared], rel=tolerance[arch]), arch


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        GOLDEN.write_text(json.dumps(tiny_losses(Path(name)), indent=1) + "\n")
