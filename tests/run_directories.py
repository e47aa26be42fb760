from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

STEPS_PER_EPOCH, EPOCHS = 10, 4
ENVIRONMENT = {"torch": "2.13.0", "processor": "Fast CPU", "cores": 2, "device": "cpu", "hosts": {"node1": 2}}

Record = dict[str, Any]


def step_record(step: int, noise: random.Random, steps_per_epoch: int, total: int) -> Record:
    """One plausible step: falling loss, warm-up and cosine, a tenth of the step spent waiting."""
    progress = step / total
    step_s = noise.uniform(0.45, 0.55)
    return {
        "kind": "step",
        "step": step,
        "epoch": (step - 1) // steps_per_epoch,
        "loss": 1.4 * math.exp(-4 * progress) + noise.uniform(0, 0.15),
        "lr": 0.01 * min(progress * 10, 0.5 + 0.5 * math.cos(math.pi * progress)),
        "clips_per_second": 16 / step_s,
        "step_s": step_s,
        "data_wait_s": 0.1 * step_s,
        "top1": min(100.0, 25 + 80 * progress + noise.uniform(-10, 10)),
    }


def eval_record(step: int, steps_per_epoch: int, top1: float) -> Record:
    epoch = step // steps_per_epoch
    return {"kind": "eval", "epoch": epoch, "step": step, "top1": top1, "top5": 100.0, "videos": 64, "clips": 1}


def records(
    steps_per_epoch: int = STEPS_PER_EPOCH, epochs: int = EPOCHS, seed: int = 0, best: float = 97
) -> list[Record]:
    """A whole run: start, steps, one validation and one checkpoint an epoch."""
    noise, total = random.Random(seed), steps_per_epoch * epochs
    lines: list[Record] = [{"kind": "start", "step": 0, "ranks": 2, "time": 1_700_000_000.0}]
    for step in range(1, total + 1):
        lines.append(step_record(step, noise, steps_per_epoch, total))
        if step % steps_per_epoch == 0:
            lines.append(eval_record(step, steps_per_epoch, 25 + (best - 25) * step / total))
            lines.append({"kind": "checkpoint", "step": step, "seconds": 0.25})
    return lines


def spec_of(name: str, arch: str = "tsm", num_classes: int = 12) -> Record:
    return {
        "name": name,
        "model": {"arch": arch, "backbone": "resnet18", "num_classes": num_classes},
        "data": {"num_frames": 8},
        "schedule": {"epochs": EPOCHS},
    }


def plan_of(steps_per_epoch: int = STEPS_PER_EPOCH, epochs: int = EPOCHS) -> Record:
    return {
        "ranks": 2,
        "virtual_gpus": 4,
        "accumulation": 2,
        "global_batch": 16,
        "steps_per_epoch": steps_per_epoch,
        "total_steps": steps_per_epoch * epochs,
        "peak_lr": 0.01,
    }


def final_eval(top1: float = 96.875) -> Record:
    scores = [
        {"path": f"checkpoints/step_{s:08d}.pt", "step": s, "top1": top1 + d, "top5": 100.0}
        for s, d in ((30, -0.5), (40, 0.5))
    ]
    return {
        "top1_mean": top1,
        "top1_std": 0.5,
        "top5_mean": 100.0,
        "top5_std": 0.0,
        "videos": 64,
        "clips": 10,
        "crops": 1,
        "checkpoints": scores,
    }


def write_lines(path: Path, lines: list[Record]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run_records() -> Callable[..., list[Record]]:
    """The records of a whole run, to be cut and bent: run_records(steps_per_epoch=10, epochs=4)."""
    return records


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run directory: write_run(folder, name=..., lines=..., leave_out=("eval.json",), ...)."""

    def write(
        folder: str = "run",
        *,
        name: str | None = None,
        lines: list[Record] | None = None,
        leave_out: tuple[str, ...] = (),
        arch: str = "tsm",
        top1: float = 96.875,
        num_classes: int = 12,
        clips_per_class: Record | None = None,
    ) -> Path:
        path = tmp_path / folder
        path.mkdir(parents=True)
        (path / "spec.yaml").write_text(yaml.safe_dump(spec_of(name or folder, arch, num_classes)))
        plan = plan_of() if clips_per_class is None else plan_of() | {"clips_per_class": clips_per_class}
        (path / "plan.json").write_text(json.dumps(plan))
        (path / "eval.json").write_text(json.dumps(final_eval(top1)))
        (path / "environment.json").write_text(json.dumps(ENVIRONMENT))
        write_lines(path / "metrics.jsonl", records() if lines is None else lines)
        for file in leave_out:
            (path / file).unlink()
        return path

    return write
