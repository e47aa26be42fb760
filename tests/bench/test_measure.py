"""What benches share: spreads, turns, what cannot be measured, the work of a step, and the peak beside it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from summit_train.__main__ import main
from summit_train.bench import peak
from summit_train.bench.measure import in_turn, pair_ratios, spread, spread_text, training_multiply_adds
from summit_train.bench.peak import SIDES, measure_peak, peak_text
from summit_train.models import build_model
from tests.bench.conftest import SHORT, Bench
from tests.conftest import WriteSpec
from tests.networks import counted


def test_spread_and_ratios_of_pairs() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"min": 1.0, "median": 2.0, "max": 3.0}
    # Both slowed down in the second round: the ratio did not.
    assert pair_ratios([2.0, 4.0], [1.0, 2.0]) == [2.0, 2.0]
    assert spread_text(spread([1.0, 2.0]), ".1f") == "1.5 (1.0 .. 2.0)"


def test_rounds_go_forwards_and_backwards() -> None:
    calls: list[str] = []
    measurements = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    names = [name for name, _ in in_turn(measurements, 3)]
    assert names == calls == list("abccbaabc")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("step SPEC", "data.train: missing.csv not found"),
        ("step SPEC --synthetic --steps 0", "--steps must be above 0 and finite, got 0"),
        ("step SPEC --synthetic --peak nan", "--peak must be above 0"),
        ("scaling SPEC", "data.train: missing.csv not found"),
        ("scaling SPEC --synthetic --ranks 2", "two or more numbers"),
        (
            "lr SPEC --steps 17",
            "--steps must be at least 18, and --from below --to, got 17, 1e-06 and 1; try the defaults",
        ),
        ("lr SPEC --from 1", "--steps must be at least 18, and --from below --to, got 100, 1 and 1; try the defaults"),
        ("lr SPEC --from 0", "--from must be above 0 and finite, got 0"),
        ("lr SPEC --out /dev/null/a.png", "--out /dev/null/a.png: cannot be written"),
        ("scaling SPEC --out a.png", "--out was removed; draw it by `python papers/figure3.py c --specs SPEC --out"),
        ("loader SPEC --clips 0", "--clips must be above 0"),
        ("loader SPEC --rate inf", "--rate must be above 0"),
        ("allreduce SPEC", "needs two or more ranks"),
        ("allreduce SPEC --max-bytes 100", "4096 or more, got 100"),
        ("allreduce SPEC --write mine.txt", "must end in .yaml"),
        ("latency --table 6", "bench latency was removed; run `python papers/latency.py` in a checkout"),
        ("table1 --help", "bench table1 was removed; run `python papers/figure3.py table1` in a checkout"),
        ("fig3 c --ranks 1,2 a=b", "bench fig3 was removed; run `python papers/figure3.py a|b|c` in a checkout"),
    ],
)
def test_what_cannot_be_measured_is_the_users_mistake(
    words: str, message: str, write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = str(write_spec(data={"train": "missing.csv"}))
    assert main(["bench", *(spec if word == "SPEC" else word for word in words.split())]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(("arch", "backbone", "frames"), [("tsn", "resnet18", 4), ("i3d_3x1x1", "resnet50", 8)])
def test_training_multiply_adds_are_those_that_autograd_does(arch: str, backbone: str, frames: int) -> None:
    model = build_model(arch, backbone, frames, 5, width=0.125)
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(2, frames, 3, 32, 32)).sum().backward()
    network = counted(arch, backbone, frames=frames, crop=32, width=0.125, classes=5)
    assert counter.get_total_flops() == 2 * 2 * training_multiply_adds(network)


CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_squares_grow_until_one_takes_too_long(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    assert list(measure_peak(precision, CPU, seconds=1e-9)) == [SIDES[0]]
    tried = measure_peak(precision, CPU, (16, 32), seconds=1e9)
    assert list(tried) == [16, 32] and min(tried.values()) > 0
    assert torch.get_float32_matmul_precision() == before


def test_the_peak_is_the_best_and_measured_in_the_same_run(
    write_spec: WriteSpec, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak, "measure_peak", lambda precision, device: {64: 2e9, 128: 3e9, 256: 1e9})
    values = bench("step", str(write_spec(precision="bf16")), "--synthetic", *SHORT)
    tried = [
        {"shape": [side] * 3, "multiply_adds_per_second": rate} for side, rate in ((64, 2e9), (128, 3e9), (256, 1e9))
    ]
    best = {"precision": "bf16", "multiply_adds_per_second": 3e9, "shape": [128] * 3}
    assert values["peaks"] == [best | {"tried": tried}]
    assert peak_text(values["peaks"][0]) == (
        "peak of all ranks, bf16: 3 G multiply-adds/s, the best of 3 matrix products (128 x 128 x 128), "
        "measured in this run"
    )
