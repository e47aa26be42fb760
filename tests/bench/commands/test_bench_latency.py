"""`summit-train bench latency` on tiny networks: rows, tables and refusals. How long anything takes is never asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from summit_train.__main__ import main
from tests.conftest import WriteSpec
from tests.networks import counted

SHORT = ("--repeats", "2", "--warm-up", "1", "--batch", "2", "--seconds", "0.1")
TINY = counted("tsm", "resnet18", frames=4, crop=32, width=0.125, classes=4)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _latency(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["bench", "latency", *words, *SHORT, "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def test_networks_are_measured_side_by_side(write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]) -> None:
    specs = [str(write_spec("one")), str(write_spec("other", model={"arch": "tsn"}))]
    values = _latency(capsys, *specs, "--precision", "bf16", "data.num_frames=4")
    assert [(row["label"], row["arch"], row["backbone"]) for row in values["rows"]] == [
        ("one", "tsm", "resnet18"),
        ("other", "tsn", "resnet18"),
    ]
    for row in values["rows"]:
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"] and row["clips_per_second"] > 0
        assert (row["parameters"], row["multiply_adds"]) == (TINY.parameters, TINY.multiply_adds)
        assert (row["frames"], row["crop"], row["precision"], row["published"]) == (4, 32, "bf16", None)
    assert values["relative_to"] == "one" and values["rows"][0]["relative_latency"]["max"] == 1
    assert values["settings"] == {"batch": 2, "warm_up": 1, "repeats": 2, "seconds": 0.1, "clips": "random"}
    assert values["environment"]["torch"] and values["overrides"] == ["data.num_frames=4"]


def test_it_says_what_was_measured(write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", str(write_spec()), *SHORT]) == 0
    text = capsys.readouterr().out
    assert "RANDOM CLIPS" in text and "machine: " in text and "tsm resnet18" in text


def test_table_6_on_small_networks_with_its_figure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "tradeoff.png"
    words = ("model.width=0.125", "data.crop=32", "data.num_frames=8")
    values = _latency(capsys, "--table", "6", "--out", str(out), *words)
    rows = {row["label"]: row for row in values["rows"]}
    assert rows["TSM, 8 frames"]["median_ms"] > 0 and rows["TSM, 8 frames"]["published"]["latency_ms"] == 17.4
    assert rows["ECO, 16 frames"]["arch"] is None and rows["ECO, 16 frames"]["median_ms"] is None
    assert rows["ECO, 16 frames"]["published"]["latency_ms"] == 30.6
    assert values["relative_to"] == "I3D 3x1x1"
    assert out.read_bytes().startswith(b"\x89PNG") and json.loads(out.with_suffix(".json").read_text()) == values


def test_a_table_without_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", "--table", "2", "--published"]) == 0
    text = capsys.readouterr().out
    lines = {line[: line.index("  ")]: line for line in text.splitlines() if "  " in line}
    assert "24.3 M [24.3 M]" in lines["TSM, 8 frames"] and "32.7 G [33 G]" in lines["TSM, 8 frames"]
    # An ensemble is the sum of its networks.
    assert "150.0 M [150.0 M]" in lines["ECO-lite ensemble"] and "267.3 G [267 G]" in lines["ECO-lite ensemble"]
    assert "[83.3 G x 10]" in lines["ip-CSN-152"] and lines["ip-CSN-152"].endswith("53.3 %")
    assert "machine" not in text and "latency ms" not in text


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ([], "give one SPEC or more, or --table with one of 2, 3, 5, 6"),
        (["a.yaml", "--table", "2"], "give one SPEC or more, or --table"),
        (["a.yaml", "--out", "a.png"], "--published and --out are for a table of the paper: add --table"),
        (["--table", "2", "--repeats", "0"], "--repeats 0: a number above 0 is wanted"),
        (["--table", "2", "--out", "a.gif"], "the name of a figure ends in"),
        (["--table", "2", "--precision", "fp8"], "precision"),
    ],
)
def test_wrong_input_is_one_line(words: list[str], wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", *words]) == 2
    error = capsys.readouterr().err
    assert wrong in error and "Traceback" not in error
