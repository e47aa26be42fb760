"""The C++ kernels called with tensors: channels last, on a CPU, in fp32, fp64 or bf16."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from summit_train.models.fast.native.library import Kernels, kernels

_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}


def take(x: torch.Tensor) -> bool:
    """Return whether the kernels are there and know the device and the number format of `x`."""
    return x.device.type == "cpu" and x.dtype in _NAMES and isinstance(kernels(), Kernels)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """Return `x` (N, C, H, W) or (N, C, T, H, W) with its channels last in memory; a copy only where they are not."""
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def call(name: str, dtype: torch.dtype, tensors: Sequence[torch.Tensor | None], *arguments: object) -> None:
    """Call the kernel `name` of kernels.cpp, for activations of type `dtype`. Python's lock is free meanwhile."""
    found = kernels()
    if not isinstance(found, Kernels):
        raise found
    addresses = (ctypes.c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))
    getattr(found.library, f"{_NAMES[dtype]}_{name}")(addresses, *arguments)


def integers(*numbers: int) -> ctypes.Array[ctypes.c_int64]:
    """Return numbers as C++ sees a structure of int64_t."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


class Group(NamedTuple):
    """Channels [begin, end) of a shift; those of frame t come from frame t + step."""

    begin: int
    end: int
    step: int


def shift(x: torch.Tensor, num_frames: int, groups: Sequence[Group], *, keep: bool) -> torch.Tensor | None:
    """Shift `groups` of the channels of frames `x` (N*T, C, H, W) in place; what opens becomes zero.

    Returns what drops out of the clips, (N, channels that move, H, W), for `restore`; None unless `keep`.
    """
    pitch = sum(group.end - group.begin for group in groups)
    ends = x.new_empty((len(x) // num_frames, x.shape[2], x.shape[3], pitch)) if keep else None
    _shift(x, ends, num_frames, groups, restore=False)
    return ends


def restore(x: torch.Tensor, ends: torch.Tensor, num_frames: int, groups: Sequence[Group]) -> None:
    """Undo `shift` in place, to the bit."""
    _shift(x, ends, num_frames, [Group(begin, end, -step) for begin, end, step in groups], restore=True)


def _shift(
    x: torch.Tensor, ends: torch.Tensor | None, num_frames: int, groups: Sequence[Group], *, restore: bool
) -> None:
    frames, channels, height, width = x.shape
    # Clips and Group of kernels.cpp.
    clips = integers(frames // num_frames, num_frames, height * width, channels, torch.get_num_threads())
    flat = integers(*(number for group in groups for number in group))
    call("shift", x.dtype, [x, ends], clips, flat, ctypes.c_int64(len(groups)), ctypes.c_int(restore))
