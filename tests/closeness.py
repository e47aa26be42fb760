"""Nearness of numbers that each processor rounds in its own way.

The rounding error of a sum grows with the numbers that are summed, which are as large as the tensor as a whole. So the
measure is the norm of all of it: an entry that cancels to nearly nothing is not held to its own size, and large logits
are not held to an absolute bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


def assert_near(found: Any, expected: Any, bound: float, what: str = "", *, beside: Any = 0.0) -> None:
    """Assert |found - expected| <= bound * |expected| of tensors, arrays or lists, as one vector each.

    beside: numbers of the same computation that are not small, for `expected` that is zero but for rounding.
    """
    found, expected, beside = (_tensor(value) for value in (found, expected, beside))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
    distance, size = _norm(found - expected), max(_norm(expected), _norm(beside))
    assert distance <= bound * size < math.inf, (
        f"{what}: {distance:.3g} apart, with a norm of {size:.3g}; {bound:.3g} is allowed"
    )


def assert_all_near(found: Iterable[Any], expected: Iterable[Any], bound: float) -> None:
    """Assert it of each of several tensors."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_near(one, other, bound, f"number {number}")


def _tensor(value: Any) -> torch.Tensor:
    return value.detach() if isinstance(value, torch.Tensor) else torch.from_numpy(np.asarray(value))


def _norm(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values.double()))
