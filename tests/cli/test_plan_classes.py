"""`plan` and `train` say which classes only one side has; a run keeps the clips of each class."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from summit_train.__main__ import main
from summit_train.data.manifest import Manifest, ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.reading import write_classes
from tests.conftest import WriteSpec


def _without(source: Manifest, label: int, path: Path) -> dict[str, str]:
    """Write the manifest without the clips of one class beside the videos' names; the data keys that read it."""
    rows = [ManifestRow(source.path(i), source.label(i)) for i in range(len(source)) if source.label(i) != label]
    path.parent.mkdir()
    write_manifest(path, rows)
    write_classes(path.parent, source.classes or ())
    return {path.stem: str(path), "root": str(Path(source.source).parent)}


def test_a_class_that_only_validation_has_is_named(
    write_spec: WriteSpec, motion_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = _without(read_manifest(motion_set / "train.csv"), 2, tmp_path / "less" / "train.csv")
    spec = str(write_spec(data=data, schedule={"epochs": 1, "warmup_epochs": 0}))
    said = "warning: 1 class (left) in data.val and not in data.train\n"
    assert main(["plan", spec]) == 0
    assert capsys.readouterr().err == said
    assert main(["plan", spec, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == said and json.loads(out)["warnings"] == ["1 class (left) in data.val and not in data.train"]
    assert main(["plan", spec, "--clips", "80"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["train", spec]) == 0
    assert capsys.readouterr().err.count(said) == 1
    counts = json.loads((tmp_path / "runs/run/plan.json").read_text())["clips_per_class"]
    assert counts["train"] == {"right": 20, "up": 20, "left": 0, "down": 20}
    assert counts["val"] == {"right": 11, "up": 10, "left": 10, "down": 10}


def test_where_both_sides_have_all_classes_nothing_is_said(
    write_spec: WriteSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(write_spec()), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and json.loads(out)["warnings"] == []
