from __future__ import annotations

import json

import pytest

from tests.worlds import bench_script


def test_the_shift_bench_measures_networks_that_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "shift.py --backbone resnet18 --width 0.25 --batch 1 --frames 4 --size 32 --repeats 1 --json"
    monkeypatch.setattr("sys.argv", words.split())
    assert bench_script("shift").main() == 0
    for result in json.loads(capsys.readouterr().out)["results"].values():
        assert result["logits_differ"] < 1e-5
        for part in ("forward", "step"):
            seconds = {name: times["median"] for name, times in result[part]["seconds"].items()}
            assert set(seconds) == {"2d", "2d plain", "tsm", "tsm +norms", "tsm +shift", "tsm plain", "official"}
            for pair, ratio in result[part]["ratios"].items():
                above, below = pair.split(" / ")
                assert ratio["median"] == pytest.approx(seconds[above] / seconds[below])
