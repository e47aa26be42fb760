"""The peak that utilisation is measured against: the best product of square matrices, as training computes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import torch

from summit_train.bench.measure import Context, Values
from summit_train.core.text import with_unit
from summit_train.models.precision import AUTOCAST, parameter_type
from summit_train.spec import Spec
from summit_train.training.timer import Mark

SIDES = (512, 1024, 2048, 4096, 8192, 16384)  # of the square matrices
RUNS = 5
Peaks = Mapping[str, Values]  # by precision; empty where utilisation is not measured


def add_peak(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peak", type=float, metavar="X", help="multiply-adds/s of a rank at best; 0: no utilisation")


def measure_peaks(specs: Sequence[Spec], given: float | None, context: Context) -> Peaks:
    """Measure the peak of all ranks together by precision. given: each rank's, which is not measured; 0: no peaks."""
    peaks: dict[str, Values] = {}
    for precision in () if given == 0 else dict.fromkeys(spec.precision for spec in specs):
        rate = given
        shape = None
        tried = {}
        if rate is None:
            context.tell(f"measuring the peak of matrix products in {precision}")
            context.world.barrier()
            tried = measure_peak(precision, context.device)
            rate, side = max((rate, side) for side, rate in tried.items())
            shape = [side] * 3
        peaks[precision] = {
            "precision": precision,
            "multiply_adds_per_second": sum(context.world.gather(rate) or []),
            "shape": shape,
            "tried": [{"shape": [side] * 3, "multiply_adds_per_second": rate} for side, rate in tried.items()],
        }
    return peaks


def measure_peak(
    precision: str, device: torch.device, sides: Sequence[int] = SIDES, seconds: float = 1.0
) -> dict[int, float]:
    """Multiply square matrices that grow until one run takes more than `seconds`.

    Return the multiply-adds/s for each side, the best of five runs. A GPU uses TF32 where convolutions do, as training.
    """
    dtype = AUTOCAST.get(precision, parameter_type(precision))
    tried: dict[int, float] = {}
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda" and torch.backends.cudnn.allow_tf32:  # torch's default allows it for convolutions alone
        torch.set_float32_matmul_precision("high")
    try:
        for side in sides:
            left = torch.randn(side, side, device=device).to(dtype)
            right = torch.randn(side, side, device=device).to(dtype)
            out = torch.mm(left, right)  # the first product brings the memory and the library's code in
            times = []
            for _ in range(RUNS):
                start = Mark(device)
                torch.mm(left, right, out=out)
                times.append(start.seconds_to(Mark(device)))
            tried[side] = side**3 / min(times)
            if (2 * side) ** 3 / tried[side] > seconds:
                break
    finally:
        torch.set_float32_matmul_precision(before)
    return tried


def peak_text(peak: Values) -> str:
    """Describe the peak that utilisation is a share of."""
    rate = f"peak of all ranks, {peak['precision']}: {with_unit(peak['multiply_adds_per_second'], 'multiply-adds/s')}"
    if peak["shape"] is None:
        return f"{rate}, given"
    shape = " x ".join(f"{side:,}" for side in peak["shape"])
    return f"{rate}, the best of {len(peak['tried'])} matrix products ({shape}), measured in this run"
