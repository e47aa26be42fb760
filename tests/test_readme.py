"""What README.md says against what there is: commands, files."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from summit_train.__main__ import main
from summit_train.commands import bench, data
from summit_train.spec import load_spec

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_file_that_is_named_exists() -> None:
    named = set(re.findall(r"`((?:tests|configs|jobs|docs)/[\w./-]+)`|\((docs/[\w.]+)\)", README))
    paths = {a or b for a, b in named}
    assert len(paths) >= 10
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_every_target_of_make_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"demo", "test", "setup"} <= set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.M)) <= targets


@pytest.mark.parametrize("words", sorted(set(re.findall(r"summit-train (data [a-z]+|[a-z]+)", README))))
def test_every_command_exists(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), "--help"])
    assert ended.value.code == 0


@pytest.mark.parametrize("line", re.findall(r"^summit-train (data (?:import|index|scan|split) [^#\n]*)", README, re.M))
def test_the_data_commands_options_are_taken(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    assert parser.parse_args(shlex.split(line)[1:])


@pytest.mark.parametrize("line", re.findall(r"summit-train (bench [^#\n`]*--[^#\n`]*)", README))
def test_the_benches_options_are_taken(line: str) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    _, left = parser.parse_known_args(shlex.split(line)[1:])
    assert [word for word in left if word.startswith("-")] == []


def test_the_example_is_a_spec(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(re.findall(r"```yaml\n(.*?)```", README, re.S)[0])
    assert load_spec(tmp_path / "mine.yaml").name == "mine"
