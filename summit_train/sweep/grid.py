"""Read a sweep file: one spec for each run, named by the keys in which the runs differ.

name: batch_size
base: ../kinetics/tsm_r50_8f.yaml     # spec that all runs share, relative to this file
set: {schedule.epochs: 50}            # base keys that every run overrides
grid: {model.arch: [tsm, tsn]}        # all combinations
zip: {scale.gpus: [48, 96], nodes: [8, 16]}   # in step: 48 with 8, 96 with 16
presets:                              # named groups of keys; all combinations with grid and zip
  linear: {optimizer.base_lr: 0.01}
  date: {extends: ../date.yaml, optimizer.base_lr: 0.02}   # a file's keys, then its own
folds: folds/fold{1..5}               # each with data.train and data.val of folds/fold1/train.csv and val.csv, ...
runs: [{name: baseline, scale.gpus: 6}]       # further runs
at_once: 4                            # at most this many at the same time
"""

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


@dataclass(frozen=True)
class _Draft:
    """A run before its spec is built.

    parts: (key, value) for the name; the key of a preset is empty. on_curve: those that may name its curve.
    """

    place: str
    values: Values
    parts: tuple[tuple[str, Any], ...]
    nodes: int | None
    name: str | None = None
    curve: str = ""
    on_curve: tuple[tuple[str, Any], ...] = ()
    fold: str = ""


def load_sweep(path: str | Path, overrides: Sequence[str] = (), defaults: Tree | None = None) -> Sweep:
    """Read a sweep file, or a started sweep's folder, over `defaults` and with overrides. Raises UserError (a line)."""
    file = locate(path)
    tree = read_tree(file / "sweep.yaml" if file.is_dir() else file)
    sweep = validated(SweepFile, tree)
    drafts = [*_combinations(sweep, tree), *_explicit_runs(sweep, tree)]
    if not drafts:
        raise UserError(f"{tree.place(())}: a sweep must have runs; give grid, zip, presets or runs")
    if len(drafts) > MOST_RUNS:
        raise UserError(f"{tree.place(())}: {len(drafts):,} runs; a sweep may have at most {MOST_RUNS:,}")
    base = defaults or Tree({})
    base.lay(_read_relative(sweep.base, "base", tree.place(("base",))))
    for key, value in sweep.set.items():
        _put(base, key, value, tree.place(("set", key)), reserved=("name",))
    swept = sorted({key for draft in drafts for key in draft.values})
    for override in overrides:
        if clash := _overlapping(override.partition("=")[0], swept):
            raise UserError(f"override {override!r}: the runs of this sweep differ in {clash}; change the sweep file")
        apply_override(base, override)
    specs = _specs(drafts, base, sweep.name)
    if len({spec.loss.base for spec in specs}) > 1:
        raise UserError(f"{tree.place(())}: loss.kind must be the same in all runs, or have its measures")
    x = _axis(sweep, drafts, specs, tree)
    # A curve is named by a preset and grid values, and by those of zip where they differ at one place on x.
    named = {"", *(key for key in sweep.grid if not key.startswith("scale."))}
    if x is not None and len({json.dumps(value, default=str) for value in sweep.zip.get(x, [0])}) == 1:
        named |= set(sweep.zip)
    named -= {"nodes", "seed", x}
    runs = [
        SweepRun(
            name=name,
            spec=spec.model_copy(update={"name": name}),
            nodes=draft.nodes or sweep.nodes,
            curve=draft.curve or joined_name([pair for pair in draft.on_curve if pair[0] in named]),
            changes={key: value for key, (value, _) in draft.values.items()},
            fold=draft.fold,
        )
        for draft, spec, name in zip(drafts, specs, _names(drafts), strict=True)
    ]
    return Sweep(sweep.name, Path(specs[0].run_dir), tuple(runs), sweep.at_once, base.values, x)


def _axis(sweep: SweepFile, drafts: Sequence[_Draft], specs: Sequence[Spec], tree: Tree) -> str | None:
    """Return the key of the figure's horizontal axis; None for the global batch, which it is where batches differ.

    Without a key of its own, a sweep has the first axis that has numbers, or the first, if every run changes it.
    """
    changed = set.intersection(*(set(draft.values) for draft in drafts)) - {"seed", "data.train", "data.val"}
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


def _explicit_runs(sweep: SweepFile, tree: Tree) -> Iterator[_Draft]:
    for i, entry in enumerate(sweep.runs):
        at, given = ("runs", str(i)), entry.model_extra or {}
        values = {key: (value, tree.place((*at, key))) for key, value in given.items()}
        parts = tuple(given.items()) or ((("nodes", entry.nodes),) if entry.nodes else ())
        yield _Draft(tree.place(at), values, parts, entry.nodes, entry.name, entry.curve, fold=entry.fold)


def _combinations(sweep: SweepFile, tree: Tree) -> Iterator[_Draft]:
    """Yield every preset with every point of the grid with every row of zip, each in every fold."""
    if not (sweep.presets or sweep.grid or sweep.zip or sweep.folds):
        return
    places = _axis_places(sweep, tree)
    presets = {name: _preset(name, preset, tree, places) for name, preset in sweep.presets.items()} or {"": {}}
    rows = list(zip(*sweep.zip.values(), strict=True)) or [()]
    folds = _folds(sweep, tree, [*places, *(key for values in presets.values() for key in values)])
    count = len(presets) * math.prod(map(len, sweep.grid.values())) * len(rows) * len(folds)
    if count > MOST_RUNS:
        raise UserError(f"{tree.place(('grid',))}: {count:,} runs; a sweep may have at most {MOST_RUNS:,}")
    place = tree.place((next(name for name in ("zip", "grid", "presets", "folds") if getattr(sweep, name)),))
    # The first zip keys that tell the rows apart are enough for a name.
    texts = [[json.dumps(value, default=str) for value in row] for row in rows]
    most = len(sweep.zip)
    telling = next((n for n in range(1, most) if len({tuple(row[:n]) for row in texts}) == len(rows)), most)
    for (preset, of_preset), *point in itertools.product(presets.items(), *sweep.grid.values()):
        on_grid, named = tuple(zip(sweep.grid, point, strict=True)), (("", preset),) if preset else ()
        for row, (fold, of_fold) in itertools.product(rows, folds.items()):
            in_step = tuple(zip(sweep.zip, row, strict=True))
            given = {key: (value, places[key]) for key, value in (*on_grid, *in_step)}
            nodes, _ = given.pop("nodes", (None, ""))
            on_curve = (*named, *on_grid, *in_step[:telling])
            parts = (*on_curve, *([("", fold)] if fold else []))
            yield _Draft(place, of_preset | given | of_fold, parts, nodes, on_curve=on_curve, fold=fold)


def _folds(sweep: SweepFile, tree: Tree, axes: Iterable[str]) -> dict[str, Values]:
    """Return name -> values of each fold; one nameless fold without values where the sweep has none."""
    if sweep.folds is None:
        return {"": {}}
    place = tree.place(("folds",))
    part = next((part for part in Path(sweep.folds).parts if "{" in part), "")
    numbers = re.fullmatch(r"[^{}]*\{(0|[1-9]\d{0,3})\.\.([1-9]\d{0,3})\}[^{}]*", part)
    if numbers is None or int(numbers[1]) >= int(numbers[2]) or sweep.folds.count("{") > 1:
        right = "the path of the folders with their numbers, such as folds/fold{1..5}"
        raise UserError(f"{place}: folds: must be {right}, got {sweep.folds!r}")
    if clash := _overlapping("data.train", axes) or _overlapping("data.val", axes):
        raise UserError(f"{place}: folds: {clash} is given for some runs already; remove it here or there")
    span, folds = f"{{{numbers[1]}..{numbers[2]}}}", {}
    for number in range(int(numbers[1]), int(numbers[2]) + 1):
        folder = Path(sweep.folds.replace(span, str(number)))
        folds[_text(part.replace(span, str(number)))] = {
            f"data.{name}": (str(folder / (name if (folder / name).is_dir() else f"{name}.csv")), place)
            for name in ("train", "val")
        }
    return folds


def _axis_places(sweep: SweepFile, tree: Tree) -> dict[str, str]:
    """Check the axes of grid and zip; return key -> place of each."""
    places: dict[str, str] = {}
    for name, axes in (("grid", sweep.grid), ("zip", sweep.zip)):
        for key, values in axes.items():
            place = f"{tree.place((name, key))}: {name}.{key}"
            if clash := _overlapping(key, places):
                raise UserError(f"{place}: {clash} is an axis already")
            if key == "nodes" and not all(type(value) is int and value > 0 for value in values):
                raise UserError(f"{place}: must be whole numbers above 0, got {values}")
            first, expected = next(iter(axes.items()))
            if name == "zip" and len(values) != len(expected):
                raise UserError(f"{place}: must have as many values as {first}, {len(expected)}, got {len(values)}")
            places[key] = tree.place((name, key))
    return places


def _preset(name: str, preset: Preset, tree: Tree, axes: Iterable[str]) -> Values:
    """Return the values of a preset. Raises UserError for a key that is an axis, too."""
    values: Values = {}
    at = ("presets", name)
    if preset.extends is not None:
        file = _read_relative(preset.extends, f"presets.{name}.extends", tree.place((*at, "extends")))
        values |= {".".join(path): (value, file.place(path)) for path, value in _leaves(file.values)}
    values |= {key: (value, tree.place((*at, key))) for key, value in (preset.model_extra or {}).items()}
    for key, (_, place) in values.items():
        if clash := _overlapping(key, axes):
            raise UserError(f"{place}: {key}: {clash} is an axis already; remove it here or there")
    return values


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


def _specs(drafts: Sequence[_Draft], base: Tree, folder: str) -> list[Spec]:
    """Return the runs' specs, each named `run` for now. Raises UserError where two are equal."""
    specs: list[Spec] = []
    seen: dict[tuple[str, int | None], _Draft] = {}
    for draft in drafts:
        tree = copy.deepcopy(base)
        put(tree, "name", "run", draft.place)
        for key, (value, place) in draft.values.items():
            _put(tree, key, value, place)
        spec = spec_from_tree(tree)
        specs.append(spec.model_copy(update={"run_dir": str(Path(spec.run_dir) / folder)}))
        twin = seen.setdefault((spec.model_dump_json(), draft.nodes), draft)
        if twin is not draft:
            both = f"{joined_name(twin.parts)} ({twin.place}) and {joined_name(draft.parts)}"
            raise UserError(f"{draft.place}: {both} are one and the same run; a seed would tell them apart")
    return specs


def _names(drafts: Sequence[_Draft]) -> list[str]:
    """Return the runs' names: their own, else the preset's and `key-value` for every key that distinguishes them."""
    last = Counter(key.rpartition(".")[2] for key in {key for draft in drafts for key, _ in draft.parts})
    in_full = {word for word, count in last.items() if count > 1}
    names: dict[str, str] = {}  # in small letters -> name, as the file system may ignore case
    for draft in drafts:
        name = draft.name or joined_name(draft.parts, in_full) or "base"
        if name.casefold() in names:
            raise UserError(f"{draft.place}: two runs have the name {name}; list them under runs, each with its name")
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
