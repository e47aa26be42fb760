"""Read YAML files into a tree of plain values that remembers the file and line of every key.

Values are those of YAML 1.2, where `1:30:00` and `2026-01-31` are text; words that YAML 1.1 reads otherwise, such as
`010` and `no`, are refused. `read_tree` follows `extends`, applies dotted overrides and refuses what YAML accepts
silently: a key given twice, a document that is not a mapping, a circle of `extends`. `+key` adds to the list `key` of
the files that a file extends.
Only this module imports yaml.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

import summit_train
from summit_train.core.errors import UserError
from summit_train.core.files import regular

KeyPath = tuple[str, ...]

SHIPPED = "shipped:"
_MOST_VALUES = 100_000  # nine levels of nine aliases each would be 387 million
_MOST_BYTES = 1_000_000  # checked before parsing; a sweep of 1,000 runs of 25 keys stays below it
_LONGEST_NUMBER = 400  # characters; Python turns integers of up to 4,300 digits into text and back


@dataclass
class Tree:
    """Plain values (dict, list, str, int, float, bool, None) and the place each key was given at.

    notes: a line for each list that replaced another one, with the items that it lacks.
    """

    values: dict[str, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def place(self, path: KeyPath) -> str:
        """Return `file:line` of the key, or of the nearest section above it."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        raise KeyError(path)

    def lay(self, top: Tree) -> None:
        """Lay `top` over this tree: merge sections key by key, add the list `+key` to `key`, replace everything else.

        Raises UserError where `+` is not between two lists.
        """
        for path, former, value in _merge(self.values, top.values):
            at = f"{top.place(path)}: {'.'.join(path)}"
            if path[-1].startswith("+"):
                if not isinstance(value, list) or not isinstance(former, list | None):
                    got = f"{value!r:.60} added to {former!r:.60}"
                    raise UserError(f"{at}: + must be a list that is added to a list, got {got}")
            elif isinstance(value, list) and isinstance(former, list):
                lost = [item for item in former if item not in value]
                if not lost:
                    continue
                names = (next(iter(item.values()), item) if isinstance(item, dict) else item for item in lost)
                over = f"replaces the list of {self.place(path)}, and leaves out {', '.join(map(str, names))}"
                self.notes.append(f"{at}: {over}; +{path[-1]} would add to it")
        self.notes += top.notes
        for path, place in top.places.items():
            if not any(part.startswith("+") for part in path[:-1]):  # items that were added have the place of `+key`
                self.places[tuple(part.removeprefix("+") for part in path)] = place


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_AMBIGUOUS = "tag:yaml.org,2002:ambiguous"
# By tag: the pattern of its words, and the characters that they begin with. The first pattern that fits decides.
# YAML 1.1, which PyYAML follows, reads 1:30:00 as 5,400, 010 as 8 and `no` as false.
_PLAIN_WORDS = {
    _AMBIGUOUS: (
        r"yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF|[-+]?0[0-9_]+|[-+]?0[bo][0-7_]+|[-+]?0x(?=\w*_)[0-9a-fA-F_]+|"
        r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)_[0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?",
        "yYnNoO-+.0123456789",
    ),
    "tag:yaml.org,2002:int": (r"[-+]?([0-9]+|0x[0-9a-fA-F]+)", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "tag:yaml.org,2002:bool": ("true|True|TRUE|false|False|FALSE", "tTfF"),
    "tag:yaml.org,2002:null": ("~|null|Null|NULL|", ["~", "n", "N", ""]),
    "tag:yaml.org,2002:merge": ("<<", "<"),
}


class _SpecLoader(yaml.SafeLoader):
    """Load every key as text, refuse double keys and boundless aliases, and say where a value is wrong."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._sizes: dict[yaml.Node, int] = {}  # values in a finished node, with aliases written out

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        assert node is not None
        if not is_alias:
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            flat = [part for pair in parts for part in pair] if isinstance(node, yaml.MappingNode) else parts
            self._sizes[node] = 1 + sum(self._sizes[part] for part in flat)
        elif node not in self._sizes:
            raise yaml.composer.ComposerError(None, None, "an alias (*) is inside what it names", mark)
        if self._sizes[node] > _MOST_VALUES:
            problem = f"more than {_MOST_VALUES:,} values, with aliases (*) written out"
            raise yaml.composer.ComposerError(None, None, problem, mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Keys are checked here because the constructor's `<<` may add a second one of a key.
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.composer.ComposerError(None, None, "a key must be a word", key_node.start_mark)
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = key_node.value.removeprefix("+")
            if key in seen:
                problem = f"the key {key!r} is given twice"
                raise yaml.composer.ComposerError(None, None, problem, key_node.start_mark)
            seen.add(key)
            key_node.tag = "tag:yaml.org,2002:str"  # YAML 1.1 would make true of `on`, and a date of a date
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct a value; raise PyYAML's own error, which knows the line, where that fails."""
        try:
            if node.tag in _NUMBERS and len(node.value) > _LONGEST_NUMBER:
                raise ValueError
            if node.tag == _AMBIGUOUS:
                right = "true or false" if node.value.isalpha() else "a decimal number without _ and leading zeros"
                problem = f"{node.value!r:.60} must be {right}, or text in quotes"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
            return super().construct_object(node, deep)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            # What int(), a date or a table of words raise, for an impossible date or under an explicit tag.
            problem = f"{node.value!r:.60} is not a valid {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


class _Dumper(yaml.SafeDumper):
    """Dump what _SpecLoader reads back: quote what it would take for a number, and text that is not plain."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # Left to itself, PyYAML writes the line break U+0085 so that it reads back as a space.
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


# PyYAML keeps resolvers and representers per class, so this changes the subclasses only. The dumper keeps its own, so
# that what it writes reads back by YAML 1.1, too.
_SpecLoader.yaml_implicit_resolvers = {}
for _tag, (_pattern, _first) in _PLAIN_WORDS.items():
    _SpecLoader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), list(_first))
    _Dumper.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), list(_first))
_Dumper.add_representer(str, _Dumper.represent_text)


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return plain values as the text of a YAML file; `read_tree` gives them back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def shipped(folder: str) -> Path:
    """Return the folder configs or jobs: files of the package, which in a checkout are links to its top level."""
    return Path(str(files(summit_train) / folder)).resolve()


def shipped_names(below: str = "") -> list[str]:
    """Return the NAMEs of shipped:NAME, the files configs/NAME.yaml, that begin with `below`."""
    configs = shipped("configs")
    names = (str(path.relative_to(configs).with_suffix("")) for path in configs.glob("**/*.yaml"))
    return sorted(name for name in names if name.startswith(below))


def locate(word: str | Path, folder: Path = Path(), place: str = "") -> Path:
    """Return the file that a word names: a path relative to `folder`, or shipped:NAME. Raises UserError without it.

    A file of that very name is ./shipped:NAME. place: how the message begins.
    """
    text = str(word)
    if not text.startswith(SHIPPED):
        return folder / word
    name = text.removeprefix(SHIPPED)
    names = shipped_names()
    if name not in names:
        bare = _bare(name)
        near = [bare] if bare in names else [known for known in names if known.endswith(f"/{bare}")]
        near = near[:3] or difflib.get_close_matches(bare, names, 3)
        nearest = f"did you mean {' or '.join(SHIPPED + known for known in near)}? " if near else ""
        raise UserError(f"{place}{text} not found; {nearest}`summit-train configs` lists what ships")
    return shipped("configs") / f"{name}.yaml"


def _bare(path: str) -> str:
    """Return NAME of a path to the file configs/NAME.yaml of a checkout."""
    return path.rpartition("configs/")[2].removesuffix(".yaml")


def shipped_hint(path: str) -> str:
    """Return the shipped name that a missing path may mean, as the end of a message."""
    return f"; did you mean {SHIPPED}{_bare(path)}?" if _bare(path) in shipped_names() else ""


# Kinds of files in configs/KINDs: what one is called, a key that no file of another kind has, and a shipped one.
_KINDS = {"site": ("site profile", "scheduler", "slurm_generic"), "machine": ("machine file", "network", "summit")}


def read_kind(kind: str, name_or_path: str, overrides: Sequence[str] = ()) -> Tree:
    """Read the file of --KIND: one at a path, or the shipped configs/KINDs/NAME.yaml. Raises UserError."""
    path = Path(name_or_path)
    if "/" not in name_or_path and path.suffix not in (".yaml", ".yml"):
        paths = [shipped("configs") / f"{folder}s/{name_or_path}.yaml" for folder in (kind, *_KINDS)]
        found = [path for path in paths if path.is_file()]
        if not found:
            names = [name.removeprefix(f"{kind}s/") for name in shipped_names(f"{kind}s/")]
            near = difflib.get_close_matches(name_or_path, names, 1)
            right = "".join(f"did you mean {name}? " for name in near) + f"shipped: {', '.join(names)}"
            raise UserError(f"{kind} {name_or_path!r} not found; {right}; or give the path of a YAML file")
        path = found[0]
    tree = read_tree(path, overrides)
    takes, own_key, example = _KINDS[kind]
    for title, key, _ in _KINDS.values():
        if key in tree.values and own_key not in tree.values:
            raise UserError(f"{name_or_path} is a {title}; --{kind} takes a {takes}, such as {example}")
    return tree


def read_tree(path: str | Path, overrides: Sequence[str] = ()) -> Tree:
    """Read a YAML mapping (a file or shipped:NAME) with what it extends; apply `section.key=value` overrides in order.

    Raises UserError for a missing file, one that is not a YAML mapping, and an override of the wrong form.
    """
    tree = _read_file(locate(path), (), {})
    for override in overrides:
        apply_override(tree, override)
    return tree


def _read_file(path: Path, above: tuple[Path, ...], read: dict[Path, Tree]) -> Tree:
    """Return the file's tree, laid over those of the files that it extends.

    above: the files that extend it. read: every file that was read so far; none is read twice.
    """
    resolved = Path(os.path.realpath(path))
    if resolved in above:
        raise UserError(f"{path}: extends runs in a circle: {' -> '.join(map(str, (*above, resolved)))}")
    if resolved in read:
        return read[resolved]
    own = parse_mapping(_read_text(path), str(path))
    place = own.place(("extends",))
    bases = own.values.pop("extends", None)
    if bases is None or isinstance(bases, str):
        bases = [] if bases is None else [bases]
    if not isinstance(bases, list) or not all(isinstance(b, str) for b in bases):
        raise UserError(f"{place}: extends: must be a path, shipped:NAME or a list of them, got {bases!r:.60}")
    if len(set(bases)) < len(bases):
        raise UserError(f"{place}: extends: each file may be named once, got {bases!r:.60}")
    merged = Tree({})
    for base in bases:
        target = locate(base, path.parent, f"{place}: extends: ")
        if not target.is_file():
            raise UserError(f"{place}: extends: file {target} not found{shipped_hint(base)}")
        merged.lay(_read_file(target, (*above, resolved), read))
    merged.lay(own)
    read[resolved] = merged
    return merged


def _read_text(path: Path) -> str:
    try:
        with open(path, "rb", opener=regular) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise UserError(f"{path}: larger than {_MOST_BYTES:,} bytes; give the path of a YAML spec")
        return content.decode("utf-8")
    except OSError as error:
        right = shipped_hint(str(path)) or "; give the path of a YAML spec, or shipped:NAME (`summit-train configs`)"
        raise UserError(f"{path}: cannot be read: {error.strerror}{right}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: must be a text file in UTF-8; give the path of a YAML spec") from error


def parse_mapping(text: str, name: str) -> Tree:
    """Return the mapping in a YAML text of the file `name`. Raises UserError for text that is not a YAML mapping."""
    node, values = _load(text, lambda line: f"{name}:{line}: not valid YAML")
    if node is None or not isinstance(values, dict):
        raise UserError(f"{name}:1: must be a mapping of keys to values, got {type(values).__name__}")
    return Tree(values, {(): f"{name}:1", **{key: f"{name}:{line}" for key, line in _lines(node, ())}})


def _load(text: str, complaint: Callable[[int], str]) -> tuple[yaml.Node | None, Any]:
    """Parse the document in `text` into nodes, which know their lines, and values. complaint: begins a UserError."""
    try:
        loader = _SpecLoader(text)
        node = loader.get_single_node()
        return node, None if node is None else loader.construct_document(node)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{complaint(line)}: the character U+{error.character:04X} is not text") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{complaint(line)}: {error.problem or error.context}") from error
    except RecursionError as error:
        raise UserError(f"{complaint(1)}: it is nested too deeply") from error


def _lines(node: yaml.Node, prefix: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    """Yield (path, line) of every key and every item of a list; an item's part of the path is its number from 0."""
    children: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(str(i), item, item) for i, item in enumerate(node.value)]
    for name, at, below in children:
        yield (*prefix, name), at.start_mark.line + 1
        yield from _lines(below, (*prefix, name))


def _merge(base: dict[str, Any], top: Mapping[str, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any, Any]]:
    """Merge `top` into `base`; yield the path of each value in `top`, the former one and the new one beforehand."""
    for name, value in top.items():
        key = name.removeprefix("+")
        path = (*above, name)
        if isinstance(value, dict) and key == name:
            # Copied into a new section: the one of `top` may be an alias, or part of a tree that is merged twice.
            if not isinstance(base.get(key), dict):
                base[key] = {}
            yield from _merge(base[key], value, path)
        else:
            former = base.get(key)
            yield path, former, value
            base[key] = value if key == name else [*(former or ()), *value]


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of an option that takes files and overrides as one list: (files, overrides)."""
    overrides = [word for word in words if re.match(r"(\w+\.)*\+?\w+=", word) and not Path(word).exists()]
    return [word for word in words if word not in overrides], overrides


def apply_override(tree: Tree, override: str) -> None:
    """Apply one `section.key=value`, or `+key=[...]` that adds to a list. Raises UserError if it has another form."""
    dotted, equals, text = override.partition("=")
    place = f"override {override!r}"
    if not equals or not all(dotted.split(".")):
        raise UserError(f"{place}: must have the form section.key=value, such as optimizer.base_lr=0.01")
    _, value = _load(text, lambda _: f"{place}: the value is not valid YAML, quote it")
    if dotted.rpartition(".")[2].startswith("+"):
        put(added := Tree({}), dotted, value, place)
        tree.lay(added)
    else:
        put(tree, dotted, value, place)


def put(tree: Tree, dotted: str, value: Any, place: str) -> None:
    """Set the key `section.key` to a plain value found at `place`; make the sections above it that are missing or null.

    Raises UserError if something above it is a value.
    """
    path = tuple(dotted.split("."))
    section = tree.values
    for depth, key in enumerate(path[:-1], 1):
        if section.get(key) is None:
            section[key] = {}
            tree.places[path[:depth]] = place
        section = section[key]
        if not isinstance(section, dict):
            raise UserError(f"{place}: {key} is a value, not a section")
    section[path[-1]] = value
    # What was below this key is gone, with its lines.
    tree.places = {key: line for key, line in tree.places.items() if key[: len(path)] != path} | {path: place}
