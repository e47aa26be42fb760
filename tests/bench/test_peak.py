from __future__ import annotations

from math import prod

import pytest
import torch

from summit_train.bench import peak
from summit_train.bench.peak import SQUARES, measure_peak, network_shapes
from tests.bench.conftest import SHORT, Bench
from tests.conftest import WriteSpec
from tests.networks import counted

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peak_is_the_best_of_what_was_tried(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    tried = measure_peak(precision, CPU, [(300, 20, 40)], seconds=1e-9)
    assert list(tried) == [(SQUARES[0],) * 3]  # all others would have taken too long
    tried = measure_peak(precision, CPU, [(300, 20, 40)], seconds=1e-3)
    assert (300, 20, 40) in tried
    assert torch.get_float32_matmul_precision() == before


def test_the_networks_shapes_are_its_heaviest_convolutions() -> None:
    network = counted("tsm")
    shapes = network_shapes(network, clips=1, most=100)
    assert (8 * 56 * 56, 64 * 9, 64) in shapes  # a 3 x 3 convolution of the first stage
    assert sum(map(prod, set(shapes))) < network.multiply_adds
    assert len(network_shapes(network, clips=1)) == 6
    assert all(rows * max(inner, columns) <= 2**26 for rows, inner, columns in network_shapes(network, clips=64))


def test_the_peak_is_measured_in_the_same_run(
    write_spec: WriteSpec, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak, "SQUARES", (64, 128))
    values = bench("step", str(write_spec(precision="bf16")), "--synthetic", *SHORT)
    (found,) = values["peaks"]
    assert found["precision"] == "bf16" and len(found["tried"]) > 2 and len(found["shape"]) == 3
    best = max(found["tried"], key=lambda product: product["multiply_adds_per_second"])
    assert (found["shape"], found["multiply_adds_per_second"]) == (best["shape"], best["multiply_adds_per_second"])
