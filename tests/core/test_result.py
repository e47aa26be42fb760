"""The renderer: aligned columns, one JSON object and nothing else, and no other place that prints a result."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import summit_train
from summit_train.core.errors import UserError
from summit_train.core.result import Result, TextTable, say, show, tell

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
