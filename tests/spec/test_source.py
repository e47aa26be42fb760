"""YAML with places: every value knows its file and line, and what YAML would swallow is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from summit_train.cluster.site import load_site
from summit_train.core.errors import UserError
from summit_train.scaling.machines import load_machine
from summit_train.spec import load_spec, source
from summit_train.spec.source import Tree, locate, put, read_tree, shipped, shipped_names, to_yaml
from summit_train.sweep.grid import load_sweep

# No deadline and no limit on drawing: how fast the machine is, is not the question.
LAWS = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _read(tmp_path: Path, text: str, *overrides: str) -> Tree:
    return read_tree(_write(tmp_path / "spec.yaml", text), overrides)


def _refused(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        _read(tmp_path, text, *overrides)
    message = str(caught.value).replace(f"{tmp_path}/", "")
    assert "\n" not in message
    return message


def _place(tree: Tree, tmp_path: Path, dotted: str) -> str:
    return tree.place(tuple(dotted.split("."))).replace(f"{tmp_path}/", "").replace("sub/../", "")


def _assert_places(tree: Tree, tmp_path: Path, places: dict[str, str]) -> None:
    assert {dotted: _place(tree, tmp_path, dotted) for dotted in places} == places


def test_every_key_knows_its_line(tmp_path: Path) -> None:
    tree = _read(tmp_path, "# a comment\n\na: 1\nb:\n  c: 2\n\n  d: {e: 3,\n      f: 4}\ng: |\n  text\n  text\nh: 5\n")
    assert tree.values == {"a": 1, "b": {"c": 2, "d": {"e": 3, "f": 4}}, "g": "text\ntext\n", "h": 5}
    lines = {"a": 3, "b": 4, "b.c": 5, "b.d": 7, "b.d.e": 7, "b.d.f": 8, "g": 9, "h": 12}
    lines |= {"b.missing": 4, "missing.too": 1}  # a key that is not there has the place of its section
    _assert_places(tree, tmp_path, {dotted: f"spec.yaml:{line}" for dotted, line in lines.items()})
    tree = _read(tmp_path, "runs:\n  - {x: 1}\n  - x: 2\n    y: 3\nlist: [\n  1,\n  2]\n")
    lines = {"runs.0": 2, "runs.0.x": 2, "runs.1": 3, "runs.1.y": 4, "list.1": 7}
    _assert_places(tree, tmp_path, {dotted: f"spec.yaml:{line}" for dotted, line in lines.items()})


BASES = {
    "top.yaml": "a: {x: 0, y: 0, z: 0}\nlist: [1, 2, 3]\nonly: top\n",
    "sub/middle.yaml": "extends: ../top.yaml\n\na:\n  y: 1\n  z: 1\n",
    "one.yaml": "a: 1\nb: 1\nc: {d: 1}\n",
    "two.yaml": "b: 2\nc: {e: 2}\n",
    "plus.yaml": "a: {x: [1, 2]}\n",
    "plus_more.yaml": "extends: plus.yaml\n+new: [{k: 3}]\na:\n  +x:\n    - 4\n",
    "base.yaml": "a: {x: 0}\nb: {x: 0}\n",
    "left.yaml": "extends: base.yaml\na: {x: 1}\n",
    "right.yaml": "extends: base.yaml\nb: {x: 2}\nc: 1\n",
    "alias.yaml": "a: {x: &x {y: 0}, z: *x}\n",
}


@pytest.mark.parametrize(
    ("text", "values", "places"),
    [
        (
            "extends: sub/middle.yaml\na:\n  z: 2\nlist: [4]\n",
            {"a": {"x": 0, "y": 1, "z": 2}, "list": [4], "only": "top"},
            {"a.x": "top.yaml:1", "a.y": "sub/middle.yaml:4", "a.z": "spec.yaml:3", "list": "spec.yaml:4",
             "only": "top.yaml:3"},
        ),
        # The later of several wins.
        ("extends: [one.yaml, two.yaml]\n", {"a": 1, "b": 2, "c": {"d": 1, "e": 2}}, {"b": "two.yaml:1"}),
        # A plus adds to the list of what is extended.
        (
            "extends: plus_more.yaml\n\n+new:\n  - {k: 5}\n",
            {"a": {"x": [1, 2, 4]}, "new": [{"k": 3}, {"k": 5}]},
            {"a.x.1": "plus.yaml:1", "a.x.2": "plus_more.yaml:4", "new.1.k": "spec.yaml:3"},
        ),
        # A base that is reached twice keeps its values.
        ("extends: [right.yaml, left.yaml]\n", {"a": {"x": 1}, "b": {"x": 0}, "c": 1}, {}),
        # A section that is an alias is changed alone.
        ("extends: alias.yaml\na: {x: {y: 1}}\n", {"a": {"x": {"y": 1}, "z": {"y": 0}}}, {}),
    ],
)  # fmt: skip
def test_extends_lays_files_over_each_other(
    tmp_path: Path, text: str, values: dict[str, Any], places: dict[str, str]
) -> None:
    for name, base in BASES.items():
        _write(tmp_path / name, base)
    tree = _read(tmp_path, text)
    assert tree.values == values
    assert bool(tree.notes) == ("list" in values), "a list that is replaced is noted"
    _assert_places(tree, tmp_path, places)


def test_what_ships_is_named_from_any_folder(tmp_path: Path) -> None:
    date = (shipped("configs") / "date.yaml").read_text()
    assert _read(tmp_path, "extends: shipped:date\n").values == _read(tmp_path, date).values
    assert read_tree("shipped:motion/tsm").values == read_tree(shipped("configs") / "motion/tsm.yaml").values
    assert locate("./shipped:date") == Path("shipped:date") and locate("a.yaml", tmp_path) == tmp_path / "a.yaml"
    assert {"date", "kinetics/tsm_r50_8f", "sites/summit", "sweeps/table3"} <= set(shipped_names())


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("shipped:dte", "shipped:dte not found; did you mean shipped:date? `summit-train configs` lists what ships"),
        ("shipped:configs/date.yaml", "did you mean shipped:date? `summit-train configs`"),
        ("shipped:tsm_r50_8f_1536gpu", "did you mean shipped:kinetics/tsm_r50_8f_1536gpu? "),
        ("shipped:../../setup", "shipped:../../setup not found; `summit-train configs` lists what ships"),
        ("kinetics/tsm_r50_8f", "No such file or directory; did you mean shipped:kinetics/tsm_r50_8f?"),
        ("configs/kinetics/tsm_r50_8f.yaml", "did you mean shipped:kinetics/tsm_r50_8f?"),
        ("mine.yaml", "give the path of a YAML spec, or shipped:NAME (`summit-train configs`)"),
    ],
)
def test_a_name_that_does_not_ship_and_a_path_that_looks_like_one_get_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        read_tree(word)
    assert message in str(caught.value)


def test_values_are_what_they_look_like(tmp_path: Path) -> None:
    for text, value in (
        ("1e-4", 1e-4), ("1.0e-4", 1e-4), ("1.0e4", 1e4), ("1.e4", 1e4), (".5e1", 5.0), ("-1E+2", -100.0),
        ("+2e0", 2.0), ("0.01", 0.01), ("7", 7), ("true", True), ("null", None), ("~", None), ("", None),
        ("'1e-4'", "1e-4"), ("1e", "1e"), ("e4", "e4"), ("1e4x", "1e4x"), ("1.2.3e4", "1.2.3e4"), (".e4", ".e4"),
        ("no_number", "no_number"), ("[1e3, a]", [1000.0, "a"]),
        # YAML 1.1 would make 86400, 90, 45.5, a date, a moment, a type and an error of these.
        ("24:00:00", "24:00:00"), ("1:30", "1:30"), ("0:45.5", "0:45.5"), ("2026-01-31", "2026-01-31"),
        ("2026-01-31T10:00:00Z", "2026-01-31T10:00:00Z"), ("=", "="), ("2026-13-01", "2026-13-01"),
        ("y", "y"), ("N", "N"), ("one_1", "one_1"), ("1_a", "1_a"), ("_1", "_1"), ("'no'", "no"), ("'010'", "010"),
        ("0", 0), ("-0.5", -0.5), ("00.5", 0.5), ("0x1F", 31), ("+12", 12), ("5.", 5.0), ("-.inf", -math.inf),
        ("True", True), ("FALSE", False), ("NULL", None),
    ):  # fmt: skip
        for tree in (_read(tmp_path, f"a: {text}\n"), _read(tmp_path, "a: 0\n", f"a={text}")):
            found = tree.values["a"]
            assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("words", "right"),
    [
        ("yes No ON off", "true or false"),
        ("010 -017 00 08 0_1 0b11 0o17 0x1_F", "a decimal number without _ and leading zeros"),
        ("1_000 -1_0 1_ 1_0.5 1.5_0 .5_0 1_0e3", "a decimal number without _ and leading zeros"),
    ],
)
def test_words_that_versions_of_yaml_read_in_two_ways_are_refused(tmp_path: Path, words: str, right: str) -> None:
    for word in words.split():
        problem = f"{word!r} must be {right}, or text in quotes"
        assert _refused(tmp_path, f"a: 1\nb: [{word}]\n") == f"spec.yaml:2: not valid YAML: {problem}"
        with pytest.raises(UserError) as caught:
            _read(tmp_path, "b: 1\n", f"b={word}")
        assert str(caught.value).endswith(problem)
        assert _read(tmp_path, to_yaml({"b": word, word: 1})).values == {"b": word, word: 1}


ADDS = "+ must be a list that is added to a list, got"
EXTENDS = "extends: must be a path, shipped:NAME or a list of them, got"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1: must be a mapping of keys to values, got NoneType"),
        ("- a\n", "1: must be a mapping of keys to values, got list"),
        ("just words", "1: must be a mapping of keys to values, got str"),
        ("a: 1\nb: 2\na: 3\n", "3: not valid YAML: the key 'a' is given twice"),
        ("a: 1\nb:\n  c: 2\n  c: 2\n", "4: not valid YAML: the key 'c' is given twice"),
        ("a: 1\n+a: [2]\n", "2: not valid YAML: the key 'a' is given twice"),
        ("a: 1\n? [b, c]\n: 2\n", "2: not valid YAML: a key must be a word"),
        ("a: 1\n\tb: 2\n", "2: not valid YAML: "),
        ("a: 1\n---\nb: 2\n", "2: not valid YAML: "),
        ("a: 1\nb: *nothing\n", "2: not valid YAML: found undefined alias 'nothing'"),
        ("a: 1\nb: x\x01y\n", "2: not valid YAML: the character U+0001 is not text"),
        ("a: 1\nb: !!timestamp 2020-13-01\n", "2: not valid YAML: '2020-13-01' is not a valid timestamp"),
        ("a: 1\nb: !!int x\n", "2: not valid YAML: 'x' is not a valid int"),
        ("a: 1\nb: !!bool perhaps\n", "2: not valid YAML: 'perhaps' is not a valid bool"),
        ("a: " + "[" * 1200, "1: not valid YAML: it is nested too deeply"),
        ("a: 1\nb: 0x" + "f" * 5000 + "\n", "2: not valid YAML: '0xffffff"),
        ("a: 1\nb: !!int 1" + ":1" * 5000 + "\n", "2: not valid YAML: '1:1:1:1"),
        ("extends: base.yaml\n+a: [2]\n", f"2: +a: {ADDS} [2] added to 1"),
        ("extends: base.yaml\n+b: 2\n", f"2: +b: {ADDS} 2 added to [1]"),
        ("+c: {x: 1}\n", f"1: +c: {ADDS} {{'x': 1}} added to None"),
        ("extends: 3\n", f"1: {EXTENDS} 3"),
        ("extends: [1]\n", "1: extends:"),
        ("a: 1\nextends: no/such.yaml\n", "2: extends: file no/such.yaml not found"),
        ("extends: [one.yaml, one.yaml]\n", "1: extends: each file may be named once, got ['one.yaml', 'one.yaml']"),
        ("extends: configs/date.yaml\n", "1: extends: file configs/date.yaml not found; did you mean shipped:date?"),
        ("a: 1\nextends: [shipped:date, shipped:dte]\n", "2: extends: shipped:dte not found; did you mean shipped:da"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    _write(tmp_path / "base.yaml", "a: 1\nb: [1]\n")
    _write(tmp_path / "one.yaml", "a: 1\n")
    refused = _refused(tmp_path, text)
    assert refused.startswith(f"spec.yaml:{message}") and len(refused) < 250


def test_a_circle_and_a_wrong_base_are_named(tmp_path: Path) -> None:
    _write(tmp_path / "one.yaml", "extends: two.yaml\n")
    _write(tmp_path / "two.yaml", "extends: ./one.yaml\n")
    circle = _refused(tmp_path, "extends: one.yaml\n")
    assert "circle: spec.yaml -> one.yaml -> two.yaml -> one.yaml" in circle
    assert "circle: spec.yaml -> spec.yaml" in _refused(tmp_path, "extends: spec.yaml\n")
    _write(tmp_path / "base.yaml", "a: 1\nb: [\n")
    assert _refused(tmp_path, "extends: base.yaml\n").startswith("base.yaml:3: not valid YAML")


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("a", "must have the form section.key=value"),
        ("=1", "must have the form section.key=value"),
        ("a..b=1", "must have the form section.key=value"),
        (".a=1", "must have the form section.key=value"),
        ("a.b=1", "a is a value, not a section"),
        ("a=[", "the value is not valid YAML, quote it"),
        ("a={x: 1, x: 2}", "the key 'x' is given twice"),
        ("a=\x01", "the character U+0001 is not text"),
        ("a=\udcff", "the character U+DCFF is not text"),  # a byte of the command line that is no UTF-8
    ],
)
def test_an_override_of_the_wrong_form_is_named(tmp_path: Path, override: str, part: str) -> None:
    message = _refused(tmp_path, "a: 1\n", override)
    assert message.startswith(f"override {override!r}: ") and part in message


def test_yaml_runs_no_code(tmp_path: Path) -> None:
    target = tmp_path / "made by yaml"
    message = _refused(tmp_path, f"a: !!python/object/apply:pathlib.Path.touch ['{target}']\n")
    assert message.startswith("spec.yaml:1: not valid YAML: could not determine a constructor")
    _refused(tmp_path, "a: 1\n", f"a=!!python/object/apply:os.mkdir ['{target}']")
    assert not target.exists()


def test_keys_are_text_whatever_yaml_sees_in_them(tmp_path: Path) -> None:
    tree = _read(tmp_path, "on: 1\n1: 2\n2020-01-01: 3\nnull: 4\n'on ': 5\n")
    assert tree.values == {"on": 1, "1": 2, "2020-01-01": 3, "null": 4, "on ": 5}
    assert _place(tree, tmp_path, "2020-01-01") == "spec.yaml:3"


def test_anchors_and_merges_work_and_a_key_may_stand_beside_a_merged_one(tmp_path: Path) -> None:
    text = "a: {deep: {b: &b {<<: &c {x: 1, y: 1}, x: 2}}}\nd: {<<: *b, z: 3}\ne: *c\n"
    tree = _read(tmp_path, text)
    assert tree.values == {
        "a": {"deep": {"b": {"x": 2, "y": 1}}}, "d": {"x": 2, "y": 1, "z": 3}, "e": {"x": 1, "y": 1},
    }  # fmt: skip


LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))


READERS = (read_tree, load_spec, load_sweep, load_site, load_machine)


def test_aliases_that_multiply_are_refused_with_their_line(tmp_path: Path) -> None:
    """9^9 values in ten lines. a5 is 9^5 lists of one word (118,098 values) and the lists around them (7,381)."""
    path = _write(tmp_path / "laughs.yaml", LAUGHS)
    for read in READERS:
        with pytest.raises(UserError) as caught:
            read(path)
        assert f"{path}:6: not valid YAML: more than 100,000 values, with aliases (*) written out" in str(caught.value)


def test_aliases_that_multiply_are_refused_wherever_they_stand(tmp_path: Path) -> None:
    lists = LAUGHS.replace("\n", ", ").rstrip(", ")
    assert "spec.yaml:2: not valid YAML: more than 100,000" in _refused(tmp_path, f"a: 1\nb: {{{lists}}}\n")
    assert "quote it: more than 100,000 values" in _refused(tmp_path, "a: 1\n", f"b={{{lists}}}")
    merges = "a0: &a0 {k: x}\n" + "".join(
        f"a{n}: &a{n} {{{', '.join(f'k{i}: *a{n - 1}' for i in range(9))}}}\n" for n in range(1, 10)
    )
    assert "spec.yaml:6: not valid YAML: more than 100,000" in _refused(tmp_path, merges)


def test_a_file_far_too_large_is_refused_before_it_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "large.yaml", "list: [" + "1," * 500_000 + "]\n")
    monkeypatch.setattr("summit_train.spec.source._SpecLoader", None)
    for read in READERS:
        with pytest.raises(UserError, match=r"large\.yaml.*: larger than 1,000,000 bytes"):
            read(path)
    with pytest.raises(UserError, match="/dev/zero: cannot be read: is not a regular file"):
        read_tree("/dev/zero")
    (tmp_path / "self").symlink_to("self")
    with pytest.raises(UserError, match="self: cannot be read: Too many levels of symbolic links"):
        read_tree(tmp_path / "self")


def _diamonds(tmp_path: Path, levels: int) -> str:
    """Two files a level, each of which extends both of the level below."""
    for level in range(levels):
        for side in "ab":
            below = f"extends: [a{level - 1}.yaml, b{level - 1}.yaml]\n" if level else ""
            _write(tmp_path / f"{side}{level}.yaml", f"{below}{side}: {{level{level}: {level}}}\n")
    return f"extends: [a{levels - 1}.yaml, b{levels - 1}.yaml]\n"


def test_a_base_that_many_files_extend_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = _diamonds(tmp_path, 9)
    read, parsed = [], source.parse_mapping
    monkeypatch.setattr(source, "parse_mapping", lambda text, name: read.append(name) or parsed(text, name))
    levels = {f"level{level}": level for level in range(9)}
    assert _read(tmp_path, text).values == {"a": levels, "b": levels}
    assert len(read) == 19


def test_a_file_that_cannot_be_read_or_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "video.mp4").write_bytes(b"\x00\x00\x00\x18ftypmp42\xff\xfe")
    for name, reason in (
        ("none.yaml", "cannot be read: No such file"),
        ("folder", "cannot be read: Is a directory"),
        ("video.mp4", "must be a text file in UTF-8"),
    ):
        with pytest.raises(UserError, match=f"{name}: {reason}"):
            read_tree(tmp_path / name)


def test_overrides_come_last_and_in_their_order(tmp_path: Path) -> None:
    _write(tmp_path / "base.yaml", "a: {x: 0}\n")
    tree = _read(tmp_path, "extends: base.yaml\na: {y: 1}\n", "a.x=5", "a.x=6", "new.deep.key=[7]", "text=a=b: 'c'")
    assert tree.values == {"a": {"x": 6, "y": 1}, "new": {"deep": {"key": [7]}}, "text": {"a=b": "c"}}
    made = dict.fromkeys(("new", "new.deep", "new.deep.key", "new.deep.other"), "override 'new.deep.key=[7]'")
    _assert_places(tree, tmp_path, {"a.x": "override 'a.x=6'", "a.y": "spec.yaml:2", **made})
    # What was below an overridden section is gone, with its lines.
    tree = _read(tmp_path, "a:\n  x: 1\n  y: 1\nab: 2\n", "a={x: 2, z: 2}")
    assert tree.values == {"a": {"x": 2, "z": 2}, "ab": 2}
    changed = dict.fromkeys(("a", "a.x", "a.z"), "override 'a={x: 2, z: 2}'")
    _assert_places(tree, tmp_path, {"ab": "spec.yaml:4", **changed})


KEYS = st.text().filter(lambda key: not key.startswith("+"))  # which adds to a list
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@LAWS
@given(st.dictionaries(KEYS, PLAIN, max_size=4))
def test_what_is_written_reads_back(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    values.pop("extends", None)
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    path.write_text(to_yaml(values), encoding="utf-8")
    assert read_tree(path).values == values


@pytest.mark.parametrize(
    "text", ["1e5", "12e4567", ".5e1", "a\x85b", "\x85", "0x1F", "1:20", "on", "<<", "=", "\r", "é"]
)
def test_text_that_looks_like_something_else_reads_back_as_text(tmp_path: Path, text: str) -> None:
    several = [text]
    values = {"name": text, text: 1, "list": several, "again": several, "number": math.pi}
    assert _read(tmp_path, to_yaml(values)).values == values


def test_a_value_is_put_with_its_place_and_a_section_that_is_null_is_made(tmp_path: Path) -> None:
    tree = _read(tmp_path, "a: {b: 1}\n")
    put(tree, "a.c.d", [2], "elsewhere:7")
    assert tree.values == {"a": {"b": 1, "c": {"d": [2]}}}
    assert tree.place(("a", "c", "d")) == "elsewhere:7"
    with pytest.raises(UserError, match=r"elsewhere:8: b is a value, not a section"):
        put(tree, "a.b.c", 3, "elsewhere:8")
    tree = Tree({"a": {"b": None}}, {(): "file:1", ("a", "b"): "file:3"})
    put(tree, "a.b.c", 1, "elsewhere:8")
    assert tree.values == {"a": {"b": {"c": 1}}}
    assert tree.place(("a", "b")) == tree.place(("a", "b", "c")) == "elsewhere:8"
