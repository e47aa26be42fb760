"""The most confident mistakes: chosen by hand, with frames of real videos, and without them."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from summit_train.data.manifest import ManifestRow, write_manifest
from summit_train.data.manifest.clip import Clip
from summit_train.data.video.encode import write_video
from summit_train.data.video.span import Span
from summit_train.evaluation.scores import Scores
from summit_train.report.films import Film
from summit_train.report.mistakes import most_confident, read_mistakes
from summit_train.report.page import render
from summit_train.report.records import RunRecord, read_runs
from tests.report.test_page import Page

LABELS = np.array([0, 1, 0, 1])
# Softmax of two logits: 1 / (1 + exp(-difference)). The last one is right, the one before is less sure of its mistake.
SCORES = np.array([[0.0, 2.0], [4.0, 0.0], [0.0, 1.0], [0.0, 9.0]])
"""The most confident first: 1 is taken for 0 with 98.2 %, 0 for 1 with 88.1 %, 2 for 1 with 73.1 %."""
GREYS = (10, 60, 110, 160, 210)


def test_the_most_confident_come_first_and_twelve_at_most() -> None:
    read = np.ones(4, np.bool_)
    softmax = np.exp(SCORES) / np.exp(SCORES).sum(1, keepdims=True)
    assert most_confident(Scores(np.arange(4), LABELS, SCORES, read), softmax) == [1, 0, 2]
    read[1] = False
    assert most_confident(Scores(np.arange(4), LABELS, SCORES, read), softmax) == [0, 2]
    many = np.tile([0.0, 1.0], (13, 1))
    assert most_confident(Scores(np.arange(13), np.zeros(13, int), many, np.ones(13, np.bool_)), many) == [*range(12)]


@pytest.fixture
def run(write_run, tmp_path: Path) -> Path:
    """A run whose four clips are spans of one video of 20 x 10 frames of growing grey, the second backwards."""
    pictures = np.repeat(np.array(GREYS, np.uint8), 4)[:, None, None, None] * np.ones((1, 96, 192, 3), np.uint8)
    write_video(tmp_path / "grey.mp4", pictures)
    clips = [Clip("grey.mp4", Span(0, 20)), Clip("grey.mp4", Span(0, 20), True), Clip("no.mp4"), Clip("grey.mp4")]
    write_manifest(
        tmp_path / "val.csv",
        [
            ManifestRow(clip.path, int(label), reversed=clip.is_reversed, span=clip.span)
            for clip, label in zip(clips, LABELS, strict=True)
        ],
    )
    data = {"num_frames": 8, "train": str(tmp_path / "val.csv"), "val": str(tmp_path / "val.csv")}
    spec = {"data": data, "schedule": {"epochs": 4, "warmup_epochs": 0}}
    path = write_run("run", num_classes=2, leave_out=("metrics.jsonl",), spec=spec)
    scores = Scores(np.arange(4), LABELS, SCORES, np.ones(4, np.bool_))
    scores.save(path / "predictions/step_00000040.npz", clips, ("<quiet>", "loud"))
    return path


def greys(film: Film) -> list[int]:
    """The mean grey of each frame of a film of sixteen."""
    picture = Image.open(io.BytesIO(base64.b64decode(film.uri.removeprefix("data:image/jpeg;base64,"), validate=True)))
    assert (film.count, film.width, film.height) == (16, 192, 96) and picture.size == (16 * 192, 96)
    pixels = np.asarray(picture)
    return [round(float(pixels[20:76, i * 192 + 20 : i * 192 + 172].mean())) for i in range(16)]


@pytest.mark.usefixtures("undrawn")
def test_frames_are_spread_over_the_clip_in_its_direction(run: Path) -> None:
    found = read_mistakes(RunRecord(run))
    assert len(found) == 3
    backwards, forwards, missing = found
    assert (backwards.predicted, backwards.true, backwards.score, backwards.own_score) == (
        "<quiet>", "loud", "98.2 %", "1.8 %",
    )  # fmt: skip
    shown = [GREYS[20 * (2 * i + 1) // 32 // 4] for i in range(16)]  # each grey has four of the 20 frames
    assert greys(forwards.film) == pytest.approx(shown, abs=4)
    assert greys(backwards.film) == pytest.approx(shown[::-1], abs=4)
    assert missing.film.uri == "" and "no.mp4" in missing.film.reason
    page = render(read_runs([run]))
    assert page.count('src="data:image/jpeg;base64,') == 2 and "taken for <b>&lt;quiet&gt;</b> (98.2 %)" in page
    assert "no.mp4" in Page(page).text and "<quiet>" not in page


@pytest.mark.usefixtures("undrawn")
def test_without_the_videos_the_mistakes_are_listed_with_the_reason(run: Path, tmp_path: Path) -> None:
    (tmp_path / "grey.mp4").unlink()
    found = read_mistakes(RunRecord(run))
    assert "grey.mp4" in found[0].film.reason
    (tmp_path / "val.csv").unlink()
    found = read_mistakes(RunRecord(run))
    assert "val.csv not found" in found[0].film.reason
    page = Page(render(read_runs([run])))
    assert "because the videos cannot be read here: data.val:" in page.text and "98.2 %" in page.text


def test_another_list_than_that_of_the_evaluation_shows_no_wrong_video(run: Path, tmp_path: Path) -> None:
    lines = (tmp_path / "val.csv").read_text().splitlines()
    (tmp_path / "val.csv").write_text("\n".join([lines[0], *lines[:0:-1]]) + "\n")
    found = read_mistakes(RunRecord(run))
    assert "has changed since the evaluation" in found[0].film.reason


@pytest.mark.usefixtures("undrawn")
def test_several_runs_and_runs_without_scores_have_no_mistakes(run: Path, write_run) -> None:
    other = write_run("other", leave_out=("metrics.jsonl",))
    assert read_mistakes(RunRecord(other)) == []
    assert "most confident mistakes" not in render(read_runs([run, other]))
