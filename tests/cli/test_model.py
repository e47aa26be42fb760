"""`summit-train model`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from summit_train.cli import model as command
from summit_train.core.errors import UserError

SPEC = """
name: t
model: {arch: tsm, num_classes: 400}
data: {train: train.csv, val: val.csv}
"""


def _run(tmp_path: Path, *arguments: str) -> int:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(["--json", str(path), *arguments]))


def test_json_is_one_object_with_the_contracts_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(tmp_path, "model.arch=i3d_3x1x1", "data.num_frames=32") == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {
        "parameters",
        "multiply_adds",
        "input_bytes",
        "frames",
        "stages",
        "compute_io",
        "gradient_bytes",
    }
    assert printed["parameters"] == 28_043_472
    assert printed["frames"] == 32
    assert printed["input_bytes"] == 32 * 3 * 224 * 224
    assert printed["stages"]["pool2"] == 4


def test_overrides_reach_the_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["model.backbone=resnet18", "model.width=0.25", "model.num_classes=4", "data.crop=64"]
    assert _run(tmp_path, *options) == 0
    printed = json.loads(capsys.readouterr().out)
    # ResNet-18 with 16, 32, 64 and 128 channels and 4 classes, added up by hand.
    convolutions = 3 * 16 * 49 + 4 * 16 * 16 * 9
    for narrow, wide in ((16, 32), (32, 64), (64, 128)):
        convolutions += narrow * wide * 9 + 3 * wide * wide * 9 + narrow * wide
    norms = 2 * (5 * 16 + 5 * 32 + 5 * 64 + 5 * 128)
    assert printed["parameters"] == convolutions + norms + 128 * 4 + 4
    assert printed["input_bytes"] == 8 * 3 * 64 * 64


def test_the_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    assert command.run(argparse.Namespace(spec=str(path), overrides=[], json=False)) == 0
    printed = capsys.readouterr().out
    for words in ("24,327,632", "32.70 G", "27,157", "8 x 3 x 224 x 224", "res5 8, global_pool 1"):
        assert words in printed


def test_a_wrong_spec_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="resnet18"):
        _run(tmp_path, "model.backbone=resnet19")
    with pytest.raises(UserError, match="at least 16 frames"):
        _run(tmp_path, "model.arch=i3d_3x3x3", "data.num_frames=8")
