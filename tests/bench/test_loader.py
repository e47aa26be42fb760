"""`bench loader` on tiny clips: what it prints fits together. How long anything takes is never asked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from summit_train.__main__ import main
from summit_train.bench.loader import PARTS, verdict
from tests.bench.conftest import Bench
from tests.conftest import WriteSpec

SHORT = ("--clips", "3", "--repeats", "2", "--workers", "1")


@pytest.mark.parametrize(
    ("core", "gpu", "there", "needed", "keeps_up"),
    [(20.0, 99.0, 7, 5, True), (20.0, 100.0, 6, 5, True), (20.0, 100.1, 6, 6, False), (20.0, 0.1, None, 1, None)],
)
def test_cores_of_a_rank(core: float, gpu: float, there: int | None, needed: int, keeps_up: bool | None) -> None:
    assert verdict(core, gpu, there) == {
        "gpu_clips_per_second": gpu,
        "cores_per_gpu": needed,
        "cores_per_rank": needed + 1,
        "cores_there": None if there is None else there - 1,
        "keeps_up": keeps_up,
    }


def test_a_sample_is_measured_raw_and_packed_beside_the_networks_own_rate(write_spec: WriteSpec, bench: Bench) -> None:
    values = bench("loader", str(write_spec()), *SHORT, "--measure")
    assert values["network"] == "tsm resnet18" and values["gpu"]["source"].startswith("measured here, c")
    assert [kind["kind"] for kind in values["kinds"]] == ["raw", "packed bytes", "packed jpeg", "packed video"]
    for kind in values["kinds"]:
        speeds = [kind[f"clips_per_second_{of}"] for of in ("core", "all")]
        assert all(0 < speed["min"] <= speed["median"] <= speed["max"] for speed in speeds)
        # A core of several gives no more than one alone.
        rate = kind["clips_per_second_per_core"]
        assert kind["clips"] == 3 and rate == min(speed["median"] for speed in speeds)
        assert kind["verdict"] == verdict(rate, values["gpu"]["clips_per_second"], None)
        whole = kind["parts_ms"].pop("sum")
        assert list(kind["parts_ms"]) == [*PARTS, "other"] and sum(kind["parts_ms"].values()) == pytest.approx(whole)
        assert kind["parts_ms"]["decode"] > 0 and min(kind["parts_ms"].values()) >= 0
        assert kind["kind"] != "packed jpeg" or kind["parts_ms"]["open"] == 0  # a picture has no container
    assert sys.getprofile() is None


def test_a_packed_set_is_measured_as_it_is(
    write_spec: WriteSpec, motion_set: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    packed = str(tmp_path / "packed")
    assert main(["data", "pack", str(motion_set / "train.csv"), packed, "--kind", "jpeg", "--workers", "0"]) == 0
    assert main(["bench", "loader", str(write_spec()), f"data.train={packed}", *SHORT]) == 0
    text = capsys.readouterr().out
    assert "packed jpeg: a core for each " in text and "add --measure, --rate or --site" in text and "raw" not in text


def test_a_site_says_whether_its_cores_suffice(write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "loader", str(write_spec()), *SHORT, "--rate", "0.01", "--site", "summit"]) == 0
    text, said = capsys.readouterr()
    for by in ("one core", "1 worker"):
        assert [said.count(f"{kind}, {by}: ") for kind in ("raw", "packed bytes", "packed jpeg", "packed video")] == [
            2
        ] * 4
    assert "a rank trains tsm resnet18 at 0.01 clips/s (--rate)" in text
    assert "raw: 2 cores a rank, 1 for the loader (data.workers=1); summit has 6 for it: keeps up" in text
