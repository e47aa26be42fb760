"""timm, if it is installed: single modules, as the rest of it needs torchvision, that draw from a generator of ours."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

# Under CI it must be there.
needs_timm = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None and not os.environ.get("CI"),
    reason="needs timm; `make test` installs it, or `pip install --no-deps timm`",
)


def timm_module(name: str) -> Any:
    """The module timm/ROOM/FILE.py, named ROOM.FILE, loaded alone."""
    found = importlib.util.find_spec("timm")
    assert found is not None and found.origin is not None, "timm is missing"
    room, _, file = name.partition(".")
    package = ModuleType(f"timm_{room}")
    package.__path__ = [str(Path(found.origin).parent / room)]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.{file}")


def draw_from(module: Any, generator: np.random.Generator) -> None:
    """Let a module of timm draw from `generator` what it draws from Python's and NumPy's global ones."""
    module.random = SimpleNamespace(
        random=generator.random,
        uniform=generator.uniform,
        gauss=generator.normal,
        randint=lambda low, high: int(generator.integers(low, high + 1)),
    )
    module.np = SimpleNamespace(
        sqrt=np.sqrt,
        clip=np.clip,
        random=SimpleNamespace(
            rand=generator.random,
            beta=generator.beta,
            randint=lambda low, high, size=None: generator.integers(low, high, size),
            choice=lambda choices, size, replace, p: [choices[i] for i in generator.integers(len(choices), size=size)],
        ),
    )
