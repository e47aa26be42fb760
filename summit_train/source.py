"""YAML files as a tree of plain values that remembers the file and line of every key.

`read_tree` follows `extends`, applies dotted overrides and refuses what YAML would swallow: a key given twice, a
document that is no mapping, a circle of `extends`. It knows nothing of what the keys mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

KeyPath = tuple[str, ...]


class SpecError(ValueError):
    """A mistake in what the user wrote; the message says where it is and what would be right."""


@dataclass
class Tree:
    """Plain values (dict, list, str, int, float, bool, None) and the place each key was given at."""

    values: dict[str, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """`file:line` of the key, or of the nearest section above it."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        raise KeyError(path)


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `1e-4` as the number it is (YAML 1.2; YAML 1.1 wants a dot) and refuses double keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


# PyYAML keeps implicit resolvers per class, keyed by first character; this adds to the subclass only.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9]*[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_tree(path: str | Path, overrides: Sequence[str] = ()) -> Tree:
    """Read a YAML mapping with what it extends, then apply `section.key=value` overrides in order.

    Raises SpecError for a file that is missing or is no YAML mapping, and for an override of the wrong form.
    """
    tree = _read_file(Path(path), ())
    for override in overrides:
        _apply_override(tree, override)
    return tree


def _read_file(path: Path, above: tuple[Path, ...]) -> Tree:
    if path.resolve() in above:
        circle = " -> ".join(str(p) for p in (*above, path.resolve()))
        raise SpecError(f"{path}: extends runs in a circle: {circle}")
    values, places = _parse(path)
    bases = values.pop("extends", None)
    if bases is None:
        return Tree(values, places)
    place = places[("extends",)]
    if isinstance(bases, str):
        bases = [bases]
    if not isinstance(bases, list) or not all(isinstance(b, str) for b in bases):
        raise SpecError(f"{place}: extends: a path or a list of paths is wanted, got {bases!r}")
    merged = Tree({}, {})
    for base in bases:
        target = path.parent / base
        if not target.is_file():
            raise SpecError(f"{place}: extends: there is no file {target}")
        _merge(merged, _read_file(target, (*above, path.resolve())))
    _merge(merged, Tree(values, places))
    return merged


def _parse(path: Path) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}; give the path of a YAML spec") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: is no text file in UTF-8; give the path of a YAML spec") from error
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        values = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SpecError(f"{path}:{line}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecError(f"{path}: not valid YAML: {error}") from error
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        raise SpecError(f"{path}:1: a mapping of keys to values is wanted, got {type(values).__name__}")
    assert node is not None
    places = {key: f"{path}:{line}" for key, line in _lines(node, ())}
    return values, {(): f"{path}:1", **places}


def _lines(node: yaml.Node, prefix: KeyPath, depth: int = 0) -> Iterator[tuple[KeyPath, int]]:
    if not isinstance(node, yaml.MappingNode) or depth > 20:
        return
    for key_node, value_node in node.value:
        path = (*prefix, str(key_node.value))
        yield path, key_node.start_mark.line + 1
        yield from _lines(value_node, path, depth + 1)


def _merge(base: Tree, top: Tree) -> None:
    """Lay `top` over `base`: sections are merged key by key, everything else (lists too) is replaced."""
    _merge_values(base.values, top.values)
    base.places.update(top.places)


def _merge_values(base: dict[str, Any], top: Mapping[str, Any]) -> None:
    for key, value in top.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge_values(base[key], value)
        else:
            base[key] = value


def _apply_override(tree: Tree, override: str) -> None:
    dotted, equals, text = override.partition("=")
    path = tuple(dotted.split("."))
    place = f"override {override!r}"
    if not equals or not all(path):
        raise SpecError(f"{place}: the form section.key=value is wanted, such as optimizer.base_lr=0.01")
    loader = _Loader(text)
    try:
        value = loader.get_single_data()
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(f"{place}: the value is not valid YAML; quote it") from error
    finally:
        loader.dispose()
    section = tree.values
    for key in path[:-1]:
        below = section.setdefault(key, {})
        if not isinstance(below, dict):
            raise SpecError(f"{place}: {key} is a value, not a section")
        section = below
    section[path[-1]] = value
    tree.places[path] = place
