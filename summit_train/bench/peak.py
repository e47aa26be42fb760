"""The peak that utilisation is measured against: the best matrix product, with a training's threads and precision."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from math import prod

import torch

from summit_train.bench.measure import Context, Values
from summit_train.core.count import Count
from summit_train.core.text import with_unit
from summit_train.models.count import count_network
from summit_train.models.precision import AUTOCAST, parameter_type
from summit_train.spec import Spec
from summit_train.training.timer import Mark

SQUARES = (512, 1024, 2048, 4096, 8192, 16384)
RUNS = 5
_MOST_ELEMENTS = 2**26  # of one matrix, 256 MB in fp32
Shape = tuple[int, int, int]  # (rows, inner) times (inner, columns)
Peaks = Mapping[str, Values]  # by precision; empty where utilisation is not measured


def add_peak(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peak", type=float, metavar="X", help="multiply-adds/s of a rank at best; 0: no utilisation")


def measure_peaks(specs: Sequence[Spec], given: float | None, context: Context) -> Peaks:
    """Measure the peak of all ranks together by precision. given: each rank's, which is not measured; 0: no peaks."""
    peaks: dict[str, Values] = {}
    for precision, spec in {} if given == 0 else {spec.precision: spec for spec in specs}.items():
        rate = given
        shape = None
        tried = {}
        if rate is None:
            context.tell(f"measuring the peak of matrix products in {precision}")
            context.world.barrier()
            shapes = network_shapes(count_network(spec), spec.scale.clips_per_gpu)
            tried = measure_peak(precision, context.device, shapes)
            rate, shape = max((rate, shape) for shape, rate in tried.items())
        peaks[precision] = {
            "precision": precision,
            "multiply_adds_per_second": sum(context.world.gather(rate) or []),
            "shape": shape,
            "tried": [{"shape": shape, "multiply_adds_per_second": rate} for shape, rate in tried.items()],
        }
    return peaks


def measure_peak(
    precision: str, device: torch.device, shapes: Sequence[Shape] = (), seconds: float = 1.0
) -> dict[Shape, float]:
    """Measure large square products and products of `shapes`: multiply-adds/s of each, the best of five runs.

    Squares grow until one run takes more than `seconds`. A GPU uses TF32 where convolutions do, as training does.
    """
    dtype = AUTOCAST.get(precision, parameter_type(precision))

    def rate_of(shape: Shape) -> float:
        rows, inner, columns = shape
        left = torch.randn(rows, inner, device=device).to(dtype)
        right = torch.randn(inner, columns, device=device).to(dtype)
        out = torch.mm(left, right)  # the first product brings the memory and the library's code in
        times = []
        for _ in range(RUNS):
            start = Mark(device)
            torch.mm(left, right, out=out)
            times.append(start.seconds_to(Mark(device)))
        return prod(shape) / min(times)

    tried: dict[Shape, float] = {}
    before = torch.get_float32_matmul_precision()
    rate = 0.0
    if device.type == "cuda" and torch.backends.cudnn.allow_tf32:  # torch's default allows it for convolutions alone
        torch.set_float32_matmul_precision("high")
    try:
        for side in SQUARES:
            rate = tried[side, side, side] = rate_of((side, side, side))
            if (2 * side) ** 3 / rate > seconds:
                break
        for shape in shapes:
            if prod(shape) / rate <= 10 * seconds:
                rate = tried[shape] = rate_of(shape)
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


def peak_text(peak: Values) -> str:
    """Return what the utilisation is measured against."""
    rate = f"peak of all ranks, {peak['precision']}: {with_unit(peak['multiply_adds_per_second'], 'multiply-adds/s')}"
    if peak["shape"] is None:
        return f"{rate}, given"
    shape = " x ".join(f"{side:,}" for side in peak["shape"])
    return f"{rate}, the best of {len(peak['tried'])} matrix products ({shape}), measured in this run"
