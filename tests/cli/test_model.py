"""`summit-train model`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.worlds import Say

SPEC = """
name: t
model: {arch: tsm, num_classes: 400}
data: {train: train.csv, val: val.csv}
"""


@pytest.fixture
def model(say: Say, tmp_path: Path) -> Callable[..., Any]:
    """Runs `model`, which must succeed; its output, parsed with --json."""

    def counted(*words: str) -> Any:
        (tmp_path / "spec.yaml").write_text(SPEC)
        status, out, err = say("model", tmp_path / "spec.yaml", *words)
        assert (status, err) == (0, "")
        return json.loads(out) if "--json" in words else out

    return counted


def test_json_has_the_contracts_keys_and_overrides_reach_the_network(model: Callable[..., Any]) -> None:
    options = ["model.backbone=resnet18", "model.width=0.25", "model.num_classes=4", "data.crop=64"]
    printed = model("--json", *options)
    # ResNet-18 with 16, 32, 64 and 128 channels and 4 classes, added up by hand.
    convolutions = 3 * 16 * 49 + 4 * 16 * 16 * 9
    for narrow, wide in ((16, 32), (32, 64), (64, 128)):
        convolutions += narrow * wide * 9 + 3 * wide * wide * 9 + narrow * wide
    norms = 2 * (5 * 16 + 5 * 32 + 5 * 64 + 5 * 128)
    assert printed["parameters"] == convolutions + norms + 128 * 4 + 4
    assert (printed["input_bytes"], printed["frames"], printed["stages"]["res5"]) == (8 * 3 * 64 * 64, 8, 8)
    contract = {"parameters", "multiply_adds", "input_bytes", "frames", "stages"}
    assert set(printed) == contract | {"compute_io", "gradient_bytes", "trained_parameters"}


def test_the_table_for_people(model: Callable[..., Any]) -> None:
    printed = model()
    for words in ("24,327,632", "32.70 G", "27,157", "8 x 3 x 224 x 224", "res5 8, global_pool 1"):
        assert words in printed
