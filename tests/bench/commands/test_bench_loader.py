"""`summit-train bench loader` on tiny clips: what it prints fits together. How long anything takes is never asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from summit_train.__main__ import main
from summit_train.bench.loader import OTHER, STAGES, TRANSFER
from tests.conftest import WriteSpec

SHORT = ("--clips", "3", "--repeats", "2", "--workers", "1")


def _bench(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["bench", "loader", *words, "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def _check(kind: dict[str, Any]) -> None:
    assert set(kind["stages_ms"]) == {*STAGES, OTHER, TRANSFER}
    for stage in ("read", "open", "decode", "resize", "augment", TRANSFER):
        assert kind["stages_ms"][stage] > 0, stage
    assert sum(kind["stages_ms"].values()) == pytest.approx(kind["profiled_ms"])
    for of in ("core", "all"):
        speeds = kind[f"clips_per_second_{of}"]
        assert 0 < speeds["min"] <= speeds["median"] <= speeds["max"]


def test_a_sample_is_measured_raw_and_packed(write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]) -> None:
    spec = str(write_spec())
    values = _bench(capsys, spec, *SHORT, "--step-ms", "50")
    assert [kind["kind"] for kind in values["kinds"]] == ["raw", "packed bytes", "packed jpeg"]
    for kind in values["kinds"]:
        _check(kind)
        assert kind["clips"] == 3
        found = kind["verdict"]
        assert found["gpu_clips_per_second"] == values["gpu"]["clips_per_second"] == pytest.approx(40)
        rate = kind["clips_per_second_per_core"]
        assert rate <= kind["clips_per_second_core"]["median"]
        assert (found["cores_per_gpu"] - 1) * rate < 40 <= found["cores_per_gpu"] * rate
        assert found["cores_per_rank"] == found["cores_per_gpu"] + 1
        assert found["cores_there"] is None and found["keeps_up"] is None
    raw, _, jpeg = values["kinds"]
    assert raw["stages_ms"]["seek"] > 0 and jpeg["stages_ms"]["seek"] < raw["stages_ms"]["seek"]


def test_a_packed_set_that_is_given(
    write_spec: WriteSpec, motion_set: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec, packed = write_spec(), str(tmp_path / "packed")
    assert main(["data", "pack", str(motion_set / "train.csv"), packed, "--kind", "jpeg", "--workers", "0"]) == 0
    capsys.readouterr()
    values = _bench(capsys, str(spec), "--packed", packed, *SHORT)
    assert [kind["kind"] for kind in values["kinds"]] == ["raw", "packed jpeg"]
    assert all(kind["verdict"] is None for kind in values["kinds"])
    (alone,) = _bench(capsys, str(spec), f"data.train={packed}", *SHORT)["kinds"]
    assert alone["kind"] == "packed jpeg"
    assert main(["bench", "loader", str(spec), "--packed", packed, "--packed", packed, *SHORT]) == 2
    assert "of each kind one set" in capsys.readouterr().err


def test_for_people_with_a_site(write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "loader", str(write_spec()), *SHORT, "--rate", "0.01", "--site", "summit"]) == 0
    text = capsys.readouterr().out
    assert "a rank trains tsm resnet18 on 0.01 clips/s (--rate)" in text
    assert "raw: 2 cores a rank, 1 for the loader (data.workers=1); summit has 6 for it: keeps up" in text


def test_the_networks_own_rate_is_measured(write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]) -> None:
    spec = write_spec(model={"arch": "tsn", "backbone": "mobilenet_v2"}, scale={"gpus": 4})
    values = _bench(capsys, str(spec), *SHORT, "--measure")
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
        (["--clips", "0"], "--clips 0"),
        (["--workers", "0"], "--workers 0"),
        (["--step-ms", "0"], "--step-ms 0"),
        (["--speed", "inf"], "--rate inf"),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: list[str], message: str, write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "loader", str(write_spec()), *options]) == 2
    assert message in capsys.readouterr().err
