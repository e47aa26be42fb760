from __future__ import annotations

import json

import pytest

from tests.worlds import run


def test_the_shift_bench_measures_networks_that_agree() -> None:
    words = ["--backbone", "resnet18", "--width", "0.25", "--batch", "1", "--frames", "4", "--size", "32"]
    status, output = run(0, "bench/shift.py", *words, "--repeats", "1", "--precision", "fp32", "bf16", "--json")
    assert status == 0, output
    values = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    for result in values["results"].values():
        assert result["logits_differ"] < 1e-5
        for part in ("forward", "step"):
            seconds = {name: times["median"] for name, times in result[part]["seconds"].items()}
            assert set(seconds) == {"2d", "2d plain", "tsm", "tsm +norms", "tsm +shift", "tsm plain", "official"}
            for pair, ratio in result[part]["ratios"].items():
                above, below = pair.split(" / ")
                assert ratio["median"] == pytest.approx(seconds[above] / seconds[below])
