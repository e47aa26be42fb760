"""UCF101: trainlist01.txt (`Class/v_Class_g08_c01.avi 1`), testlist01.txt (without the number) and classInd.txt."""

from __future__ import annotations

import re
from pathlib import Path

from summit_train.data.importers.annotations import Annotations, Listed, lines_of
from summit_train.data.manifest import ManifestError


def read(source: Path, labels: Path | None) -> Annotations:
    """Read one split's list. labels: classInd.txt, by default beside the list. Raises ManifestError."""
    classes = _classes(labels or source.parent / "classInd.txt")
    clips = []
    for line, text in lines_of(source):
        path, _, number = text.partition(" ")
        name, slash, _ = path.partition("/")
        if not slash:
            raise ManifestError(f"{source}:{line}: wanted Class/video.avi, got {text!r}")
        if number and (not number.isdecimal() or classes[int(number) - 1 : int(number)] != (name,)):
            raise ManifestError(f"{source}:{line}: {number} is not the number of {name} in the list of classes")
        group = re.search(r"_(g\d+)_", path)
        clips.append(Listed((path,), name, group and f"{name}_{group[1]}"))
    return Annotations(tuple(clips), classes)


def _classes(path: Path) -> tuple[str, ...]:
    """The names of classInd.txt: `1 ApplyEyeMakeup` and so on, without a gap."""
    names: list[str] = []
    for line, text in lines_of(path):
        number, _, name = text.partition(" ")
        if number != str(len(names) + 1) or not name:
            raise ManifestError(f"{path}:{line}: wanted `{len(names) + 1} ClassName`, got {text!r}")
        names.append(name.strip())
    return tuple(names)
