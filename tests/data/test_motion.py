from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.data.manifest import read_manifest
from summit_train.data.motion import MotionSet, write_motion_set
from tests.data.clips import all_of, read_clip


def _places(frames: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The moving object's centre in each frame, as angles (T, 2) of x and y around the torus."""
    moving = np.abs(frames - np.median(frames, axis=0)).sum(-1) > 60  # the background stands still
    angles = 2 * np.pi * np.arange(frames.shape[1]) / frames.shape[1]
    x = (np.exp(1j * angles) * moving.sum(1)).sum(-1)
    y = (np.exp(1j * angles) * moving.sum(2)).sum(-1)
    places: NDArray[np.float64] = np.angle(np.stack([x, y], axis=1))
    return places


@pytest.mark.parametrize("num_classes", [2, 4, 7])
def test_the_object_moves_as_its_class_says(num_classes: int) -> None:
    videos = MotionSet(num_classes=num_classes, difficulty=0)
    for number in range(2 * num_classes):
        frames, label = videos.video("train", number)
        assert label == number % num_classes
        places = _places(frames)
        steps = np.angle(np.exp(1j * (places[1:] - places[:-1])))  # the short way around
        right, down = np.median(steps, axis=0)
        angle = 2 * math.pi * label / num_classes
        turned = math.remainder(math.atan2(-down, right) - angle, 2 * math.pi)
        assert abs(turned) < 0.3, (number, turned)


def test_the_first_frame_does_not_know_the_class() -> None:
    # Video 2 moves left among four directions and right among two; all else is drawn from the same key.
    left, label = MotionSet(num_classes=4, difficulty=0.1).video("train", 2)
    right, other = MotionSet(num_classes=2, difficulty=0.1).video("train", 2)
    assert (label, other) == (2, 0)
    np.testing.assert_array_equal(left[0], right[0])
    assert (left[8] != right[8]).mean() > 0.1


@pytest.mark.parametrize(("num_classes", "names"), [(2, ["red-blue", "blue-red"]), (6, None)])
def test_the_flashes_come_in_the_order_of_the_class(num_classes: int, names: list[str] | None) -> None:
    videos = MotionSet(kind="order", num_classes=num_classes, difficulty=0)
    assert len(set(videos.classes)) == num_classes and (names is None or list(videos.classes) == names)
    for number in range(2 * num_classes):
        frames, label = videos.video("val", number)
        strongest = {"red": 0, "green": 1, "blue": 2}
        seen: list[int] = []
        for frame in frames.astype(int):
            pure = np.array([(frame[..., c] - np.delete(frame, c, -1).max(-1) > 60).sum() for c in range(3)])
            if pure.max() > 20 and (not seen or seen[-1] != pure.argmax()):
                seen.append(int(pure.argmax()))
        assert seen == [strongest[colour] for colour in videos.classes[label].split("-")], number


def test_the_order_says_nothing_when_the_frames_are_shuffled() -> None:
    # Each colour is on for as long in either class, on average.
    videos = MotionSet(kind="order", num_classes=2, difficulty=0, size=16)
    on = np.zeros((2, 2))
    for number in range(200):
        frames, label = videos.video("train", number)
        red_minus_blue = (frames[..., 0].astype(int) - frames[..., 2])[..., None]
        on[label] += [(red_minus_blue > 60).any((1, 2)).sum(), (red_minus_blue < -60).any((1, 2)).sum()]
    np.testing.assert_allclose(on[0], on[1], rtol=0.1)


def test_the_same_key_draws_the_same_video_and_others_do_not() -> None:
    videos = MotionSet(size=32, num_frames=8)
    frames, _ = videos.video("train", 5)
    np.testing.assert_array_equal(frames, MotionSet(size=32, num_frames=8).video("train", 5)[0])
    other_seed = MotionSet(size=32, num_frames=8, seed=1)
    for other, _ in (videos.video("val", 5), videos.video("train", 9), other_seed.video("train", 5)):
        assert (frames != other).mean() > 0.5


def test_a_set_is_whole_balanced_readable_and_what_was_drawn(tmp_path: Path) -> None:
    videos = MotionSet(num_frames=9, difficulty=0)
    rows, again = (list(write_motion_set(tmp_path / name, 10, 5, videos)) for name in ("set", "again"))
    assert rows == again
    for path in (tmp_path / "set").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(tmp_path / "set")).read_bytes()
    train, val = (read_manifest(tmp_path / "set" / f"{split}.csv") for split in ("train", "val"))
    assert (len(rows), len(train), len(val)) == (15, 10, 5)
    assert train.classes == ("right", "up", "left", "down")
    assert sorted(Counter(train.labels[index] for index in range(10)).values()) == [2, 2, 3, 3]
    assert all(train.num_frames(index) == 9 for index in range(10))
    paths = {manifest.path(index) for manifest in (train, val) for index in range(len(manifest))}
    assert paths == {f"videos/{path.name}" for path in (tmp_path / "set" / "videos").iterdir()}
    for row in rows[::3]:
        split, number = row.path[len("videos/") :].removesuffix(".mp4").split("_")
        drawn, label = videos.video(split, int(number))
        read = read_clip(tmp_path / "set" / row.path, np.arange, all_of, row.num_frames)
        assert row.label == label
        assert np.abs(read.astype(int) - drawn).mean() < 6  # half of it is colour at half resolution


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_classes": 1}, "choose 2 to 8"),
        ({"num_classes": 9}, "choose 2 to 8"),
        ({"kind": "order", "num_classes": 4}, "choose 2 or 6"),
        ({"size": 8}, "16 pixels"),
        ({"num_frames": 3}, "4 frames"),
        ({"difficulty": 1.5}, "0 to 1"),
        ({"difficulty": math.nan}, "0 to 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MotionSet(**values)  # type: ignore[arg-type]


def test_a_split_without_a_video_of_each_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train 4, val 3"):
        next(write_motion_set(tmp_path / "set", 4, 3, MotionSet()))
    assert not (tmp_path / "set").exists()
