"""A network for the tests of solvers, and timm's optimizers, if timm is installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

# Under CI it must be there.
needs_timm = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None and not os.environ.get("CI"),
    reason="needs timm; `make test` installs it, or `pip install --no-deps timm`",
)


def timm_module(name: str) -> Any:
    """The module timm/optim/NAME.py, loaded alone, as the rest of timm needs torchvision."""
    found = importlib.util.find_spec("timm")
    assert found is not None and found.origin is not None, "timm is missing"
    package = ModuleType("timm_optim")
    package.__path__ = [str(Path(found.origin).parent / "optim")]
    sys.modules["timm_optim"] = package
    return importlib.import_module(f"timm_optim.{name}")


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Each kind of layer: parameters of one, two and four dimensions."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 16, 1), nn.Linear(16, 5)).to(dtype)


def give_gradients(model: nn.Module, seed: int, by: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter) * by
