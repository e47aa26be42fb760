"""HMDB51: CLASS_test_split1.txt for each class and split, with lines `video.avi 1`: 1 train, 2 test, 0 neither."""

from __future__ import annotations

import re
from pathlib import Path

from summit_train.data.importers.annotations import Annotations, Listed, lines_of
from summit_train.data.manifest import ManifestError

PARTS = {"train": "1", "test": "2"}


def read(source: Path, split: int, part: str) -> Annotations:
    """Read the lists of one split. part: 'train' or 'test'. Raises ManifestError."""
    lists = {}
    for path in sorted(source.glob(f"*_test_split{split}.txt")):
        match = re.fullmatch(r"(.+)_test_split\d+", path.stem)
        assert match is not None
        lists[match[1]] = path
    if not lists:
        raise ManifestError(f"{source}: there is no CLASS_test_split{split}.txt in it")
    clips = []
    for name, path in lists.items():
        for line, text in lines_of(path):
            video, _, number = text.rpartition(" ")
            if number not in ("0", "1", "2") or not video:
                raise ManifestError(f"{path}:{line}: wanted a video and 0, 1 or 2, got {text!r}")
            if number == PARTS[part]:
                clips.append(Listed((f"{name}/{video.strip()}", video.strip()), name))
    return Annotations(tuple(clips), tuple(lists))
