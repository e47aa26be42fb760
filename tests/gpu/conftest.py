"""The device of tests without cases, and a GPU whose memory is free for each test."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.devices import CPU, GPU


@pytest.fixture(params=[pytest.param("cuda", marks=GPU), "rehearsal"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The GPU, and the CPU for a rehearsal."""
    return CPU if request.param == "rehearsal" else torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _freed() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
