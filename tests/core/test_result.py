"""What is printed: tables, JSON, numbers as texts, progress, and no other place that prints a result."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import summit_train
from summit_train.core.comm import World
from summit_train.core.errors import UserError
from summit_train.core.progress import followed, shown, watched
from summit_train.core.result import Result, TextTable, say, show, tell
from summit_train.core.text import binary_size, counted, csv_text, duration, mean_std, noise_text
from summit_train.core.text import show as shortened
from summit_train.core.watch import Watchdog
from tests.worlds import lines, run

PACKAGE = Path(summit_train.__file__).parent


def test_the_first_columns_are_flush_left_and_the_others_flush_right() -> None:
    rows = [("run", "of", "top-1"), ("a", "x", "7.5 %"), ("long", "", "100 %")]
    assert str(TextTable(rows, left=2, indent="  ")) == "  run   of  top-1\n  a     x   7.5 %\n  long      100 %"
    assert str(TextTable([("a", ""), ("bcd", "")])) == "a\nbcd"  # no blanks at the end


def test_of_records_only_columns_of_numbers_are_flush_right_and_empty_ones_are_left_out() -> None:
    records = [{"a": "xyz", "n": "1", "none": "—"}, {"a": "b", "n": "1,000", "none": ""}]
    assert str(TextTable.of_records(records)) == "a        n\nxyz      1\nb    1,000"


def test_a_result_is_text_or_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    result = Result(["first", TextTable([("a", "1")])], values={"a": 1})
    show(result)
    assert capsys.readouterr().out == "first\na  1\n"
    show(result, as_json=True)
    assert capsys.readouterr().out == '{"a": 1}\n'
    show(Result(["on the way"]), as_json=True)
    assert capsys.readouterr().out == ""


def test_names_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    red, broken = "\x1b[31mred", "a\nb\u2028\x85\u202e.mp4"
    show(Result([red, TextTable([(broken, "Öl 走 \N{ZERO WIDTH JOINER}")])]))
    say(broken)
    tell(str(UserError(f"{red}: {broken}", "next line")).split("\n")[0])
    out, err = capsys.readouterr()
    escaped = r"a\nb\u2028\x85\u202e.mp4"
    assert out == f"\\x1b[31mred\n{escaped}  Öl 走 \N{ZERO WIDTH JOINER}\n{escaped}\n"
    assert err == f"\\x1b[31mred: {escaped}\n"
    show(Result(values={"name": red}), as_json=True)
    assert capsys.readouterr().out == '{"name": "\\u001b[31mred"}\n'


def _prints(call: ast.Call) -> bool:
    return ast.unparse(call.func) in ("print", "sys.stdout.write", "sys.stderr.write")


def test_results_are_printed_in_one_place() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        if any(map(_prints, calls)):
            found.add(str(path.relative_to(PACKAGE)))
    # The job keeper runs without the package; a probe is a process whose line the doctor reads.
    assert found == {"core/result.py", "cluster/keeper.py", "cluster/probe.py"}


def test_long_lists_say_how_long_they_are() -> None:
    assert shortened(list(range(1000))).endswith("19, … (1,000 in all)")


def test_a_csv_for_people_holds_no_formulas() -> None:
    rows = [["=cmd|'/C calc'!A0", "+1+1", "-video.mp4", "@SUM(1)", "\tx", -1.5, "-1.5", "+2", "a=b"]]
    assert csv_text(rows) == "'=cmd|'/C calc'!A0,'+1+1,'-video.mp4,'@SUM(1),'\tx,-1.5,-1.5,+2,a=b\n"
    assert csv_text(rows, exact=True) == "=cmd|'/C calc'!A0,+1+1,-video.mp4,@SUM(1),\tx,-1.5,-1.5,+2,a=b\n"
    assert csv_text([[f"+{'1' * 1_000_000}x"]])[:3] == "'+1"  # in time that grows with the length, not its square


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (0.4, "0.4 s"), (8, "8 s"), (8.06, "8.1 s"), (9.96, "10 s"),
        (59.4, "59 s"), (59.6, "1 min 00 s"), (60, "1 min 00 s"),
        (200, "3 min 20 s"), (3599.6, "1 h 00 min"), (7500, "2 h 05 min"), (360_060, "100 h 01 min"),
    ],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_one_thing_is_counted_as_one() -> None:
    numbers = (1, 1.0, 2.5, 1536, 12345.6, np.int64(123_456), np.int64(1))
    texts = ["1 clip", "1 clip", "2.5 clips", "1,536 clips", "12,346 clips", "123,456 clips", "1 clip"]
    assert [counted(number, "clip") for number in numbers] == texts
    assert [noise_text(1.0), noise_text(6.29), noise_text(1234.5)] == ["1 clip", "6.29 clips", "1,230 clips"]


def test_memory_below_one_gib_is_in_mib() -> None:
    assert [binary_size(50e6), binary_size(2**30), binary_size(14.83e9)] == ["48 MiB", "1.0 GiB", "13.8 GiB"]


def test_mean_and_deviation_as_far_as_known() -> None:
    assert [mean_std(73.807, 0.049), mean_std(73.8, None), mean_std(None, None)] == ["73.81 ± 0.05 %", "73.80 %", "—"]


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
