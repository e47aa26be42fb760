"""The progress that long work shows, on a terminal and elsewhere."""

from __future__ import annotations

import pytest

from summit_train.core.comm import World
from summit_train.core.progress import followed, shown, watched
from summit_train.core.watch import Watchdog
from tests.worlds import lines, run

PROGRAM = """
import os, pty, sys
ours = "from summit_train.core.progress import followed; list(followed('abc', 3, 'letters'))"
sys.exit(os.waitstatus_to_exitcode(pty.spawn([sys.executable, "-c", ours])))
"""


def test_a_terminal_has_a_bar_with_the_time_left() -> None:
    status, output = run(0, "-c", PROGRAM, env={"TERM": "xterm", "COLUMNS": "100"})
    assert status == 0 and "letters" in output and "3/3" in output and "0:00:00" in output, output


def test_logs_have_lines_of_rank_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("summit_train.core.progress._PLAIN_EVERY_SECONDS", 0)
    world = World()
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        world.rank, world.size = rank, size
        assert list(followed("ab", 2, "videos", world, in_logs=True)) == ["a", "b"]
    said = lines(capsys.readouterr().err)
    names = [f"{done}/2 videos{rank}" for rank in ("", " of rank 0 of 2") for done in (1, 2)]
    assert [line.split(",")[0] for line in said] == names
    assert said[1].endswith(", 0 s left")
    assert list(followed("ab", 2, "videos")) == ["a", "b"] and capsys.readouterr().err == ""


def test_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    monkeypatch.setattr("summit_train.core.progress.time.monotonic", lambda: now[0])
    with shown("videos", in_logs=True) as show:
        for done in range(1, 9):
            now[0] += 4
            show(done, 10)
    # After 12 and 24 seconds; 4 seconds an item.
    assert lines(capsys.readouterr().err) == ["3/10 videos, 28 s left", "6/10 videos, 16 s left"]


def test_the_watchdog_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, bool]] = []
    watchdog = Watchdog(World(), 60)
    monkeypatch.setattr(watchdog, "at", lambda what, waits: told.append((what, waits)))
    with watched("videos", "reading video", World(), watchdog) as progress:
        progress(1, 2)
        progress(2, 2)
    assert told == [("reading video 1 of 2", False), ("reading video 2 of 2", True)]
