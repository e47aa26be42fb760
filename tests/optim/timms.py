"""timm's optimizers, where timm is installed: loaded by themselves, as the rest of timm needs torchvision."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# Under CI it must be there.
needs_timm = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None and not os.environ.get("CI"),
    reason="needs timm; `make test` installs it, or `pip install --no-deps timm`",
)


def timm_module(name: str) -> Any:
    """The module timm/optim/NAME.py."""
    found = importlib.util.find_spec("timm")
    assert found is not None and found.origin is not None, "timm is missing"
    package = ModuleType("timm_optim")
    package.__path__ = [str(Path(found.origin).parent / "optim")]
    sys.modules["timm_optim"] = package
    return importlib.import_module(f"timm_optim.{name}")
