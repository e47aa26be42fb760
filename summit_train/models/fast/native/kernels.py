"""The C++ kernels called with tensors: channels last, on a CPU, in fp32, fp64 or bf16."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from summit_train.models.fast.native.library import Kernels, kernels

_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}


class _Shape(ctypes.Structure):
    """Shape in rows.hpp."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("rows", "channels", "threads"))


class _Clips(ctypes.Structure):
    """Clips in shift.hpp."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("clips", "frames", "pixels", "channels", "threads"))


class _Group(ctypes.Structure):
    """Group in shift.hpp."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("begin", "end", "step"))


class Affine(NamedTuple):
    """Parameters of a batch normalisation, each (C,); the running statistics are updated in place."""

    weight: torch.Tensor
    bias: torch.Tensor
    running_mean: torch.Tensor | None = None
    running_variance: torch.Tensor | None = None


class Statistics(NamedTuple):
    """Mean and 1 / sqrt(variance + eps) of a batch, each (C,) in fp32 or wider."""

    mean: torch.Tensor
    inverse: torch.Tensor


class Mode(NamedTuple):
    """How to normalise: train, by the batch's statistics; relu, rectify the result."""

    train: bool
    relu: bool


class Gradients(NamedTuple):
    """Gradients to x (None where not wanted), weight, bias, and shortcut (None without one)."""

    x: torch.Tensor | None
    weight: torch.Tensor
    bias: torch.Tensor
    shortcut: torch.Tensor | None


def take(x: torch.Tensor) -> bool:
    """Return whether the kernels are there and know the device and the number format of `x`."""
    return x.device.type == "cpu" and x.dtype in _NAMES and isinstance(kernels(), Kernels)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """Return `x` (N, C, H, W) or (N, C, T, H, W) with its channels last in memory; a copy only where they are not."""
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def forward(
    x: torch.Tensor, shortcut: torch.Tensor | None, affine: Affine, mode: Mode, momentum: float, eps: float
) -> tuple[torch.Tensor, Statistics]:
    """Return norm(x), rectified if asked for, and the statistics used; with a shortcut relu(norm(x) + shortcut).

    In training the running statistics take the batch in with weight `momentum`.
    """
    result = torch.empty_like(x)
    statistics = Statistics(*torch.empty(2, x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32)))
    _call(
        f"{_NAMES[x.dtype]}_forward",
        [x, shortcut, result, *affine, *statistics],
        _shape(x),
        *map(ctypes.c_int, mode),
        ctypes.c_double(momentum),
        ctypes.c_double(eps),
    )
    return result, statistics


def backward(
    grad: torch.Tensor,
    result: torch.Tensor | None,
    x: torch.Tensor,
    affine: Affine,
    statistics: Statistics,
    mode: Mode,
    x_wanted: bool,
) -> Gradients:
    """Return the gradients of `forward`; `result` is what it returned where it had a shortcut, else None."""
    shortcut_grad = None if result is None else torch.empty_like(x)
    x_grad = torch.empty_like(x) if x_wanted else None
    weight_grad, bias_grad = torch.empty_like(statistics.mean), torch.empty_like(statistics.mean)
    inner = [affine.weight, affine.bias, *statistics, weight_grad, bias_grad]
    tensors = [grad, result, x, shortcut_grad, x_grad, *inner]
    _call(f"{_NAMES[x.dtype]}_backward", tensors, _shape(x), *map(ctypes.c_int, mode))
    return Gradients(x_grad, weight_grad, bias_grad, shortcut_grad)


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
    _shift(x, ends, num_frames, groups, restore=True)


def _shift(
    x: torch.Tensor, ends: torch.Tensor | None, num_frames: int, groups: Sequence[Group], *, restore: bool
) -> None:
    frames, channels, height, width = x.shape
    clips = _Clips(frames // num_frames, num_frames, height * width, channels, torch.get_num_threads())
    sign = -1 if restore else 1
    array = (_Group * len(groups))(*(_Group(group.begin, group.end, sign * group.step) for group in groups))
    numbers = (ctypes.c_int64(len(groups)), ctypes.c_int(restore))
    _call(f"{_NAMES[x.dtype]}_shift", [x, ends], ctypes.byref(clips), array, *numbers)


def _shape(x: torch.Tensor) -> object:
    return ctypes.byref(_Shape(x.numel() // x.shape[1], x.shape[1], torch.get_num_threads()))


def _call(name: str, tensors: Sequence[torch.Tensor | None], *numbers: object) -> None:
    """Call a function of the library. Python's lock is free meanwhile."""
    found = kernels()
    if not isinstance(found, Kernels):
        raise found
    addresses = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]
    getattr(found.library, name)(*addresses, *numbers)
