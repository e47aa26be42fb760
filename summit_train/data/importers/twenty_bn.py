"""Something-Something V1 and V2, and Jester.

V1 and Jester: a CSV `ID;label text` for each split, a list of the labels, and a folder of pictures for each clip
(ID/00001.jpg). V2: a JSON list of objects with id and template, a JSON object from label to number, and ID.webm.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from summit_train.data.importers.annotations import Annotations, Listed, lines_of
from summit_train.data.manifest import ManifestError


def read_csv(source: Path, labels: Path | None) -> Annotations:
    """Read one split of Something-Something V1 or Jester. labels: the list of labels. Raises ManifestError."""
    if labels is None:
        raise ManifestError(f"{source}: name the list of labels (something-something-v1-labels.csv) by --labels")
    classes = tuple(text for _, text in lines_of(labels))
    clips = []
    for line, text in lines_of(source):
        identity, semicolon, label = text.partition(";")
        if not semicolon:
            raise ManifestError(f"{source}:{line}: wanted ID;label, got {text!r} (a test list has no labels)")
        if label not in classes:
            raise ManifestError(f"{source}:{line}: the label {label!r} does not stand in {labels}")
        clips.append(Listed((identity,), label))
    return Annotations(tuple(clips), classes)


def read_json(source: Path, labels: Path | None) -> Annotations:
    """Read one split of Something-Something V2. labels: the JSON of the labels' numbers. Raises ManifestError."""
    if labels is None:
        raise ManifestError(f"{source}: name the labels' numbers (something-something-v2-labels.json) by --labels")
    classes = _numbered(labels)
    clips = []
    for place, clip in enumerate(_list(source)):
        try:
            identity, template = str(clip["id"]), str(clip["template"])
        except (KeyError, TypeError):
            raise ManifestError(f"{source}: entry {place} has no id and template (a test list has no labels)") from None
        # "Holding [something] next to [something]" is the label "Holding something next to something".
        label = template.replace("[", "").replace("]", "")
        if label not in classes:
            raise ManifestError(f"{source}: entry {place}: the label {label!r} does not stand in {labels}")
        clips.append(Listed((f"{identity}.webm", f"{identity}.mp4"), label))
    return Annotations(tuple(clips), classes)


def _list(path: Path) -> list[dict[str, Any]]:
    value = _json(path)
    if not isinstance(value, list):
        raise ManifestError(f"{path}: wanted a JSON list of clips")
    return value


def _numbered(path: Path) -> tuple[str, ...]:
    """The labels in the order of their numbers: {"Approaching something with your camera": "0", ...}."""
    value = _json(path)
    try:
        names = {int(number): str(name) for name, number in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise ManifestError(f"{path}: wanted a JSON object from each label to its number") from None
    if sorted(names) != list(range(len(value))):
        raise ManifestError(f"{path}: wanted the numbers 0 to {len(value) - 1}, each once")
    return tuple(names[number] for number in range(len(names)))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ManifestError(f"{path}: is no JSON: {error}") from error
