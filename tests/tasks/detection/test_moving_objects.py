"""Moving objects with boxes: the boxes fit, the speeds differ, and hidden objects look alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.core.rng import key
from summit_train.data.manifest import read_manifest
from summit_train.data.motion import patches, write_motion_set
from summit_train.tasks.detection.boxes import Boxes
from summit_train.tasks.detection.measures import motion_ious
from summit_train.tasks.detection.moving_objects import HIDDEN_FRAMES, MAX_OBJECTS, MovingObjects
from tests.data.clips import all_of, read_clip

VIDEOS = MovingObjects(difficulty=0)
Rows = NDArray[np.void]


def _tracks(boxes: Boxes) -> list[Rows]:
    return [boxes.rows[boxes.rows["track"] == track] for track in np.unique(boxes.rows["track"])]


def test_a_box_fits_its_object() -> None:
    """What differs from the background, which is the first that is drawn, in the videos with one object."""
    errors, seen = [], set()
    for number in range(30):
        frames, boxes = VIDEOS.video("train", number)
        if len(boxes.rows) > VIDEOS.num_frames:
            continue
        still = 110 + 12 * patches(VIDEOS.size, key(0, "motion", 0, number))
        moving = np.abs(frames - still).max(-1) > 14  # the noise has a deviation of 2
        for frame, row in zip(moving, boxes.rows, strict=True):
            rows, columns = np.flatnonzero(frame.any(1)), np.flatnonzero(frame.any(0))
            if not row["hidden"]:
                seen.add(int(row["label"]))
                errors.append(row["box"] - [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
    assert len(seen) >= 3 and np.abs(errors).max() < 3
    # On average the box has half of an edge's last, soft pixel on each side.
    mean = np.mean(errors, axis=0)
    assert np.abs(mean).max() < 0.5 and np.abs(mean[:2] + mean[2:]).max() < 0.2


def test_each_object_is_hidden_once_for_a_few_frames_in_mid_video() -> None:
    for number in range(12):
        _, boxes = VIDEOS.video("val", number)
        tracks = _tracks(boxes)
        assert 1 <= len(tracks) <= MAX_OBJECTS and tracks[0]["label"][0] == number % 4
        for rows in tracks:
            hidden = np.flatnonzero(rows["hidden"])
            assert HIDDEN_FRAMES[0] <= len(hidden) <= HIDDEN_FRAMES[1] and np.all(np.diff(hidden) == 1)
            assert 8 <= hidden[0] <= 12 and hidden[-1] < 18 and rows["frame"].tolist() == list(range(24))
            assert rows["box"].min() >= 0 and rows["box"].max() <= VIDEOS.size and not rows["ignored"].any()


def test_a_hidden_object_shows_nothing_of_its_class() -> None:
    """In place of the object is a round light spot, whatever its shape and its colours."""
    spots = 0
    for number in range(24):
        frames, boxes = VIDEOS.video("train", number)
        for row in boxes.rows if len(boxes.rows) == VIDEOS.num_frames else boxes.rows[:0]:
            left, top, right, bottom = row["box"]
            x, y = int((left + right) / 2), int((top + bottom) / 2)
            middle = frames[row["frame"], y - 2 : y + 3, x - 2 : x + 3].astype(float)
            if row["hidden"]:
                spots += 1
                # 80 % of 200 and 20 % of what is behind it.
                assert abs(middle.mean() - 183) < 15 and middle.std() < 12
    assert spots > 20


def test_slow_medium_and_fast_objects_all_occur() -> None:
    """Each has a fifth of the boxes."""
    found = np.concatenate([motion_ious(VIDEOS.video("train", number)[1].rows) for number in range(25)])
    slow = np.mean(found > 0.9)
    fast = np.mean(found < 0.7)
    assert min(slow, fast, 1 - slow - fast) > 0.2


def test_the_set_is_a_list_with_boxes_and_the_same_bytes_again(tmp_path: Path) -> None:
    videos = MovingObjects(size=48, num_frames=12, num_classes=3)
    for name in ("a", "b"):
        assert len(list(write_motion_set(tmp_path / name, 4, 3, videos))) == 7
    for path in sorted((tmp_path / "a").rglob("*.*")):
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()
    train = read_manifest(tmp_path / "a" / "train.csv")
    assert train.classes == ("disc", "square", "ring") and train.frame_counts.tolist() == [12] * 4
    assert isinstance(train.boxes, Boxes) and {0, 1, 2} <= set(train.boxes.rows["label"].tolist())
    frames, boxes = videos.video("train", 3)
    np.testing.assert_allclose(train.boxes.of(3)["box"], boxes.rows["box"], atol=1e-3)
    stored = read_clip(tmp_path / "a" / train.path(3), np.arange, all_of)
    assert np.abs(stored.astype(int) - frames).mean() < 10


@pytest.mark.parametrize(
    "wrong", [{"num_classes": 5}, {"num_classes": 1}, {"size": 47}, {"num_frames": 11}, {"difficulty": 2}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError):
        MovingObjects(**wrong)  # type: ignore[arg-type]
