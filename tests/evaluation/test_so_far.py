"""The file that keeps the scores of an evaluation that was stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from summit_train.data.batches.loader import BadClip
from summit_train.evaluation.so_far import SoFar, forget_so_far, so_far_path

BAD = BadClip(7, "seven.mp4", "is cut", None)


def _kept(path: Path) -> SoFar:
    so_far = SoFar(path, "views")
    so_far.add([4, 7], [np.array([1 / 3, 1e300]), np.full(2, np.nan)], [BAD])
    so_far.save()
    return so_far


def test_what_is_kept_comes_back_to_the_bit(tmp_path: Path) -> None:
    path = so_far_path(tmp_path, "step_00000010")
    kept, found = _kept(path), SoFar(path, "views")
    assert list(found.results) == [4, 7] and found.bad == [BAD]
    assert all(np.array_equal(found.results[video], kept.results[video], equal_nan=True) for video in (4, 7))


def test_what_depends_on_something_else_or_is_damaged_is_not_taken_over(tmp_path: Path) -> None:
    path = so_far_path(tmp_path, "step_00000010")
    _kept(path)
    assert SoFar(path, "other views").results == {}
    for content in (path.read_bytes()[:-100], b"", b"no zip file at all"):
        path.write_bytes(content)
        assert SoFar(path, "views").results == {}


def test_nothing_is_left_of_what_is_forgotten(tmp_path: Path) -> None:
    path = so_far_path(tmp_path, "step_00000010")
    _kept(path)
    path.with_suffix(".npz").touch()
    forget_so_far(tmp_path)
    assert [left.name for left in path.parent.iterdir()] == ["step_00000010.npz"]


def test_without_scores_or_a_file_nothing_is_written(tmp_path: Path) -> None:
    SoFar(tmp_path / "none.partial", "views").save()
    so_far = SoFar()
    so_far.add([1], [np.zeros(2)], [])
    so_far.save()
    assert list(tmp_path.iterdir()) == []
