"""Splitting a data set into folds by groups (persons, scenes), with every class on both sides of every fold."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from summit_train.core import rng
from summit_train.core.errors import UserError
from summit_train.core.text import counted
from summit_train.data.manifest.clip import ManifestRow, write_manifest
from summit_train.data.manifest.reading import check_classes, read_rows, write_classes

# Shuffles that are tried where groups of several classes leave a part without a class.
_ATTEMPTS = 32


@dataclass(frozen=True)
class Fold:
    """One fold that was written: its folder, and the clips of each class in train.csv and val.csv.

    clips, groups: their numbers in both files. grouping: what made the groups.
    """

    folder: Path
    train: dict[str, int]
    val: dict[str, int]
    clips: tuple[int, ...]
    groups: tuple[int, ...]
    grouping: str


def split_manifest(
    manifest: str | Path,
    out: str | Path,
    folds: int,
    group: str | None = None,
    *,
    seed: int = 0,
    only: Sequence[str] = (),
    both_directions: bool = False,
) -> list[Fold]:
    """Write out/fold1 .. out/foldN, each with train.csv, val.csv and classes.txt; fold k validates on part k.

    Every column is kept. Each class is shared between the parts as evenly as the groups allow. The parts depend on the
    clips and the seed, not on the manifest's order.

    group: a regular expression; its first match in a file's name (the match's first parenthesis, if there is one) is
    the clip's group, and a group is never on both sides. None: the list's column; a file without a group is one of its
    own. only: the classes to take (empty: all). both_directions: the classes become forwards and backwards, and every
    clip appears twice, once played backwards, so that a network that cannot see time is at chance.

    Raises UserError if the expression is bad, there are fewer groups than folds, a class cannot be on both sides of
    every fold, or both directions are requested of clips that are already reversed.
    """
    source, rows = read_rows(manifest)
    names = source.class_names
    unknown = sorted(set(only) - set(names))
    if unknown:
        raise UserError(f"{source.source}: must have the class {unknown[0]!r}; valid: {', '.join(names)}")
    rows = [row for row in rows if not only or any(names[label] in only for label in row.labels)]
    if both_directions and source.boxes is not None:
        raise UserError(f"{source.source}: has boxes, and a list with boxes cannot be played backwards")
    backwards = next((row.path for row in rows if row.reversed), None)
    if both_directions and backwards is not None:
        raise UserError(f"{source.source}: --both-directions must have clips that are not reversed, got {backwards}")
    if group is not None:
        rows = [replace(row, group=_group_of(row.path, group)) for row in rows]
    grouping = _grouping(rows, group)
    check_classes(source.source, names)
    parts = parts_of(rows, names, folds, seed)
    if both_directions:
        names = ("forwards", "backwards")
        rows = [replace(row, label=label, reversed=label == 1) for row in rows for label in (0, 1)]
        parts = [part for part in parts for _ in (0, 1)]
    done = []
    for number in range(folds):
        folder = Path(out) / f"fold{number + 1}"
        sides = [[row for row, part in zip(rows, parts, strict=True) if (part == number) == val] for val in (0, 1)]
        done.append(_write(folder, sides, names, grouping))
        if both_directions or source.classes is not None:
            write_classes(folder, names)
    return done


def _write(folder: Path, sides: Sequence[Sequence[ManifestRow]], names: Sequence[str], grouping: str) -> Fold:
    for side, rows in zip(("train", "val"), sides, strict=True):
        write_manifest(folder / f"{side}.csv", rows)
    counts = [Counter(names[label] for row in rows for label in row.labels) for rows in sides]
    train, val = ({name: count[name] for name in names if count[name]} for count in counts)
    groups = tuple(len(set(map(_group, rows))) for rows in sides)
    return Fold(folder, train, val, tuple(map(len, sides)), groups, grouping)


def parts_of(rows: Sequence[ManifestRow], names: Sequence[str], folds: int, seed: int = 0) -> list[int]:
    """Return each row's part, 0 .. folds - 1. Raises UserError where the rows' groups cannot be split so."""
    groups: dict[str, Counter[str]] = {name: Counter() for name in sorted(set(map(_group, rows)))}
    for row in rows:
        groups[_group(row)].update(names[label] for label in row.labels)
    if len(groups) < 2:
        raise UserError(f"the files must be in at least two groups, got one, {''.join(groups)}; try another --group")
    if not 2 <= folds <= len(groups):
        shown = ", ".join(list(groups)[:12])
        raise UserError(f"--folds must be 2 to {len(groups)}, the number of groups ({shown}), got {folds}")
    num_groups = Counter(name for counts in groups.values() for name in counts)
    for name, number in sorted(num_groups.items()):
        if number < folds:
            fewer = f"--folds {number}, " if number > 1 else ""
            right = f"try {fewer}more groups (another --group), or other classes (--only)"
            must = f"the class {name!r} must have clips in {folds} groups to be on both sides of each of {folds} folds"
            raise UserError(f"{must}, got {number} of {len(groups)} groups; {right}")
    for attempt in range(_ATTEMPTS):
        parts = _balanced(groups, folds, seed, attempt)
        covered = {(part, name) for group, part in parts.items() for name in groups[group]}
        lacking = [name for name in num_groups if any((part, name) not in covered for part in range(folds))]
        if not lacking:
            return [parts[_group(row)] for row in rows]
    wrong = f"no split into {folds} folds was found with the class {min(lacking)!r} on both sides of each"
    right = "its groups belong to other classes too; try fewer --folds, or another --group or --seed"
    raise UserError(f"{wrong}: {right}")


def _group(row: ManifestRow) -> str:
    return row.path if row.group is None else row.group


def _group_of(path: str, pattern: str) -> str:
    try:
        match = re.search(pattern, Path(path).name)
    except re.error as error:
        raise UserError(f"--group must be a regular expression, got {pattern!r}: {error}") from error
    group = match and match.group(min(1, match.re.groups))
    if group is None:
        raise UserError(f"{path}: --group must match in each file's name, got {pattern!r}, which does not")
    return group


def _grouping(rows: Sequence[ManifestRow], pattern: str | None) -> str:
    if pattern is not None:
        return f"groups: what --group {shlex.quote(pattern)} matches in the files' names"
    without = len({row.path for row in rows if row.group is None})
    alone = f"{counted(without, 'file')} without a group, each a group of its own"
    column = "groups: the list's column 'group'" + (f"; {alone}" if without else "")
    return column if any(row.group for row in rows) else "groups: each file is one (no column 'group', no --group)"


def _balanced(groups: Mapping[str, Counter[str]], folds: int, seed: int, attempt: int) -> dict[str, int]:
    """Put each group, the heaviest first, into the part where it adds least to the imbalance of the classes.

    The imbalance is the sum over parts and classes of (clips in the part / clips in all)^2.
    """
    totals = sum(groups.values(), Counter())
    order = rng.key(seed, "split", attempt).permutation(len(groups)).tolist()
    names = list(groups)
    weights = {group: sum(number / totals[name] for name, number in groups[group].items()) for group in names}
    parts: dict[str, int] = {}
    filled: list[Counter[str]] = [Counter() for _ in range(folds)]
    for group in sorted((names[place] for place in order), key=lambda group: -weights[group]):
        added = [
            sum((2 * part[name] * number + number**2) / totals[name] ** 2 for name, number in groups[group].items())
            for part in filled
        ]
        best = min(range(folds), key=lambda part: (added[part], filled[part].total()))
        parts[group] = best
        filled[best] += groups[group]
    return parts
