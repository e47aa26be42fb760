"""The machine's peak: multiply-adds a second of large matrix products, as the paper's "peak FLOPs"."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from summit_train.models.count import Count
from summit_train.training.step import AUTOCAST, parameter_type
from summit_train.training.stopwatch import Mark

SQUARES = (512, 1024, 2048, 4096, 8192, 16384)
RUNS = 5
_MOST_ELEMENTS = 2**26  # of one matrix, 256 MB in fp32

Shape = tuple[int, int, int]


def measure_peak(
    precision: str, device: torch.device, shapes: Sequence[Shape] = (), seconds: float = 1.0
) -> dict[Shape, float]:
    """Measure large square products and products of `shapes`: multiply-adds/s of each, the best of five runs.

    Squares grow until one run takes more than `seconds`. The threads are the process's, and a GPU uses TF32 where
    convolutions do, so the peak is that of the training's arithmetic.
    """
    tried: dict[Shape, float] = {}
    before, rate = torch.get_float32_matmul_precision(), 0.0
    if device.type == "cuda" and torch.backends.cudnn.allow_tf32:  # torch's default allows it for convolutions alone
        torch.set_float32_matmul_precision("high")
    try:
        for side in SQUARES:
            rate = tried[side, side, side] = _measure((side, side, side), precision, device)
            if (2 * side) ** 3 / rate > seconds:
                break
        for shape in shapes:
            if prod(shape) / rate <= 10 * seconds:
                rate = tried[shape] = _measure(shape, precision, device)
    finally:
        torch.set_float32_matmul_precision(before)
    return tried


def network_shapes(network: Count, clips: int, most: int = 6) -> list[Shape]:
    """Return the heaviest convolutions on `clips` clips as matrix products: (pixels, inputs x kernel, outputs).

    Those of one shape count together. Rows are cut so that no matrix has more than 2^26 elements.
    """
    weights: dict[Shape, int] = {}
    for layer in network.layers[:-1]:  # without the classifier
        pixels, inner, columns = layer.product
        shape = (min(clips * pixels, _MOST_ELEMENTS // max(inner, columns)), inner, columns)
        weights[shape] = weights.get(shape, 0) + layer.multiply_adds
    return sorted(weights, key=lambda shape: -weights[shape])[:most]


def _measure(shape: Shape, precision: str, device: torch.device) -> float:
    """Return the multiply-adds/s of (rows, inner) times (inner, columns) in the best run."""
    rows, inner, columns = shape
    dtype = AUTOCAST.get(precision, parameter_type(precision))
    left = torch.randn(rows, inner, device=device).to(dtype)
    right = torch.randn(inner, columns, device=device).to(dtype)
    out = torch.mm(left, right)  # brings the memory and the library's code in
    seconds = []
    for _ in range(RUNS):
        start = Mark(device)
        torch.mm(left, right, out=out)
        seconds.append(start.seconds_to(Mark(device)))
    return prod(shape) / min(seconds)
