"""A run folder as a run of 40 steps leaves it, to be cut and bent."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

ENVIRONMENT = {"torch": "2.13.0", "processor": "Fast CPU", "cores": 2, "device": "cpu", "hosts": {"node1": 2}}
PLAN = {"ranks": 2, "virtual_gpus": 4, "accumulation": 2, "global_batch": 16}
PLAN |= {"steps_per_epoch": 10, "total_steps": 40, "peak_lr": 0.01}

Record = dict[str, Any]


def whole_log() -> list[Record]:
    """The records of a whole run: start, steps, one validation and one checkpoint an epoch."""
    noise = random.Random(0)
    lines: list[Record] = [{"kind": "start", "step": 0, "ranks": 2, "time": 1_700_000_000.0}]
    for step in range(1, 41):
        progress, step_s = step / 40, noise.uniform(0.45, 0.55)
        line = {"kind": "step", "step": step, "epoch": (step - 1) // 10}
        line["loss"] = 1.4 * math.exp(-4 * progress) + noise.uniform(0, 0.15)
        line["lr"] = 0.01 * min(progress * 10, 0.5 + 0.5 * math.cos(math.pi * progress))
        line |= {"clips_per_second": 16 / step_s, "step_s": step_s, "data_wait_s": 0.1 * step_s}
        lines.append(line | {"top1": min(100.0, 25 + 80 * progress + noise.uniform(-10, 10))})
        if step % 10 == 0:
            scores = {"top1": 25 + 72 * progress, "top5": 100.0, "videos": 64, "clips": 1}
            lines.append({"kind": "eval", "epoch": step // 10, "step": step, **scores})
            lines.append({"kind": "checkpoint", "step": step, "seconds": 0.25})
    return lines


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run folder: write_run(folder, name=..., lines=..., leave_out=("eval.json",), ...)."""
    return partial(write_folder, tmp_path)


def write_folder(
    parent: Path,
    folder: str = "run",
    *,
    name: str | None = None,
    lines: list[Record] | None = None,
    leave_out: tuple[str, ...] = (),
    arch: str = "tsm",
    top1: float = 96.875,
    num_classes: int = 12,
    spec: Mapping[str, Any] | None = None,
    files: Mapping[str, Any] | None = None,
) -> Path:
    """Write the folder of a whole run, but for what the options change.

    lines: of the log. spec: its sections. files: by name, a JSON object's further keys, or the whole text.
    """
    path = parent / folder
    path.mkdir(parents=True)
    model = {"arch": arch, "backbone": "resnet18", "num_classes": num_classes}
    whole = {"name": name or folder, "model": model, "data": {"num_frames": 8}, "schedule": {"epochs": 4}}
    scores = [
        {"path": f"checkpoints/step_{step:08d}.pt", "step": step, "top1": top1 + more, "top5": 100.0}
        for step, more in ((30, -0.5), (40, 0.5))
    ]
    final = {"top1_mean": top1, "top1_std": 0.5, "top5_mean": 100.0, "top5_std": 0.0, "videos": 64, "clips": 10}
    final |= {"crops": 1, "checkpoints": scores}
    objects = {"plan.json": PLAN, "eval.json": final, "environment.json": ENVIRONMENT}
    texts = {
        "spec.yaml": yaml.safe_dump(whole | dict(spec or {})),
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in (whole_log() if lines is None else lines)),
    }
    for file, content in (objects | texts | dict(files or {})).items():
        if isinstance(content, dict):
            content = json.dumps(objects.get(file, {}) | content)
        if file not in leave_out:
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).write_text(content)
    return path
