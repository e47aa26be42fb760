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
    """Channels [begin, end) of one kind.

    Those of the result's frame t belong to frame t + `x_step` of x and t + `shortcut_step` of the shortcut; those of
    x's frame t to frame t + `to_shortcut` of the shortcut and t + `to_result` of the result; around the clip's ends.
    """

    begin: int
    end: int
    x_step: int
    shortcut_step: int
    to_shortcut: int
    to_result: int


class _Segment(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in Segment._fields)


class _Shape(ctypes.Structure):
    """What normalise.cpp calls Shape."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("clips", "frames", "pixels", "channels")),
        ("segments", ctypes.POINTER(_Segment)),
        *((name, ctypes.c_int64) for name in ("num_segments", "threads")),
    )


@dataclass(frozen=True)
class Layout:
    """How rows of channels belong together: clips of `num_frames` frames, and what is stored rolled."""

    num_frames: int
    segments: tuple[Segment, ...]

    @cached_property
    def as_array(self) -> ctypes.Array[_Segment]:
        """The segments as the kernels read them."""
        return (_Segment * len(self.segments))(*(_Segment(*segment) for segment in self.segments))


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
    x: torch.Tensor, shortcut: torch.Tensor | None, parameters: Parameters, layout: Layout,
    *, train: bool, relu: bool, momentum: float, eps: float,
) -> tuple[torch.Tensor, Statistics]:  # fmt: skip
    """(relu(norm(x) + shortcut), what was normalised by); without a shortcut relu only where `relu`.

    train: by the batch, of which the running statistics take `momentum`; else by the running ones.
    """
    result = torch.empty_like(x)
    statistics = Statistics(*torch.empty(2, x.shape[1], dtype=wide(x.dtype)))
    call(
        f"{_NAMES[x.dtype]}_forward",
        [x, shortcut, result, *parameters, *statistics],
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
    shortcut: torch.Tensor | None


def backward(
    grad: torch.Tensor, result: torch.Tensor | None, x: torch.Tensor, parameters: Parameters, statistics: Statistics,
    layout: Layout, *, train: bool, relu: bool, x_wanted: bool,
) -> Gradients:  # fmt: skip
    """The gradients of `forward`. result: what it gave, where it had a shortcut, else None.

    `layout` is that of `forward`; grad is stored as the result was, the shortcut's gradient as the shortcut was.
    """
    shortcut_grad = None if result is None else torch.empty_like(x)
    x_grad = torch.empty_like(x) if x_wanted else None
    weight_grad, bias_grad = torch.empty_like(statistics.mean), torch.empty_like(statistics.mean)
    inner = [parameters.weight, parameters.bias, *statistics, weight_grad, bias_grad]
    call(
        f"{_NAMES[x.dtype]}_backward",
        [grad, result, x, shortcut_grad, x_grad, *inner],
        _shape(x, layout),
        ctypes.c_int(train),
        ctypes.c_int(relu),
    )
    return Gradients(x_grad, weight_grad, bias_grad, shortcut_grad)


def moved(x: torch.Tensor, layout: Layout, *, stride: int = 1, blank: bool) -> torch.Tensor:
    """Every `stride`-th pixel of frames (N, C, H, W), stored as the layout's result is instead of as its shortcut is.

    Around the clip's ends, or with `blank` zeros for what would come round them.
    """
    height, width = x.shape[2:]
    to = torch.empty_like(x[..., ::stride, ::stride], memory_format=torch.channels_last)
    numbers = map(ctypes.c_int64, (height, width, stride))
    call(f"{_NAMES[x.dtype]}_move", [x, to], _shape(to, layout), *numbers, ctypes.c_int(blank))
    return to


def put_away(x: torch.Tensor, layout: Layout) -> None:
    """Make zeros of what came round the clips' ends in rolled frames, in place, until `put_back` in the same thread."""
    _swap_ends(x, layout, back=False)


def put_back(x: torch.Tensor, layout: Layout) -> None:
    """Undo `put_away`, bit for bit."""
    _swap_ends(x, layout, back=True)


def _swap_ends(x: torch.Tensor, layout: Layout, *, back: bool) -> None:
    if not call(f"{_NAMES[x.dtype]}_swap_ends", [x], _shape(x, layout), ctypes.c_int(back)):
        raise RuntimeError("frames are put away and put back by turns, in one thread")


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
    segments = layout.as_array
    shape = _Shape(clips, frames, pixels, channels, segments, len(segments), torch.get_num_threads())
    return ctypes.byref(shape)
