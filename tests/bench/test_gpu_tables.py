"""bench/gpu/tables.py calls the product's commands, and says which of them did not give what it should."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from summit_train import __main__ as program
from tests.worlds import bench_script

outcome, tables = bench_script("gpu/outcome"), bench_script("gpu/tables")
CPU = torch.device("cpu")


def arguments(tmp_path: Path, **more: Any) -> argparse.Namespace:
    """The part's arguments."""
    given = {"out": tmp_path / "t.json", "small": True, "seconds": 60.0, "train": None, "root": None}
    return argparse.Namespace(**given | {"frames_per_second": 500.0} | more)


def test_each_table_and_figure_has_a_call(tmp_path: Path) -> None:
    for small in (False, True):
        calls = {command.name: command.words for command in tables.commands(arguments(tmp_path, small=small))}
        assert list(calls) == ["table1", "fig3a", "latency6", "fig3b", "latency5"]
        assert calls["fig3a"][:2] == ("fig3", "a") and calls["latency5"][:3] == ("latency", "--table", "5")
        assert ("model.width=0.125" in calls["table1"]) == small
        for words in calls.values():
            line = ["bench", *words, "--out", "t.png"]
            assert callable(program._parse(program._parser(line)[0], line).run_part)
    assert tables.loading(arguments(tmp_path)) == ["--frames-per-second", "500"]
    videos = tables.loading(arguments(tmp_path, train=Path("a.csv"), root=Path("v")))
    assert videos == ["data.train=a.csv", "data.val=a.csv", "data.root=v"]


def test_a_call_gives_its_text_its_values_and_its_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, rows = tmp_path / "python", [{"published": {}, "clips_per_second": {"median": 1.0}} for _ in range(6)]
    monkeypatch.setattr(sys, "executable", str(script))
    values = json.dumps({"rows": rows})
    # Stands for the program: its last word is the figure, beside which the values go.
    script.write_text(f"#!/bin/sh\nfor word; do :; done\necho '{values}' > \"${{word%.png}}.json\"\necho $*\n")
    script.chmod(0o755)
    command = tables.Command("latency6", ("latency", "--table", "6"), 6, 6)
    result = tables.called(command, tmp_path / "t.json", CPU, 60)
    assert result["error"] == "" and result["figure"] == "t_latency6.png"
    assert result["text"] == f"-m summit_train bench latency --table 6 --out {tmp_path / 't_latency6.png'}\n"
    assert tables.complete(result, command)
    for wrong in ({"published": None}, {"clips_per_second": {"median": 0.0}}):
        rows[5] = rows[0] | wrong
        assert not tables.complete({"values": {"rows": rows}}, command)
    assert not tables.complete({"values": {"rows": rows[:5]}}, command)


def test_a_call_that_fails_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tables.Command("wrong", ("latency", "--table", "6", "--repeats", "0"), 6, 6)
    monkeypatch.setattr(tables, "commands", lambda args: [wrong, wrong, wrong])
    monkeypatch.setattr(tables, "called", lambda *_: {"values": None, "error": "exit status 2: --repeats 0"})
    found = outcome.Outcome()
    tables.part(arguments(tmp_path), CPU, found)
    assert not found.passes and len(found.checks) == 3 and "--repeats 0" in found.checks[0].note
    found = outcome.Outcome()
    tables.part(arguments(tmp_path, seconds=0.5), CPU, found)
    assert found.values["skipped"] == {"wrong": "the 0.5 s were over"} and found.passes


def test_an_exit_status_and_a_call_without_an_end_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(script))
    for body, error in (
        ("echo no such table >&2; exit 2", "exit status 2: no such table"),
        ("sleep 5", "within 0.2 s"),
    ):
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        result = tables.called(tables.Command("x", (), 1, 0), tmp_path / "t.json", CPU, 0.2 if "sleep" in body else 60)
        assert error in result["error"] and result["values"] is None
