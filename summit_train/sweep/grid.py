"""Read a sweep file (docs/sweeps.md): one spec for each run, named by the keys in which the runs differ."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from summit_train.core.errors import UserError
from summit_train.evaluation.measures import Measures, measures_of
from summit_train.spec import Spec, spec_from_tree
from summit_train.spec.source import Tree, apply_override, locate, put, read_tree, shipped_hint, to_yaml
from summit_train.spec.typed import Count, PathText, Section, validated

MOST_RUNS = 1000  # an array's indices stay below Slurm's usual MaxArraySize, 1001
_LONGEST_NAME = 80
_SAFE = "A-Za-z0-9.,+=@_-"  # the characters of names: folders, words in job scripts and schedulers' lists

SafeName = Annotated[str, Field(pattern=rf"^[A-Za-z0-9][{_SAFE}]*$", max_length=_LONGEST_NAME)]
Axis = Annotated[list[Any], Field(min_length=1)]


class RunEntry(Section):
    """An explicit run. All further keys are keys of the spec."""

    model_config = ConfigDict(extra="allow")

    name: SafeName | None = None
    nodes: Count | None = None
    curve: str = ""
    fold: str = ""


class Preset(Section):
    """A named group of keys: those of the file that it extends, then its own. All further keys are keys of the spec."""

    model_config = ConfigDict(extra="allow")

    extends: PathText | None = None


class SweepFile(Section):
    """The keys of a sweep file."""

    removed: ClassVar = {"reference": "was removed; `python papers/figure4.py` draws the published accuracies"}

    name: SafeName
    base: PathText
    set: dict[str, Any] = Field(default={})
    grid: dict[str, Axis] = Field(default={})
    zip: dict[str, Axis] = Field(default={})
    presets: dict[SafeName, Preset] = Field(default={})
    folds: PathText | None = Field(default=None, description="Folders of a cross-validation, such as folds/fold{1..5}.")
    x: str | None = Field(default=None, description="Key of the figure's axis; null: the batch, else the first axis.")
    runs: tuple[RunEntry, ...] = ()
    nodes: Count | None = Field(default=None, description="Nodes of a run that names none.")
    at_once: Count | None = Field(default=None, description="Most runs at the same time; null: all.")


@dataclass(frozen=True)
class SweepRun:
    """One run.

    nodes: None where the sweep names none. changes: dotted spec keys that the run overrides.
    curve: the run's curve in the figure, named by its preset and its grid values other than scale, seed and the
    figure's axis. fold: the name of its fold of a cross-validation; empty without one.
    """

    name: str
    spec: Spec
    nodes: int | None
    curve: str
    changes: Mapping[str, Any]
    fold: str = ""


@dataclass(frozen=True)
class Sweep:
    """All runs in the file's order. folder: run_dir/name, the parent of every run. base: values that all runs share.

    x: the key of the figure's horizontal axis; None: the global batch.
    """

    name: str
    folder: Path
    runs: tuple[SweepRun, ...]
    at_once: int | None
    base: Mapping[str, Any]
    x: str | None = None

    @property
    def measures(self) -> Measures:
        first = self.runs[0].spec
        return measures_of(first.loss.base, own=first.evaluate.own_names)


Values = dict[str, tuple[Any, str]]  # dotted key -> (value, place in the file)
Part = tuple[str, Any]  # of a name: (key, value); the key of a preset and of a fold is empty


@dataclass(frozen=True)
class AxisPoint:
    """A place on an axis: what it adds to a run's name and keys. A run is a point of each axis, or one of `runs`.

    place: in the file. name, curve: its own, else None. fold: the name of a fold, else empty.
    """

    place: str
    parts: Sequence[Part]
    values: Values
    nodes: int | None = None
    name: str | None = None
    curve: str | None = None
    fold: str = ""


def load_sweep(path: str | Path, overrides: Sequence[str] = (), defaults: Tree | None = None) -> Sweep:
    """Read a sweep file, or a started sweep's folder, over `defaults` and with overrides. Raises UserError (a line)."""
    file = locate(path)
    tree = read_tree(file / "sweep.yaml" if file.is_dir() else file)
    sweep = validated(SweepFile, tree)
    points = [*_combinations(sweep, tree), *_explicit_runs(sweep, tree)]
    if not points:
        raise UserError(f"{tree.place(())}: a sweep must have runs; give grid, zip, presets or runs")
    if len(points) > MOST_RUNS:
        raise UserError(f"{tree.place(())}: {len(points):,} runs; a sweep may have at most {MOST_RUNS:,}")
    base = defaults or Tree({})
    base.lay(_read_relative(sweep.base, "base", tree.place(("base",))))
    for key, value in sweep.set.items():
        _put(base, key, value, tree.place(("set", key)), reserved=("name",))
    swept = sorted({key for point in points for key in point.values})
    for override in overrides:
        if clash := _overlapping(override.partition("=")[0], swept):
            raise UserError(f"override {override!r}: the runs of this sweep differ in {clash}; change the sweep file")
        apply_override(base, override)
    specs = _specs(points, base, sweep.name)
    if len({spec.loss.base for spec in specs}) > 1:
        raise UserError(f"{tree.place(())}: loss.kind must be the same in all runs, or have its measures")
    x = _x_axis(sweep, points, specs, tree)
    runs = [
        SweepRun(
            name=name,
            spec=spec.model_copy(update={"name": name}),
            nodes=point.nodes or sweep.nodes,
            curve=curve,
            changes={key: value for key, (value, _) in point.values.items()},
            fold=point.fold,
        )
        for point, spec, name, curve in zip(points, specs, _names(points), _curves(sweep, points, x), strict=True)
    ]
    return Sweep(sweep.name, Path(specs[0].run_dir), tuple(runs), sweep.at_once, base.values, x)


def _x_axis(sweep: SweepFile, points: Sequence[AxisPoint], specs: Sequence[Spec], tree: Tree) -> str | None:
    """Return the key of the figure's horizontal axis; None for the global batch, which it is where batches differ.

    Without a key of its own, a sweep has the first axis that has numbers, or the first, if every run changes it.
    """
    changed = set.intersection(*(set(point.values) for point in points)) - {"seed", "data.train", "data.val"}
    if sweep.x is not None:
        if sweep.x not in changed:
            got = f"must be a key that every run changes, and no seed or list, got {sweep.x}"
            raise UserError(f"{tree.place(('x',))}: x: {got}")
        return sweep.x
    if len({(spec.scale.gpus, spec.scale.clips_per_gpu) for spec in specs}) > 1:
        return None
    axes = sweep.grid | sweep.zip
    keys = [key for key in axes if key in changed]
    return next((key for key in keys if all(map(is_number, axes[key]))), next(iter(keys), None))


def _curves(sweep: SweepFile, points: Sequence[AxisPoint], x: str | None) -> list[str]:
    """Return the curve of each run: its own, or the name of its preset and its values of the grid.

    Values of zip name it, too, where they differ at one place on x.
    """
    telling = {"", *(key for key in sweep.grid if not key.startswith("scale."))}
    if x is not None and len({json.dumps(value, default=str) for value in sweep.zip.get(x, [0])}) == 1:
        telling |= set(sweep.zip)
    telling -= {"nodes", "seed", x}
    curves = []
    for point in points:
        parts = point.parts[:-1] if point.fold else point.parts
        name = joined_name([part for part in parts if part[0] in telling])
        curves.append(name if point.curve is None else point.curve)
    return curves


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def sweep_texts(sweep: Sweep) -> dict[str, str]:
    """Return file name -> text for the sweep's folder, from which alone `load_sweep` gives the same runs."""
    base = dict(sweep.base) | {"run_dir": str(sweep.folder.absolute().parent)}
    kept = ("name", "nodes", "curve", "fold")
    runs = [{key: getattr(run, key) for key in kept} | dict(run.changes) for run in sweep.runs]
    values: dict[str, Any] = {
        "name": sweep.name,
        "base": "base.yaml",
        "at_once": sweep.at_once,
        "x": sweep.x,
        "runs": runs,
    }
    return {"base.yaml": to_yaml(base), "sweep.yaml": to_yaml(values)}


def _read_relative(target: str, key: str, place: str) -> Tree:
    """Return the tree of a file that the sweep file names under `key`, relative to itself."""
    path = locate(target, Path(place.rpartition(":")[0]).parent, f"{place}: {key}: ")
    if not path.is_file():
        right = shipped_hint(target) or "; the path must be relative to the sweep file"
        raise UserError(f"{place}: {key}: {path} does not exist{right}")
    return read_tree(path)


def _put(tree: Tree, key: str, value: Any, place: str, reserved: Sequence[str] = ("name", "run_dir")) -> None:
    if key in reserved or not all(key.split(".")):
        right = f"a key of the spec, such as scale.gpus, and not {' or '.join(reserved)}"
        raise UserError(f"{place}: {key}: must be {right}")
    if isinstance(value, dict):
        raise UserError(f"{place}: {key} is a section; write {key}.{next(iter(value), 'key')}: ...")
    put(tree, key, copy.deepcopy(value), place)


def _explicit_runs(sweep: SweepFile, tree: Tree) -> Iterator[AxisPoint]:
    for i, entry in enumerate(sweep.runs):
        at = ("runs", str(i))
        given = entry.model_extra or {}
        values = {key: (value, tree.place((*at, key))) for key, value in given.items()}
        parts = list(given.items()) or ([("nodes", entry.nodes)] if entry.nodes else [])
        yield AxisPoint(tree.place(at), parts, values, entry.nodes, entry.name, entry.curve, entry.fold)


def _combinations(sweep: SweepFile, tree: Tree) -> Iterator[AxisPoint]:
    """Yield a run for each combination of a preset, a value of each key of the grid, a row of zip and a fold."""
    grid = [_axis("grid", {key: values}, tree) for key, values in sweep.grid.items()]
    rows = _axis("zip", sweep.zip, tree)
    presets = [_preset(name, preset, tree) for name, preset in sweep.presets.items()]
    folds = [] if sweep.folds is None else _folds(sweep.folds, tree.place(("folds",)))
    _check_apart(sweep, tree, presets, folds)
    axes = [axis for axis in (presets, *grid, rows, folds) if axis]
    if not axes:
        return
    count = math.prod(map(len, axes))
    if count > MOST_RUNS:
        raise UserError(f"{tree.place(('grid',))}: {count:,} runs; a sweep may have at most {MOST_RUNS:,}")
    place = tree.place((next(name for name in ("zip", "grid", "presets", "folds") if getattr(sweep, name)),))
    for points in itertools.product(*axes):
        parts = [part for point in points for part in point.parts]
        values = {key: value for point in points for key, value in point.values.items()}
        nodes = next((point.nodes for point in points if point.nodes), None)
        yield AxisPoint(place, parts, values, nodes, fold=points[-1].fold)


def _axis(section: str, columns: Mapping[str, Sequence[Any]], tree: Tree) -> list[AxisPoint]:
    """Return the points of keys that advance together, named by the first keys that tell them apart."""
    for key, values in columns.items():
        place = f"{tree.place((section, key))}: {section}.{key}"
        first, expected = next(iter(columns.items()))
        if key == "nodes" and not all(type(value) is int and value > 0 for value in values):
            raise UserError(f"{place}: must be whole numbers above 0, got {values}")
        if len(values) != len(expected):
            raise UserError(f"{place}: must have as many values as {first}, {len(expected)}, got {len(values)}")
    rows = list(zip(*columns.values(), strict=True))
    texts = [[json.dumps(value, default=str) for value in row] for row in rows]
    numbers = range(1, len(columns))
    telling = next((n for n in numbers if len({tuple(row[:n]) for row in texts}) == len(rows)), len(columns))
    points = []
    for row in rows:
        given = dict(zip(columns, row, strict=True))
        keys = {key: (value, tree.place((section, key))) for key, value in given.items() if key != "nodes"}
        points.append(AxisPoint(tree.place((section,)), list(given.items())[:telling], keys, given.get("nodes")))
    return points


def _preset(name: str, preset: Preset, tree: Tree) -> AxisPoint:
    """Return the point of a preset: the keys of the file that it extends, then its own."""
    at = ("presets", name)
    values: Values = {}
    if preset.extends is not None:
        file = _read_relative(preset.extends, f"presets.{name}.extends", tree.place((*at, "extends")))
        values |= {".".join(path): (value, file.place(path)) for path, value in _leaves(file.values)}
    values |= {key: (value, tree.place((*at, key))) for key, value in (preset.model_extra or {}).items()}
    return AxisPoint(tree.place(at), [("", name)], values)


def _folds(folders: str, place: str) -> list[AxisPoint]:
    """Return a point for each of the numbered folders, with its lists."""
    part = next((part for part in Path(folders).parts if "{" in part), "")
    numbers = re.fullmatch(r"[^{}]*\{(0|[1-9]\d{0,3})\.\.([1-9]\d{0,3})\}[^{}]*", part)
    if numbers is None or int(numbers[1]) >= int(numbers[2]) or folders.count("{") > 1:
        right = "the path of the folders with their numbers, such as folds/fold{1..5}"
        raise UserError(f"{place}: folds: must be {right}, got {folders!r}")
    span = f"{{{numbers[1]}..{numbers[2]}}}"
    points = []
    for number in range(int(numbers[1]), int(numbers[2]) + 1):
        folder = Path(folders.replace(span, str(number)))
        fold = _text(part.replace(span, str(number)))
        files = {name: name if (folder / name).is_dir() else f"{name}.csv" for name in ("train", "val")}
        values = {f"data.{name}": (str(folder / file), place) for name, file in files.items()}
        points.append(AxisPoint(place, [("", fold)], values, fold=fold))
    return points


def _check_apart(sweep: SweepFile, tree: Tree, presets: Sequence[AxisPoint], folds: Sequence[AxisPoint]) -> None:
    """Raise UserError where a key is on two axes, or on one and its section on another."""
    groups = [{key: tree.place((name, key))} for name in ("grid", "zip") for key in getattr(sweep, name)]
    groups += [{key: place for point in axis for key, (_, place) in point.values.items()} for axis in (presets, folds)]
    taken: list[str] = []
    for group in groups:
        for key, place in group.items():
            if clash := _overlapping(key, taken):
                raise UserError(f"{place}: {key}: {clash} is an axis already; remove it here or there")
        taken += group


def _overlapping(key: str, keys: Iterable[str]) -> str | None:
    """Return the first of `keys` that is `key`, its section, or in the section `key`."""
    return next((one for one in keys if f"{one}.".startswith(f"{key}.") or f"{key}.".startswith(f"{one}.")), None)


def _leaves(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, value) of everything that is not a section."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _specs(points: Sequence[AxisPoint], base: Tree, folder: str) -> list[Spec]:
    """Return the runs' specs, each named `run` for now. Raises UserError where two are equal."""
    specs: list[Spec] = []
    seen: dict[tuple[str, int | None], AxisPoint] = {}
    for point in points:
        tree = copy.deepcopy(base)
        put(tree, "name", "run", point.place)
        for key, (value, place) in point.values.items():
            _put(tree, key, value, place)
        spec = spec_from_tree(tree)
        specs.append(spec.model_copy(update={"run_dir": str(Path(spec.run_dir) / folder)}))
        twin = seen.setdefault((spec.model_dump_json(), point.nodes), point)
        if twin is not point:
            both = f"{joined_name(twin.parts)} ({twin.place}) and {joined_name(point.parts)}"
            raise UserError(f"{point.place}: {both} are one and the same run; a seed would tell them apart")
    return specs


def _names(points: Sequence[AxisPoint]) -> list[str]:
    """Return the runs' names: their own, else the preset's and `key-value` for every key that distinguishes them."""
    last = Counter(key.rpartition(".")[2] for key in {key for point in points for key, _ in point.parts})
    in_full = {word for word, count in last.items() if count > 1}
    names: dict[str, str] = {}  # in small letters -> name, as the file system may ignore case
    for point in points:
        name = point.name or joined_name(point.parts, in_full) or "base"
        if name.casefold() in names:
            raise UserError(f"{point.place}: two runs have the name {name}; list them under runs, each with its name")
        names[name.casefold()] = name
    return list(names.values())


def joined_name(parts: Sequence[tuple[str, Any]], in_full: Iterable[str] = ()) -> str:
    """Return `date_gpus-48_base_lr-0.02`, a long one cut with a digest. in_full: last words that are ambiguous."""
    words = []
    for key, value in parts:
        last = key.rpartition(".")[2]
        words.append(f"{key if last in in_full else last}-{_text(value)}" if key else _text(value))
    name = "_".join(words)
    if len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=4).hexdigest()
    return f"{name[: _LONGEST_NAME - len(digest) - 1]}-{digest}"


def _text(value: Any) -> str:
    """Return a value as text that is safe in a folder's name."""
    if isinstance(value, str):
        return re.sub(rf"[^{_SAFE}]+", "-", value)
    value = list(value.values()) if isinstance(value, dict) else value
    return "-".join(map(_text, value)) if isinstance(value, list) else json.dumps(value, default=str)
