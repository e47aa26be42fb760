"""The machine's peak: multiply-adds a second of large matrix products, as the paper's "peak FLOPs"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch

from summit_train.models.count import Count
from summit_train.training.stopwatch import Mark

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
SQUARES = (512, 1024, 2048, 4096, 8192, 16384)
RUNS = 5
_MOST_ELEMENTS = 2**26  # of one matrix, 256 MB in fp32

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Product:
    """(rows, inner) times (inner, columns): the best of some runs."""

    shape: Shape
    multiply_adds_per_second: float


def measure_peak(
    precision: str, device: torch.device, shapes: Sequence[Shape] = (), seconds: float = 1.0
) -> list[Product]:
    """Measure large square products and products of `shapes`: each the best of five, after one that does not count.

    Squares grow until one run takes more than `seconds`. The threads are the process's, and a GPU uses TF32 where
    convolutions do, so the peak is that of the training's arithmetic.
    """
    tried: list[Product] = []
    with _convolutions_arithmetic(device):
        for side in SQUARES:
            tried.append(_measure((side, side, side), precision, device))
            if (2 * side) ** 3 / tried[-1].multiply_adds_per_second > seconds:
                break
        for shape in shapes:
            if prod(shape) / tried[-1].multiply_adds_per_second <= 10 * seconds:
                tried.append(_measure(shape, precision, device))
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


def _measure(shape: Shape, precision: str, device: torch.device) -> Product:
    rows, inner, columns = shape
    dtype = DTYPES[precision]
    left = torch.randn(rows, inner, device=device).to(dtype)
    right = torch.randn(inner, columns, device=device).to(dtype)
    out = torch.mm(left, right)  # brings the memory and the library's code in
    seconds = []
    for _ in range(RUNS):
        start = Mark(device)
        torch.mm(left, right, out=out)
        seconds.append(start.seconds_to(Mark(device)))
    return Product(shape, prod(shape) / min(seconds))


@contextmanager
def _convolutions_arithmetic(device: torch.device) -> Iterator[None]:
    """Use TF32 for matrix products on a GPU where convolutions do: torch's default has it for those alone."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda" and torch.backends.cudnn.allow_tf32:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
