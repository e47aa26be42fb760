"""The section about a detector's boxes: its numbers by hand, the worst frames on real pictures, and the page."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from summit_train.data.manifest import ManifestRow, write_manifest
from summit_train.data.manifest.clip import Clip
from summit_train.data.video.encode import write_video
from summit_train.report import page
from summit_train.report.page import render
from summit_train.report.records import RunRecord, read_runs
from summit_train.tasks.detection.boxes import BOX, Boxes
from summit_train.tasks.detection.detections import Detections
from summit_train.tasks.detection.section import read_section
from tests.report.conftest import write_run as write_run
from tests.report.test_page import Page

# Two videos of 4 frames; in the first the object of class 0 is missed in frame 3, and a false one has the best score.
OBJECT, ELSEWHERE = (20.0, 10.0, 60.0, 50.0), (100.0, 40.0, 140.0, 80.0)
TRUTH = np.array(
    [(frame, 0, 0, OBJECT, False, frame == 3) for frame in range(4)]
    + [(frame, 0, 1, OBJECT, frame == 0, False) for frame in range(4)],
    BOX,
)
ROWS = np.array(
    [(frame, 0, 0.9 - 0.1 * frame, *OBJECT) for frame in range(3)]
    + [(3, 0, 0.95, *ELSEWHERE), (3, 0, 0.01, *OBJECT)]
    + [(frame, 1, 0.8, *OBJECT) for frame in range(4)],
    np.float32,
)


@pytest.fixture
def run(write_run, tmp_path: Path) -> Path:
    """A detector's run, whose two videos are grey pictures of 192 x 96 pixels, frame t of grey 50 t + 20."""
    greys = np.array([20, 70, 120, 170], np.uint8)[:, None, None, None] * np.ones((1, 96, 192, 3), np.uint8)
    for name in ("a.mp4", "b.mp4"):
        write_video(tmp_path / name, greys)
    write_manifest(
        tmp_path / "val.csv",
        [
            ManifestRow(name, ";", boxes=Boxes(TRUTH[own], np.array([0, 4])))
            for name, own in (("a.mp4", slice(0, 4)), ("b.mp4", slice(4, 8)))
        ],
    )
    path = write_run("run", num_classes=2, leave_out=("metrics.jsonl", "eval.json"))
    spec = yaml.safe_load((path / "spec.yaml").read_text())
    spec["data"] |= {"train": str(tmp_path / "val.csv"), "val": str(tmp_path / "val.csv")}
    spec["model"] |= {"shift_direction": "past"}
    spec |= {"task": "detection", "evaluate": {"mode": "stream", "crops": "full"}, "loss": {"kind": "detection"}}
    spec["schedule"] |= {"warmup_epochs": 0}
    (path / "spec.yaml").write_text(yaml.safe_dump(spec))
    row = {"path": "checkpoints/step_00000040.pt", "step": 40, "map": 75.0, "map_fast": None}
    final = {"map_mean": 75.0, "map_std": 0.0, "videos": 2, "mode": "stream", "crops": "full", "checkpoints": [row]}
    (path / "eval.json").write_text(json.dumps(final))
    found = Detections(np.arange(2), np.ones(2, bool), ROWS, np.array([0, 5, 9]), Boxes(TRUTH, np.array([0, 4, 8])), 2)
    found.save(path / "predictions/step_00000040.npz", [Clip("a.mp4"), Clip("b.mp4")], ("<bike>", "car"))
    return path


def test_the_numbers_of_the_section(run: Path) -> None:
    """Class 0, by score: wrong, right, right, right, right: the precision at the end, 4/5, is the highest throughout.

    All stand still, so all are slow. The false one lies in the frame of the hidden box, so it counts there too.
    """
    section = read_section(RunRecord(run))
    assert section is not None
    assert [row[:2] for row in section.motion] == [("all", 7), ("slow", 7), ("hidden", 1)]
    bike, car = section.classes
    assert (bike[0], bike[1], car[0], car[1]) == ("<bike>", 4, "car", 3)
    np.testing.assert_allclose(bike[2], [80, 80, np.nan, np.nan, 50])
    np.testing.assert_allclose(car[2][:2], [100, 100])
    assert section.motion[0][2] == pytest.approx(90)
    np.testing.assert_allclose(section.precision, 0.9)
    assert [picture.title for picture in section.pictures] == ["Precision and recall", "mAP and motion"]


def test_the_worst_frame_of_each_video_is_shown_with_its_boxes(run: Path) -> None:
    """Down to 0.7, F1 is 2 * 3 / (4 + 4); down to 0.01 it is 2 * 4 / (5 + 4), more: so nothing is missed in frame 3."""
    section = read_section(RunRecord(run))
    assert section is not None
    (bad,) = section.bad
    assert (bad.video, bad.frame, bad.missed, bad.false, bad.size) == ("a.mp4", 3, 0, 1, (192, 96))
    assert [(one.kind, *one.edges, one.text) for one in bad.boxes] == [
        ("found", 20, 10, 60, 50, "<bike>"), ("wrong", 100, 40, 140, 80, "<bike> 95 %"),
        ("right", 20, 10, 60, 50, "<bike> 1 %"),
    ]  # fmt: skip
    content = base64.b64decode(bad.picture.removeprefix("data:image/jpeg;base64,"), validate=True)
    picture = Image.open(io.BytesIO(content))
    assert picture.size == (192, 96) and np.asarray(picture).mean() == pytest.approx(170, abs=3)


def test_the_page_has_the_section_and_escapes_what_it_shows(run: Path) -> None:
    html = render(read_runs([run]))
    Page(html)
    assert "<h3>Detections</h3>" in html and "0 missed, 1 false" in html and "&lt;bike&gt; 95 %" in html
    assert "<bike>" not in html
    assert '<rect class="wrong" x="100.0" y="40.0" width="40.0" height="40.0">' in html
    assert "<h3>Average precision</h3>" not in html  # the section of classifiers


def test_without_the_videos_the_reason_is_shown_and_damage_is_noted(run: Path, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").unlink()
    html = render(read_runs([run]))
    assert "0 missed, 1 false" in html and "a.mp4" in html and "<svg" not in html
    path = run / "predictions/step_00000040.npz"
    path.write_bytes(path.read_bytes()[:200])
    assert "<h3>Detections</h3>" not in (html := render(read_runs([run])))
    assert "detections: left out" in html


def test_a_classifiers_page_has_no_such_section(write_run) -> None:
    assert page.read_section(RunRecord(write_run())) is None
