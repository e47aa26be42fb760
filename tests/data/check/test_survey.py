from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from summit_train.data.check.survey import Facts, Found, Journal, examine, spread
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


# The journal.


NOTED = Facts(9, 29.97, 32, 16, 0.3003, "h264", "ab" * 32)
BAD = "n\udcff.mp4"  # a name that is no UTF-8


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Three files of which two are noted, by two ranks."""
    for name in ("a.mp4", BAD, "c.mp4"):
        (tmp_path / name).write_text("x")
    journal = Journal(tmp_path / ".list.csv.journal", str(tmp_path))
    with journal.part(0) as add:
        add("a.mp4", NOTED)
    with journal.part(1) as add:
        add(BAD, DecodeError(BAD, "is damaged"))
    return journal


def _read(journal: Journal) -> dict[str, Found | str]:
    found = journal.read(["a.mp4", BAD, "c.mp4"])
    return {path: str(what) if isinstance(what, DecodeError) else what for path, what in found.items()}


def test_what_was_noted_is_read(journal: Journal) -> None:
    assert _read(journal) == {"a.mp4": NOTED, BAD: f"{BAD}: is damaged"}
    assert list(journal.read(["a.mp4"])) == ["a.mp4"]


def test_half_a_line_is_passed_over_and_the_next_one_is_whole(journal: Journal, tmp_path: Path) -> None:
    part = tmp_path / ".list.csv.journal" / "000000.jsonl"
    part.write_bytes(part.read_bytes()[:-9])
    assert _read(journal) == {BAD: f"{BAD}: is damaged"}
    with journal.part(0) as add:
        add("c.mp4", NOTED)
    assert _read(journal) == {BAD: f"{BAD}: is damaged", "c.mp4": NOTED}


def test_a_file_that_has_changed_is_looked_at_again(journal: Journal, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_text("more")
    (tmp_path / BAD).unlink()
    assert _read(journal) == {}


def test_a_missing_file_is_noted_as_missing(journal: Journal, tmp_path: Path) -> None:
    with journal.part(2) as add:
        add("d.mp4", DecodeError("d.mp4", "No such file or directory"))
    assert list(journal.read(["d.mp4"])) == ["d.mp4"]
    (tmp_path / "d.mp4").write_text("here it is")
    assert journal.read(["d.mp4"]) == {}


def test_removed_it_knows_nothing(journal: Journal) -> None:
    journal.remove()
    assert _read(journal) == {}
