"""The kernels called with tensors: batch normalisation with relu and shortcut, forward and backward."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from summit_train.models.native.library import Kernels, kernels

_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}


class Segment(NamedTuple):
    """Channels [begin, end): those of frame t are in frame t + `before` of the shortcut, t + `after` of the result."""

    begin: int
    end: int
    before: int
    after: int


class _Segment(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in Segment._fields)


class _Shape(ctypes.Structure):
    """What rows.hpp calls Shape."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("clips", "frames", "pixels", "channels", "before_ends", "after_ends")),
        ("segments", ctypes.POINTER(_Segment)),
        *((name, ctypes.c_int64) for name in ("num_segments", "threads")),
    )


@dataclass(frozen=True)
class Layout:
    """How clips of `num_frames` frames are stored.

    before_ends, after_ends: channels of what falls out of the shortcut's and the result's clips, None where each frame
    is in its place.
    """

    num_frames: int
    segments: tuple[Segment, ...]
    before_ends: int | None = None
    after_ends: int | None = None

    @cached_property
    def as_array(self) -> ctypes.Array[_Segment]:
        """The segments as the kernels read them."""
        return (_Segment * len(self.segments))(*(_Segment(*segment) for segment in self.segments))


class Stored(NamedTuple):
    """A stream: frames (N*T, C, H, W); what fell out of its clips (N, c, H, W), None where nothing is wanted of it."""

    frames: torch.Tensor
    ends: torch.Tensor | None


class Statistics(NamedTuple):
    """What a batch is normalised by, each (C,) in fp32 or wider: mean, and 1 / sqrt(variance + eps)."""

    mean: torch.Tensor
    inverse: torch.Tensor


class Parameters(NamedTuple):
    """Of a batch normalisation, each (C,); the running ones are changed in place, None where there are none."""

    weight: torch.Tensor
    bias: torch.Tensor
    running_mean: torch.Tensor | None
    running_variance: torch.Tensor | None


def available(x: torch.Tensor) -> bool:
    """The kernels can take x (N, C, ...): on a CPU, its channels last, of a type that they know."""
    return (
        type(x) is torch.Tensor  # No fake or traced one, which has no memory.
        and x.device.type == "cpu"
        and x.dtype in _NAMES
        and x.numel() > 0
        and channels_last(x)
        and isinstance(kernels(), Kernels)
    )


def channels_last(x: torch.Tensor) -> bool:
    """A pixel's channels lie side by side, and the pixels of (N, C, H, W) or (N, C, T, H, W) in order."""
    return x.dim() in (4, 5) and x.is_contiguous(memory_format=channels_last_of(x))


def channels_last_of(x: torch.Tensor) -> torch.memory_format:
    """The format's name for as many dimensions."""
    return torch.channels_last if x.dim() == 4 else torch.channels_last_3d


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that numbers of this one are computed in."""
    return torch.promote_types(dtype, torch.float32)


def forward(
    x: torch.Tensor, shortcut: Stored | None, parameters: Parameters, layout: Layout,
    *, train: bool, relu: bool, momentum: float, eps: float,
) -> tuple[Stored, Statistics]:  # fmt: skip
    """(relu(norm(x) + shortcut), what was normalised by); without a shortcut relu only where `relu`.

    train: by the batch, of which the running statistics take `momentum`; else by the running ones. What fell out of the
    result's clips leaves zeros in its frames, negative ones where relu let nothing through.
    """
    result = _new(x, layout, layout.after_ends)
    statistics = Statistics(*torch.empty(2, x.shape[1], dtype=wide(x.dtype)))
    call(
        f"{_NAMES[x.dtype]}_forward",
        [x, *(shortcut or (None, None)), *result, *parameters, *statistics],
        _shape(x, layout),
        ctypes.c_int(train),
        ctypes.c_int(relu),
        ctypes.c_double(momentum),
        ctypes.c_double(eps),
    )
    return result, statistics


class Gradients(NamedTuple):
    """To x (None where it is not wanted), weight, bias and shortcut (None where there is none)."""

    x: torch.Tensor | None
    weight: torch.Tensor
    bias: torch.Tensor
    shortcut: Stored | None


def backward(
    grad: Stored, beside: torch.Tensor | None, result: torch.Tensor | None, x: torch.Tensor, parameters: Parameters,
    statistics: Statistics, layout: Layout, *, train: bool, relu: bool, x_wanted: bool,
) -> Gradients:  # fmt: skip
    """The gradients of `forward`. result: the frames that it gave, where it had a shortcut, else None.

    `layout` is that of `forward`; `grad` is stored as the result was, and so is `beside`, a second gradient to its
    frames; the shortcut's gradient is stored as the shortcut was.
    """
    shortcut_grad = None if result is None else _new(x, layout, layout.before_ends)
    x_grad = torch.empty_like(x) if x_wanted else None
    weight_grad, bias_grad = torch.empty_like(statistics.mean), torch.empty_like(statistics.mean)
    inner = [parameters.weight, parameters.bias, *statistics, weight_grad, bias_grad]
    call(
        f"{_NAMES[x.dtype]}_backward",
        [grad.frames, beside, grad.ends, result, x, *(shortcut_grad or (None, None)), x_grad, *inner],
        _shape(x, layout),
        ctypes.c_int(train),
        ctypes.c_int(relu),
    )
    return Gradients(x_grad, weight_grad, bias_grad, shortcut_grad)


def moved(x: Stored, layout: Layout, *, stride: int = 1, ends_wanted: bool = True) -> Stored:
    """Every `stride`-th pixel of `x`, stored as the layout's result is instead of as its shortcut is.

    The ends of x are of these pixels; where it comes without them they are zeros.
    """
    frames = x.frames
    height, width = frames.shape[2:]
    pixels = frames[..., ::stride, ::stride]
    if x.ends is not None and x.ends.shape[2:] != pixels.shape[2:]:
        raise ValueError(f"ends of {tuple(x.ends.shape[2:])} pixels beside frames of {tuple(pixels.shape[2:])}")
    to = _new(pixels, layout, layout.after_ends if ends_wanted else None)
    numbers = map(ctypes.c_int64, (height, width, stride))
    call(f"{_NAMES[frames.dtype]}_move", [*x, *to], _shape(to.frames, layout), *numbers)
    return to


def _new(like: torch.Tensor, layout: Layout, channels_of_ends: int | None) -> Stored:
    """Nothing yet, channels last."""
    frames = torch.empty_like(like, memory_format=channels_last_of(like))
    if channels_of_ends is None:
        return Stored(frames, None)
    shape = (like.shape[0] // layout.num_frames, channels_of_ends, *like.shape[2:])
    return Stored(frames, torch.empty(shape, dtype=like.dtype, memory_format=channels_last_of(like)))


def call(name: str, tensors: Sequence[torch.Tensor | None], *numbers: object) -> int:
    """Call a function of the library, and give back what it does, if anything; Python's lock is free meanwhile."""
    found = kernels()
    if not isinstance(found, Kernels):
        raise found
    addresses = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]
    return int(getattr(found.library, name)(*addresses, *numbers))


def _shape(x: torch.Tensor, layout: Layout) -> object:
    channels, rows = x.shape[1], x.numel() // x.shape[1]
    clips, frames, pixels = x.shape[0] // layout.num_frames, layout.num_frames, rows // x.shape[0]
    shape = _Shape(
        clips, frames, pixels, channels, layout.before_ends or 0, layout.after_ends or 0, layout.as_array,
        len(layout.segments), torch.get_num_threads(),
    )  # fmt: skip
    return ctypes.byref(shape)
