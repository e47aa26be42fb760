"""`summit-train export`: what it prints, and its words where something is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from summit_train.__main__ import main
from summit_train.core.errors import UserError
from summit_train.inference.export.export import Export
from tests.runs import changed_copy
from tests.worlds import ROOT, environment, main_said


def test_the_summary_and_the_json(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "clip.onnx"
    words = [out, "--size", "32x48", "--batch", "any", "--precision", "fp16", "--videos", "4", "evaluate.clips=2"]
    status, text, _ = main_said(capsys, "export", trained_run, "--out", *words)
    assert status == 0
    lines = dict(line.split(maxsplit=1) for line in text.splitlines() if not line.startswith(" "))
    assert lines["network"] == "tsm resnet18, 4 classes"
    assert lines["graph"] == "clip, fp16, clip batch x 4 x 3 x 32 x 48"
    assert lines["pictures"] == "32 x 48, shorter side 32"
    assert lines["check"].startswith("4 clips of 4 frames: logits up to") and "random pixels" in lines["check"]
    assert lines["accuracy"].endswith("the same class in 100.0 % of 4 videos")
    assert "2 clips of 4 frames" in text and "videos/val_000000.mp4" in text
    assert lines["written"].startswith(f"{out} (") and out.with_suffix(".json").is_file()


def test_nothing_but_json_on_stdout(trained_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "stream.onnx"
    assert main(["export", str(trained_run), "--out", str(out), "--stream", "--json"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out) == json.loads(out.with_suffix(".json").read_text())
    assert printed.err.splitlines() == ["exporting the graph", "checking it against the network"]


def test_names_of_the_classes(
    trained_run: Path,
    motion_set: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[tuple[str, ...], bool]] = []

    def work(export: Export) -> NoReturn:
        found.append((export.trained.classes, export.trained.has_names))
        raise UserError("that is all")

    monkeypatch.setattr(Export, "run", work)
    alone = changed_copy(trained_run, tmp_path / "alone.pt", classes=None)
    words = ["export", alone, "--out", tmp_path / "a.onnx"]
    _, _, err = main_said(capsys, *words)
    assert err.splitlines()[0] == (
        f"{alone}: has no names of its classes: they are shown as numbers; --classes FILE gives them names"
    )
    _, _, err = main_said(capsys, *words, "--classes", motion_set / "classes.txt")
    assert err == "summit-train: that is all\n"
    assert found == [(("0", "1", "2", "3"), False), (("right", "up", "left", "down"), True)]


@pytest.mark.parametrize("package", ["onnxruntime", "onnxscript"])
def test_without_a_package(package: str, tmp_path: Path) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from summit_train.__main__ import main\n"
        f"sys.exit(main(['export', 'run', '--out', {str(tmp_path / 'a.onnx')!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    fix = "pip install onnx onnxruntime onnxscript"
    assert done.stderr == f"summit-train: export needs the package {package}, which is not installed: {fix}\n"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--size", "axb"),
        ("--size", "64x"),
        ("--size", "31x64"),
        ("--batch", "two"),
        ("--batch", "0"),
        ("--videos", "0"),
    ],
)
def test_options_are_checked(option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = main_said(capsys, "export", "run", "--out", tmp_path / "a.onnx", f"{option}={value}")
    assert status == 2 and f"argument {option}: must be " in err and err.endswith(f", got '{value}'\n")


def test_a_shift_that_reads_the_next_frame(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--out", tmp_path / "a.onnx", "--stream", "model.shift_direction=both"]
    status, _, err = main_said(capsys, "export", trained_run, *words)
    assert status == 2 and "its shift needs the next frame" in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
