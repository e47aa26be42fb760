"""The shift in place against the plain shift, and what it puts back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from summit_train.models.fast import kernels
from summit_train.models.fast.kernels import Group, Kernels
from tests.models.test_shift import plain

pytestmark = pytest.mark.skipif(not isinstance(kernels.loaded(), Kernels), reason=f"no kernels: {kernels.loaded()}")
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@settings(deadline=None, max_examples=60)
@given(
    clips=st.integers(1, 3),
    num_frames=st.integers(1, 5),
    channels=st.integers(2, 40),
    side=st.integers(1, 12),
    threads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    share=st.floats(0.05, 0.5),
)
def test_any_shape(
    clips: int, num_frames: int, channels: int, side: int, threads: int, dtype: torch.dtype, share: float
) -> None:
    fold = max(1, int(channels * share))
    groups = [Group(0, fold, 1), Group(fold, 2 * fold, -1)]
    x = torch.randn(clips * num_frames, channels, side, side + 1).to(dtype).to(memory_format=torch.channels_last)
    before, bits = x.clone(), x.clone()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ends = x.new_empty(clips, side, side + 1, 2 * fold)
        kernels.shift(x, num_frames, groups, ends)
        assert torch.equal(x, plain(before, num_frames, fold, "both"))
        kernels.shift(x, num_frames, groups, ends, restore=True)
        assert torch.equal(x, bits)
        kernels.shift(x, num_frames, groups)
        assert torch.equal(x, plain(before, num_frames, fold, "both"))
    finally:
        torch.set_num_threads(threads_before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_infinity_and_negative_zero_come_back(dtype: torch.dtype) -> None:
    x = torch.randn(4, 8, 3, 3).to(dtype).contiguous(memory_format=torch.channels_last)
    x[1, 0], x[2, 1], x[0, 0], x[3, 1] = float("nan"), float("inf"), -0.0, float("nan")
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.clone().view(integers)
    groups = [Group(0, 1, 1), Group(1, 2, -1)]
    ends = x.new_empty(1, 3, 3, 2)
    kernels.shift(x, 4, groups, ends)
    kernels.shift(x, 4, groups, ends, restore=True)
    assert torch.equal(x.view(integers), bits)


def test_the_kernels_take_what_they_know() -> None:
    x = torch.zeros(1, 1, 1, 1)
    assert all(kernels.take(x.to(dtype)) for dtype in DTYPES)
    assert not kernels.take(x.to(torch.float16)) and not kernels.take(x.to("meta"))
