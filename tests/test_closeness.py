"""The measure of nearness that other tests use: what passes, and what must not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.closeness import assert_all_near, assert_near


@pytest.mark.parametrize("size", [1e-12, 1.0, 8e4])
def test_rounding_passes_at_any_size_and_a_wrong_sign_does_not(size: float) -> None:
    expected = size * torch.randn(3, 400, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    assert_near(expected * (1 + 2e-15), expected, 1e-14)
    summed = expected.sum(0)
    assert_near(expected.flip(0).sum(0), summed, 1e-14)  # the same sum in another order
    wrong = expected.clone()
    wrong[1, 7] = -wrong[1, 7]
    for found in (wrong, expected * (1 + 2e-12), expected.roll(1, 1)):
        with pytest.raises(AssertionError, match="apart"):
            assert_near(found, expected, 1e-12)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_nan_and_infinity_never_pass(odd: float) -> None:
    expected, found = torch.ones(4), torch.tensor([1.0, 1.0, odd, 1.0])
    for one, other in ((found, expected), (expected, found), (found, found)):
        with pytest.raises(AssertionError):
            assert_near(one, other, 1e30)


def test_another_shape_or_type_is_not_near() -> None:
    for other in (torch.ones(1, 4), torch.ones(4, dtype=torch.double)):
        with pytest.raises(AssertionError):
            assert_near(other, torch.ones(4), 1.0)


def test_zeros_are_near_zeros_alone_unless_something_stands_beside() -> None:
    zeros, rounding = torch.zeros(4), torch.full((4,), 1e-9)
    assert_near(zeros, zeros, 1e-6)
    with pytest.raises(AssertionError):
        assert_near(rounding, zeros, 1e-6)
    assert_near(rounding, zeros, 1e-6, beside=torch.ones(2))
    with pytest.raises(AssertionError):
        assert_near(rounding, zeros, 1e-6, beside=torch.full((2,), 1e-4))


def test_arrays_and_lists_too() -> None:
    assert_near(np.array([1.0, 2.0]), [1.0, 2.0 + 1e-15], 1e-14)
    with pytest.raises(AssertionError, match="number 1"):
        assert_all_near([torch.ones(2), torch.ones(2)], [torch.ones(2), torch.zeros(2)], 1e-6)
