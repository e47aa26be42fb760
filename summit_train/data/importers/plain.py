"""Sets without a format of their own: folders of classes, and lists of `path label` or `path num_frames label`."""

from __future__ import annotations

import os
from pathlib import Path

from summit_train.data.importers.annotations import Annotations, Listed, lines_of
from summit_train.data.manifest import ManifestError
from summit_train.data.tables import VIDEO_EXTENSIONS, class_folders


def read_folders(source: Path) -> Annotations:
    """Read CLASS/clip below a folder, the clip being a video or a folder of pictures. Raises ManifestError."""
    classes = class_folders(source)
    clips = [
        Listed((f"{name}/{entry}",), name)
        for name in classes
        for entry in sorted(os.listdir(source / name))
        if not entry.startswith(".") and (entry.lower().endswith(VIDEO_EXTENSIONS) or (source / name / entry).is_dir())
    ]
    if not clips:
        raise ManifestError(f"{source}: no video and no folder of pictures in its class folders")
    return Annotations(tuple(clips), classes)


def read_list(source: Path, classes: tuple[str, ...] | None) -> Annotations:
    """Read a list; a label is a number, or a name that stands among `classes`. Raises ManifestError.

    A number of frames between the two is passed over: what is there is counted.
    """
    found = []
    for line, text in lines_of(source):
        path, *label = text.rsplit(None, 1)
        if not label:
            raise ManifestError(f"{source}:{line}: wanted `path label`, got {text!r}")
        shorter, *count = path.rsplit(None, 1)
        if count and count[0].isdecimal() and not path.lower().endswith(VIDEO_EXTENSIONS):
            path = shorter
        found.append((line, path, label[0]))
    if classes is None:
        wrong = next(((line, label) for line, _, label in found if not label.isdecimal()), None)
        if wrong is not None:
            raise ManifestError(f"{source}:{wrong[0]}: label {wrong[1]!r} is no number, and there is no classes.txt")
        classes = tuple(map(str, range(1 + max((int(label) for *_, label in found), default=0))))
    names = dict(zip(map(str, range(len(classes))), classes, strict=True))
    return Annotations(tuple(Listed((path,), names.get(label, label)) for _, path, label in found), classes)
