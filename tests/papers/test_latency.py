"""papers/latency.py: who runs when and for how long, rows, tables, the figure. No test asks how long a pass takes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from summit_train.spec import dump_spec
from tests.bench.conftest import TINY
from tests.conftest import WriteSpec
from tests.detectors import detector_spec
from tests.papers.conftest import Script
from tests.worlds import bench_script

latency, figure3 = bench_script("latency"), bench_script("figure3")

SHORT = ("--repeats", "2", "--warm-up", "1", "--batch", "2", "--seconds", "0.1")


class _Clockwork(figure3.ForwardBench):  # type: ignore[misc,name-defined]
    """A bench whose passes take `pass_s` seconds of a clock of its own."""

    def __init__(self, pass_s: float, log: list[tuple[float, int]]) -> None:
        self._pass_s, self._log = pass_s, log

    def passes(self, clips: int, most: int, seconds: float = math.inf) -> list[float]:
        taken = max(1, min(most, math.ceil(min(1e9, seconds) / self._pass_s)))
        self._log.append((self._pass_s, taken))
        return [self._pass_s] * taken


@pytest.mark.parametrize(
    ("seconds", "repeats", "warm_up", "turns"),
    [(1000, 12, 10, [3, 3, 3, 3, 3]), (1000, 2, 10, [1, 1]), (0.5, 1000, 1, [1, 1, 1, 1, 1])],
)
def test_every_network_has_the_same_turns(seconds: float, repeats: int, warm_up: int, turns: list[int]) -> None:
    log: list[tuple[float, int]] = []
    found = latency.measure_rounds(
        [_Clockwork(1.0, log), _Clockwork(2.0, log)], 4, latency.Passes(4, 10, repeats, seconds)
    )
    assert [[len(turn) for turn in rounds] for rounds in found] == [turns] * 2
    assert log[:2] == [(1.0, warm_up), (2.0, warm_up)]
    # A B, B A, ...; each turn after a pass that is not counted.
    order = [1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0][: 2 * len(turns)]
    assert log[2::2] == [(pass_s, 1) for pass_s in order]


def test_what_is_made_of_the_times() -> None:
    values = latency.timed_values([[0.2, 0.4, 0.3], [0.1]], [[2.0], [4.0]], [[0.1], [0.2]], batch=8)
    assert (values["median_ms"], values["min_ms"], values["max_ms"]) == pytest.approx((250, 100, 400))
    assert (values["passes"], values["turns"], values["throughput_passes"]) == (4, 2, 2)
    assert values["relative_latency"] == pytest.approx({"min": 0.5, "median": 1.75, "max": 3})
    assert values["clips_per_second"] == 3 and values["clips_per_second_spread"]["max"] == 4


def test_networks_are_measured_side_by_side(write_spec: WriteSpec, script: Script) -> None:
    specs = [str(write_spec("one")), str(write_spec("other", model={"arch": "tsn"}))]
    values = script(latency, *SHORT, *specs, "--precision", "bf16", "data.num_frames=4")
    assert [(row["label"], row["arch"]) for row in values["rows"]] == [("one", "tsm"), ("other", "tsn")]
    for row in values["rows"]:
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"] and row["clips_per_second"] > 0
        assert (row["parameters"], row["multiply_adds"]) == (TINY.parameters, TINY.multiply_adds)
        assert (row["frames"], row["crop"], row["precision"], row["published"]) == (4, 32, "bf16", None)
    assert values["relative_to"] == "one" and values["rows"][0]["relative_latency"]["max"] == 1
    assert values["settings"] == {"batch": 2, "warm_up": 1, "repeats": 2, "seconds": 0.1, "clips": "random"}
    assert values["environment"]["torch"] and values["overrides"] == ["data.num_frames=4"]
    text = latency.as_text(values)
    assert "RANDOM CLIPS" in text and "machine: " in text and "tsm resnet18" in text


def test_table_6_on_small_networks_with_its_figure(script: Script, tmp_path: Path) -> None:
    out = tmp_path / "tradeoff.png"
    words = ("model.width=0.125", "data.crop=32", "data.num_frames=8")
    values = script(latency, *SHORT, "--table", "6", "--out", str(out), *words)
    rows = {row["label"]: row for row in values["rows"]}
    assert rows["TSM, 8 frames"]["median_ms"] > 0 and rows["TSM, 8 frames"]["published"]["latency_ms"] == 17.4
    assert rows["ECO, 16 frames"]["arch"] is None and rows["ECO, 16 frames"]["median_ms"] is None
    assert rows["ECO, 16 frames"]["published"]["latency_ms"] == 30.6
    assert values["relative_to"] == "I3D 3x1x1"
    assert out.read_bytes().startswith(b"\x89PNG") and json.loads(out.with_suffix(".json").read_text()) == values


def test_a_frame_of_detectors_is_timed_and_its_boxes_apart(script: Script, tmp_path: Path) -> None:
    specs = []
    for name, model in (("single", {}), ("online", {"arch": "tsm", "shift_direction": "past"})):
        specs.append(str(tmp_path / f"{name}.yaml"))
        Path(specs[-1]).write_text(dump_spec(detector_spec(name=name, model=model, data={"long_side": 96})))
    values = script(latency, *SHORT, *specs)
    for row in values["rows"]:
        boxes = row["boxes_ms"]
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"] and 0 < boxes["min"] <= boxes["max"]
        assert (row["height"], row["width"], row["crop"]) == (64, 96, None)
        assert (row["clips_per_second"], row["parameters"]) == (None, values["rows"][0]["parameters"])
    assert values["rows"][0]["relative_latency"]["max"] == 1 and values["relative_to"] == "single"
    text = latency.as_text(values)
    assert "RANDOM FRAMES" in text and "boxes ms" in text and "clips/s" not in text
