"""`summit-train export`: what it prints, and its messages where something is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from summit_train.__main__ import main
from tests.runs import changed_copy
from tests.worlds import Say, refused


@pytest.mark.usefixtures("without_exporter")
def test_the_summary(trained_run: Path, tmp_path: Path, say: Say) -> None:
    out, alone = tmp_path / "a.onnx", changed_copy(trained_run, tmp_path / "alone.pt", classes=None)
    status, text, err = say("export", alone, "--out", out, "--stream")
    assert status == 0 and "lacks the names of its classes" in err.splitlines()[0]
    lines = dict(line.split(maxsplit=1) for line in text.splitlines() if not line.startswith(" "))
    assert lines["network"] == "tsm resnet18, 4 classes"
    assert lines["graph"] == "stream, frame 1 x 3 x 32 x 32, 8 caches of 296 elements, 1,184 bytes"
    assert lines["frames"] == "32 x 32, shorter side 32"
    assert lines["check"].startswith("1 clip of 32 frames: logits up to") and "random pixels" in lines["check"]
    assert "videos/val_000000.mp4" in text
    assert lines["written"].startswith(f"{out} (") and out.with_suffix(".json").is_file()


def test_nothing_but_json_on_stdout(trained_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "stream.onnx"
    words = ["--stream", "--size", "32x48", "--batch", "any", "--json", "data.val=/nowhere.csv"]
    assert main(["export", str(trained_run), "--out", str(out), *words]) == 0
    printed = capfd.readouterr()
    found = json.loads(printed.out)
    assert found == json.loads(out.with_suffix(".json").read_text())
    assert found["inputs"][0] == {"name": "frame", "shape": ["batch", 3, 32, 48], "dtype": "float32"}
    assert {tensor["shape"][0] for tensor in (*found["inputs"], *found["outputs"])} == {"batch"}
    assert printed.err.splitlines() == ["exporting the graph", "checking it against the network"]


def test_without_a_package(tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("export", "onnx_file"):
        monkeypatch.delitem(sys.modules, f"summit_train.inference.export.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    fix = "pip install onnx onnxruntime onnxscript"
    message = f"summit-train: export needs the package onnxscript, which is not installed: {fix}\n"
    assert say("export", "run", "--out", tmp_path / "a.onnx") == (2, "", message)


def test_mistakes_are_one_line_and_2(trained_run: Path, tmp_path: Path, say: Say) -> None:
    words = ("export", trained_run, "--out", tmp_path / "a.onnx")
    for option, value in (("size", "axb"), ("size", "64x"), ("size", "31x64"), ("batch", "two"), ("batch", "0")):
        status, _, err = say(*words, f"--{option}={value}")
        assert status == 2 and f"argument --{option}: must be " in err and err.endswith(f", got '{value}'\n")
    assert "its shift needs the next frame" in refused(say(*words, "--stream", "model.shift_direction=both"))
    assert list(tmp_path.iterdir()) == []
