from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from summit_train.sweep.grid import Sweep, load_sweep
from tests.run_directories import write_run as write_run


@pytest.fixture
def make_sweep(tmp_path: Path) -> Callable[..., Sweep]:
    """Reads a sweep with these axes over a small base; its runs go to tmp_path/study."""

    def make(axes: str, clips: int = 4) -> Sweep:
        base = {"model": {"arch": "tsm", "backbone": "resnet18", "num_classes": 4}, "data": {"train": "a", "val": "b"}}
        base |= {"scale": {"clips_per_gpu": clips}, "schedule": {"epochs": 4, "warmup_epochs": 1}}
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(base | {"run_dir": str(tmp_path)}))
        (tmp_path / "sweep_file.yaml").write_text(f"name: study\nbase: base.yaml\n{axes}")
        return load_sweep(tmp_path / "sweep_file.yaml")

    return make
