"""`bench loader` on tiny clips: what it prints fits together. How long anything takes is never asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from summit_train.__main__ import main
from summit_train.bench.loader import OTHER, STAGES, TRANSFER, stage_of, verdict
from summit_train.data.video.decode import demuxed
from tests.bench.conftest import Bench
from tests.conftest import WriteSpec

SHORT = ("--clips", "3", "--repeats", "2", "--workers", "1")


@pytest.mark.parametrize(
    ("file", "function", "stage"),
    [
        ("/x/summit_train/data/packed/read.py", "_read", "read"),
        ("~", "<built-in method posix.pread>", "read"),
        ("~", "<built-in method zlib.crc32>", "read"),
        ("/x/summit_train/data/video/decode.py", demuxed.__name__, "seek"),
        ("/x/summit_train/data/video/decode.py", "_jumped", "decode"),
        ("/x/summit_train/data/video/render.py", "put", "resize"),
        ("~", "<method 'decode' of 'av.video.stream.VideoStream' objects>", "decode"),
        ("~", "<method 'reformat' of 'av.video.reformatter.VideoReformatter' objects>", "resize"),
        ("/x/summit_train/data/video/augment.py", "mirrored", "augment"),
        ("~", "<built-in method numpy.array>", OTHER),
    ],
)
def test_an_own_time_belongs_to_a_stage(file: str, function: str, stage: str) -> None:
    assert stage_of(file, function) == stage


def test_cores_of_a_rank() -> None:
    assert verdict(20.0, 99.0, 7) == {
        "gpu_clips_per_second": 99.0,
        "cores_per_gpu": 5,
        "cores_per_rank": 6,
        "cores_there": 6,
        "keeps_up": True,
    }
    assert verdict(20.0, 100.0, 6)["keeps_up"] is True
    assert verdict(20.0, 100.1, 6)["keeps_up"] is False
    assert verdict(20.0, 0.1, None)["cores_per_gpu"] == 1
    assert verdict(20.0, 0.1, None)["keeps_up"] is None


def _check(kind: dict[str, Any]) -> None:
    assert set(kind["stages_ms"]) == {*STAGES, OTHER, TRANSFER}
    for stage in ("read", "open", "decode", "resize", "augment", TRANSFER):
        assert kind["stages_ms"][stage] > 0, stage
    assert sum(kind["stages_ms"].values()) == pytest.approx(kind["profiled_ms"])
    for of in ("core", "all"):
        speeds = kind[f"clips_per_second_{of}"]
        assert 0 < speeds["min"] <= speeds["median"] <= speeds["max"]


def test_a_sample_is_measured_raw_and_packed(write_spec: WriteSpec, bench: Bench) -> None:
    spec = str(write_spec())
    values = bench("loader", spec, *SHORT, "--step-ms", "50")
    assert [kind["kind"] for kind in values["kinds"]] == ["raw", "packed bytes", "packed jpeg"]
    for kind in values["kinds"]:
        _check(kind)
        assert kind["clips"] == 3
        found = kind["verdict"]
        assert found["gpu_clips_per_second"] == values["gpu"]["clips_per_second"] == pytest.approx(40)
        rate = kind["clips_per_second_per_core"]
        # A core of several gives no more than one alone.
        assert rate == min(kind[f"clips_per_second_{of}"]["median"] for of in ("core", "all"))
        assert (found["cores_per_gpu"] - 1) * rate < 40 <= found["cores_per_gpu"] * rate
        assert found["cores_per_rank"] == found["cores_per_gpu"] + 1
        assert found["cores_there"] is None and found["keeps_up"] is None
    raw, _, jpeg = values["kinds"]
    assert raw["stages_ms"]["seek"] > 0 and jpeg["stages_ms"]["seek"] < raw["stages_ms"]["seek"]


def test_a_packed_set_that_is_given(
    write_spec: WriteSpec, motion_set: Path, bench: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec, packed = write_spec(), str(tmp_path / "packed")
    assert main(["data", "pack", str(motion_set / "train.csv"), packed, "--kind", "jpeg", "--workers", "0"]) == 0
    capsys.readouterr()
    values = bench("loader", str(spec), "--packed", packed, *SHORT)
    assert [kind["kind"] for kind in values["kinds"]] == ["raw", "packed jpeg"]
    assert all(kind["verdict"] is None for kind in values["kinds"])
    (alone,) = bench("loader", str(spec), f"data.train={packed}", *SHORT)["kinds"]
    assert alone["kind"] == "packed jpeg"
    assert main(["bench", "loader", str(spec), "--packed", packed, "--packed", packed, *SHORT]) == 2
    assert "must be one set of each kind" in capsys.readouterr().err


def test_for_people_with_a_site(write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "loader", str(write_spec()), *SHORT, "--rate", "0.01", "--site", "summit"]) == 0
    text = capsys.readouterr().out
    assert "a rank trains tsm resnet18 on 0.01 clips/s (--rate)" in text
    assert "raw: 2 cores a rank, 1 for the loader (data.workers=1); summit has 6 for it: keeps up" in text


def test_the_networks_own_rate_is_measured(write_spec: WriteSpec, bench: Bench) -> None:
    spec = write_spec(model={"arch": "tsn", "backbone": "mobilenet_v2"}, scale={"gpus": 4})
    values = bench("loader", str(spec), *SHORT, "--measure")
    assert values["network"] == "tsn mobilenet_v2" and values["gpu"]["source"].startswith("measured here, c")
    rate = values["gpu"]["clips_per_second"]
    for kind in values["kinds"]:
        cores = kind["verdict"]["cores_per_gpu"]
        assert (cores - 1) * kind["clips_per_second_per_core"] < rate <= cores * kind["clips_per_second_per_core"]


def test_without_a_rate_the_cores_are_said_for_any(write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "loader", str(write_spec()), *SHORT]) == 0
    text = capsys.readouterr().out
    assert "raw: a core for each " in text and "--measure, --rate, --step-ms or --site" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--clips", "0"], "--clips must be above 0"),
        (["--workers", "0"], "--workers must be above 0"),
        (["--step-ms", "0"], "--step-ms must be above 0"),
        (["--speed", "inf"], "--rate must be above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: list[str], message: str, write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "loader", str(write_spec()), *options]) == 2
    assert message in capsys.readouterr().err
