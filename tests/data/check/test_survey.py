from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from summit_train.data.check.survey import Facts, Found, examine, spread
from summit_train.data.video.encode import write_video
from summit_train.data.video.source import DecodeError

FACTS = Facts(1, None, 2, 2, None, "x", "")


def _die_of_b(root: str, path: str) -> Found:
    if path == "b":
        os._exit(1)
    return FACTS


def _hang_at_b(root: str, path: str) -> Found:
    if path == "b":
        time.sleep(1000)
    return FACTS


def test_a_file_that_kills_its_process_is_named_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("summit_train.data.check.survey._PATHS_PER_WORKER", 2)  # a new pool is wanted behind "b"
    found = list(spread(_die_of_b, "", "abcd", workers=1))
    assert str(found[1]) == "b: decoding it kills the process"
    assert [found[0], *found[2:]] == [FACTS] * 3


def test_a_file_that_holds_its_process_is_named_and_the_rest_goes_on() -> None:
    found = list(spread(_hang_at_b, "", "abc", workers=2, seconds=1.5))
    assert str(found[1]) == "b: is not read within 1.5 s: its reader never came back"
    assert [found[0], found[2]] == [FACTS, FACTS]


def test_the_error_of_a_frame_says_which_frame(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", np.zeros((1, 16, 16, 3), np.uint8))
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "00001.jpg").touch()
    error = examine(str(tmp_path), "clip")
    assert isinstance(error, DecodeError) and str(error) == "clip: 00001.jpg is empty"
    found = examine(str(tmp_path), "a.mp4")
    assert isinstance(found, Facts) and (found.num_frames, found.codec) == (1, "h264")
