"""The figure of a fusion, and the confusion matrix as a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from summit_train.report.confusion import confusion_of
from summit_train.report.fusion import draw_gains


def values_of(gains: list[float]) -> dict[str, Any]:
    rows = [
        {"label": i, "name": f"c{i}", "videos": 4, "top1": 50 + gain, "best_top1": 50.0, "gain": gain}
        for i, gain in enumerate(gains)
    ]
    runs = [{"name": name, "top1": 50.0, "weight": weight} for name, weight in (("_rgb $", 1.0), ("flow", 1.5))]
    return {"classes": rows, "runs": runs, "best": "_rgb $", "top1": 60.0, "videos": 8, "scores": "logits"}


def texts(path: Path) -> list[str]:
    # Text is drawn as paths; matplotlib writes a comment beside each line.
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def test_every_class_from_the_largest_gain_to_the_largest_loss(tmp_path: Path) -> None:
    one, other = tmp_path / "one.svg", tmp_path / "other.svg"
    for path in (one, other):
        draw_gains(path, values_of([-25.0, 0.0, 50.0]))
    assert one.read_bytes() == other.read_bytes()
    drawn = texts(one)
    assert [text for text in drawn if text.endswith("(4)")] == ["c2 (4)", "c1 (4)", "c0 (4)"]
    assert {"50.0 → 100.0 %", "50.0 → 25.0 %", "50.0 %"} <= set(drawn)
    said = " ".join(drawn)
    for words in ("_rgb $, the best single run", "flow 50.00 % (weight 1.5)", "mean of logits"):
        assert words in said


def test_of_many_classes_both_ends(tmp_path: Path) -> None:
    draw_gains(tmp_path / "a.svg", values_of([float(i) for i in range(-50, 51)]))
    drawn = texts(tmp_path / "a.svg")
    names = [text for text in drawn if text.endswith("(4)")]
    assert names[:15] == [f"c{i} (4)" for i in range(100, 85, -1)] and names[15:] == [
        f"c{i} (4)" for i in range(14, -1, -1)
    ]
    assert "Left out in the middle: 71 of 101 classes." in " ".join(drawn)


@pytest.mark.parametrize("num_classes", [2, 31])
def test_the_confusion_matrix_as_a_file(tmp_path: Path, num_classes: int) -> None:
    labels = np.arange(num_classes)
    confusion = confusion_of("x", labels, np.eye(num_classes), labels >= 0, ())
    confusion.draw(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size[0] > 300 and len(picture.getcolors(1 << 24) or []) > 10
