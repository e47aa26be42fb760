from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from summit_train.__main__ import main
from summit_train.bench.measure import in_turn, pair_ratios, spread, spread_text, training_multiply_adds
from summit_train.models import build_model
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
        ("table1 --specs SPEC --out table.txt", "--out table.txt"),
        ("table1 --specs SPEC --out /dev/null/a.png", "--out /dev/null/a.png: cannot be written: Not a directory"),
        ("lr SPEC --out /dev/null/a.png", "--out /dev/null/a.png: cannot be written"),
        ("scaling SPEC --out /dev/null/a.png", "--out /dev/null/a.png: cannot be written"),
        ("table1 --specs SPEC --batch 0", "--batch must be above 0"),
        ("fig3 b --specs SPEC --frames-per-second -1", "--frames-per-second must be above 0"),
        ("loader SPEC --clips 0", "--clips must be above 0"),
        ("loader SPEC --rate inf", "--rate must be above 0"),
        ("allreduce SPEC", "needs two or more ranks"),
        ("allreduce SPEC --max-bytes 100", "4096 or more, got 100"),
        ("allreduce SPEC --write mine.txt", "must end in .yaml"),
        ("latency", "give one SPEC or more, or --table with one of 2, 3, 5, 6"),
        ("latency a.yaml --table 2", "give one SPEC or more, or --table"),
        ("latency a.yaml --out a.png", "--published and --out are for a table of the paper: add --table"),
        ("latency --table 2 --out a.gif", "the name of a figure ends in"),
        ("latency --table 2 --precision fp8", "precision"),
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
