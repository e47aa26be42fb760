"""`summit-train configs`: every shipped file is listed with what its opening comment says of it."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from summit_train.cli.configs import ShippedFile
from summit_train.spec.source import locate, shipped_names
from tests.worlds import Say

ROOT = Path(__file__).resolve().parents[2]
MINE = """\
# A network, on two sets (2 h): the first sentence. Another one.
# Expect:   top-1 74.12 % (+- 0.11, the mean); 74.1 % elsewhere.
# Cost:     49.9 node-hours, of
#           two nodes
# Source:   Lin et al. (2019), "A title", section 4
# Commands: none: nothing
name: mine
"""


@cache
def files() -> dict[str, ShippedFile]:
    return {name: ShippedFile.read(name) for name in shipped_names()}


def test_the_fields_of_a_header_begin_with_their_short_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    monkeypatch.setattr("summit_train.cli.configs.locate", lambda name: tmp_path / "mine.yaml")
    what = "A network, on two sets (2 h): the first sentence"
    found = ShippedFile("shipped:kinetics/mine", "spec", what, "top-1 74.12 %", "49.9 node-hours", "Lin et al. (2019)")
    assert ShippedFile.read("kinetics/mine") == found
    (tmp_path / "mine.yaml").write_text("# A base.\nseed: 0\n")
    dash = "\N{EM DASH}"
    assert ShippedFile.read("kinetics/base") == ShippedFile("shipped:kinetics/base", "base", "A base", dash, dash, dash)
    assert [ShippedFile.read(name).kind for name in ("own", "sites/own", "sweeps/own")] == ["preset", "site", "sweep"]


def test_each_shipped_file_says_what_it_is_in_a_sentence() -> None:
    for name, file in files().items():
        assert 10 < len(file.what) < 240 and "Source" not in file.what, name
        if file.kind in ("spec", "sweep"):
            known = ("top-1 ", "mAP ", "not measured", "not published", "not known")
            assert file.accuracy.startswith(known) and len(file.accuracy) <= 14, name
            assert re.search(r"\d.* (node-)?(hours|minutes?)\b|not known", file.cost) and len(file.cost) <= 30, name
            assert 10 < len(file.source) <= 30, name
            opening = locate(f"shipped:{name}").read_text(encoding="utf-8").partition("\nname:")[0]
            assert "make " not in opening, f"{name}: a wheel has no Makefile"


def test_all_are_listed_by_kind_in_lines_that_fit(say: Say) -> None:
    status, out, err = say("configs")
    lines = out.splitlines()
    assert (status, err) == (0, "") and max(map(len, lines)) <= 120
    assert [line.split()[0] for line in lines if line.startswith("shipped:")] == [
        f"shipped:{name}"
        for kind in ("spec", "preset", "sweep", "site", "machine", "base")
        for name, file in files().items()
        if file.kind == kind
    ]
    row = next(line for line in lines if line.startswith("shipped:kinetics/tsm_r50_8f "))
    assert re.split(r"\s{2,}", row)[1:] == ["top-1 74.12 %", "49.9 node-hours", "Lin et al. (2019)"]
    assert lines[lines.index(row) + 1].startswith("    The baseline: TSM, ResNet-50, 8 frames")


def test_a_word_filters_names_and_descriptions(say: Say) -> None:
    values = json.loads(say("configs", "JESTER", "--json")[1])["configs"]
    assert {one["name"] for one in values} == {f"shipped:{n}" for n in files() if "jester" in n} | {
        "shipped:tsm_recipe"
    }
    assert values[0].keys() == {"name", "kind", "what", "accuracy", "cost", "source"}


def test_a_name_prints_the_file(say: Say) -> None:
    text = (ROOT / "configs/kinetics/base.yaml").read_text()
    assert say("configs", "shipped:kinetics/base") == (0, text, "")
    (row,) = json.loads(say("configs", "shipped:kinetics/base", "--json")[1])["configs"]
    assert row == {**files()["kinetics/base"]._asdict(), "name": "shipped:kinetics/base", "text": text}
