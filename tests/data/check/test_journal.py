from __future__ import annotations

from pathlib import Path

import pytest

from summit_train.data.check.survey import Facts, Found, Journal
from summit_train.data.video.source import DecodeError

FACTS = Facts(9, 29.97, 32, 16, 0.3003, "h264", "ab" * 32)
BAD = "n\udcff.mp4"  # a name that is no UTF-8


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Three files of which two are noted, by two ranks."""
    for name in ("a.mp4", BAD, "c.mp4"):
        (tmp_path / name).write_text("x")
    journal = Journal(tmp_path / ".list.csv.journal", str(tmp_path))
    with journal.part(0) as part:
        part.add("a.mp4", FACTS)
    with journal.part(1) as part:
        part.add(BAD, DecodeError(BAD, "is damaged"))
    return journal


def _read(journal: Journal) -> dict[str, Found | str]:
    found = journal.read(["a.mp4", BAD, "c.mp4"])
    return {path: str(what) if isinstance(what, DecodeError) else what for path, what in found.items()}


def test_what_was_noted_is_read(journal: Journal) -> None:
    assert _read(journal) == {"a.mp4": FACTS, BAD: f"{BAD}: is damaged"}
    assert list(journal.read(["a.mp4"])) == ["a.mp4"]


def test_half_a_line_is_passed_over_and_the_next_one_is_whole(journal: Journal, tmp_path: Path) -> None:
    part = tmp_path / ".list.csv.journal" / "000000.jsonl"
    part.write_bytes(part.read_bytes()[:-9])
    assert _read(journal) == {BAD: f"{BAD}: is damaged"}
    with journal.part(0) as again:
        again.add("c.mp4", FACTS)
    assert _read(journal) == {BAD: f"{BAD}: is damaged", "c.mp4": FACTS}


def test_a_file_that_has_changed_is_looked_at_again(journal: Journal, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_text("more")
    (tmp_path / BAD).unlink()
    assert _read(journal) == {}


def test_a_missing_file_is_noted_as_missing(journal: Journal, tmp_path: Path) -> None:
    with journal.part(2) as part:
        part.add("d.mp4", DecodeError("d.mp4", "No such file or directory"))
    assert list(journal.read(["d.mp4"])) == ["d.mp4"]
    (tmp_path / "d.mp4").write_text("here it is")
    assert journal.read(["d.mp4"]) == {}


def test_removed_it_knows_nothing(journal: Journal) -> None:
    journal.remove()
    assert _read(journal) == {}
