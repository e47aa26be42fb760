"""The files that public data sets come with, read into annotations: one function a format.

`locate` then finds the listed clips on the disk.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from summit_train.data.manifest.reading import ManifestRow
from summit_train.data.manifest.tables import VIDEO_EXTENSIONS, ManifestError, class_folders, open_text
from summit_train.data.video.clips import list_pictures
from summit_train.data.video.source import MISSING, DecodeError

# kind -> what its source is
KINDS = {
    "kinetics": "CSV of Kinetics-400, -600 or -700: label,youtube_id,time_start,time_end,split",
    "ucf101": "trainlist01.txt or testlist01.txt; --labels classInd.txt [beside it]",
    "hmdb51": "folder of CLASS_test_split1.txt; --split and --part",
    "something_v1": "CSV ID;label; --labels something-something-v1-labels.csv",
    "something_v2": "JSON; --labels something-something-v2-labels.json",
    "jester": "CSV ID;label; --labels jester-v1-labels.csv",
    "folders": "folder with a folder for each class, of videos or of folders of pictures",
    "list": "lines `path label` or `path num_frames label`",
}
HMDB51_PARTS = {"train": "1", "test": "2"}


@dataclass(frozen=True)
class Listed:
    """A clip as a data set's own files list it. names: on the disk, the likeliest first. label: its class."""

    names: tuple[str, ...]
    label: str
    group: str | None = None


@dataclass(frozen=True)
class Annotations:
    """All clips of one list. classes: in the order of their labels. by_stem: names have no folder and no extension."""

    clips: tuple[Listed, ...]
    classes: tuple[str, ...]
    by_stem: bool = False


Find = Callable[[str], Sequence[str]]


def locate(annotations: Annotations, root: str) -> Iterator[ManifestRow | DecodeError]:
    """Yield each clip's row, with its path below `root`, or why it is left out (usually because it is missing).

    The frames of a folder are counted, those of a video are not. Raises ManifestError for an unknown class.
    """
    labels = {name: number for number, name in enumerate(annotations.classes)}
    by_path: Find = lambda name: (name,) if os.path.exists(os.path.join(root, name)) else ()  # noqa: E731
    find = _by_stem(root) if annotations.by_stem else by_path
    for clip in annotations.clips:
        if clip.label not in labels:
            raise ManifestError(f"{clip.names[0]}: its class {clip.label!r} is not among the {len(labels)} classes")
        found = next((paths for name in clip.names if (paths := find(name))), ())
        if not found:
            yield DecodeError(clip.names[0], MISSING)
        elif len(found) > 1:
            yield DecodeError(clip.names[0], f"is there more than once: {', '.join(found[:5])}")
        else:
            full = os.path.join(root, found[0])
            try:
                num_frames = len(list_pictures(full)) if os.path.isdir(full) else None
                yield ManifestRow(found[0], labels[clip.label], num_frames, group=clip.group)
            except DecodeError as error:
                yield DecodeError(found[0], error.reason)


def _by_stem(root: str) -> Find:
    """Find videos by their names without folder and extension; the folders are read once."""
    paths = defaultdict[str, list[str]](list)
    for folder, _, files in os.walk(root):
        for file in sorted(files):
            stem, ending = os.path.splitext(file)
            if ending.lower() in VIDEO_EXTENSIONS:
                paths[stem].append(os.path.relpath(os.path.join(folder, file), root))
    return lambda name: paths.get(name, ())


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of a file's lines that are not blank. Raises ManifestError."""
    try:
        with open_text(path) as file:
            yield from ((number, line.strip()) for number, line in enumerate(file, 1) if line.strip())
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from error


def _csv_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (line, cells by column) of a CSV whose header has at least these columns. Raises ManifestError."""
    try:
        with open_text(path) as file:
            rows = csv.DictReader(file)
            lacking = [name for name in columns if name not in (rows.fieldnames or ())]
            if lacking:
                raise ManifestError(f"{path}:1: wanted the columns {', '.join(columns)}; {lacking[0]} is not there")
            for row in rows:
                if any(row[name] is None for name in columns):
                    raise ManifestError(f"{path}:{rows.line_num}: fewer fields than the header has")
                yield rows.line_num, row
    except (OSError, csv.Error) as error:
        raise ManifestError(f"{path}: cannot be read: {error}") from error


def read_kinetics(source: Path, classes: tuple[str, ...] | None) -> Annotations:
    """Read a split of Kinetics-400, -600 or -700: a CSV with label,youtube_id,time_start,time_end,split.

    The usual downloaders cut the clip out and call it ID_000010_000020.mp4, in seconds, or keep ID.mp4; in one folder,
    or in a folder for each class. Labels are the class names' places in alphabetical order. classes: those of the
    other split, as one list may lack some. Raises ManifestError.
    """
    clips: list[Listed] = []
    rows = list(_csv_rows(source, ("label", "youtube_id", "time_start", "time_end")))
    counts = Counter(row["youtube_id"] for _, row in rows)
    for line, row in rows:
        identity, label = row["youtube_id"].strip(), row["label"].strip()
        if not identity or not label:
            raise ManifestError(f"{source}:{line}: a youtube_id and a label are wanted (a test list has no labels)")
        try:
            start, end = (int(float(row[name])) for name in ("time_start", "time_end"))
        except ValueError:
            raise ManifestError(f"{source}:{line}: time_start and time_end are seconds, not {row!r}") from None
        names = [f"{identity}_{start:06}_{end:06}"]
        # A file ID.mp4 is ambiguous where several clips of the video are listed.
        if counts[row["youtube_id"]] == 1:
            names.append(identity)
        clips.append(Listed(tuple(names), label))
    return Annotations(tuple(clips), classes or tuple(sorted({clip.label for clip in clips})), by_stem=True)


def read_ucf101(source: Path, labels: Path | None) -> Annotations:
    """Read a split of UCF101: trainlist01.txt (`Class/v_Class_g08_c01.avi 1`) or testlist01.txt (without the number).

    labels: classInd.txt, by default beside the list. Raises ManifestError.
    """
    classes = _ucf101_classes(labels or source.parent / "classInd.txt")
    clips = []
    for line, text in _lines(source):
        path, _, number = text.partition(" ")
        name, slash, _ = path.partition("/")
        if not slash:
            raise ManifestError(f"{source}:{line}: wanted Class/video.avi, got {text!r}")
        if number and (not number.isdecimal() or classes[int(number) - 1 : int(number)] != (name,)):
            raise ManifestError(f"{source}:{line}: {number} is not the number of {name} in the list of classes")
        group = re.search(r"_(g\d+)_", path)
        clips.append(Listed((path,), name, group and f"{name}_{group[1]}"))
    return Annotations(tuple(clips), classes)


def _ucf101_classes(path: Path) -> tuple[str, ...]:
    """Return the names of classInd.txt: `1 ApplyEyeMakeup` and so on, without a gap."""
    names: list[str] = []
    for line, text in _lines(path):
        number, _, name = text.partition(" ")
        if number != str(len(names) + 1) or not name:
            raise ManifestError(f"{path}:{line}: wanted `{len(names) + 1} ClassName`, got {text!r}")
        names.append(name.strip())
    return tuple(names)


def read_hmdb51(source: Path, split: int, part: str) -> Annotations:
    """Read a split of HMDB51: CLASS_test_split1.txt for each class, of lines `video.avi 1`: 1 train, 2 test, 0 neither.

    part: 'train' or 'test'. Raises ManifestError.
    """
    ending = f"_test_split{split}.txt"
    lists = {path.name.removesuffix(ending): path for path in sorted(source.glob(f"?*{ending}"))}
    if not lists:
        raise ManifestError(f"{source}: there is no CLASS_test_split{split}.txt in it")
    clips = []
    for name, path in lists.items():
        for line, text in _lines(path):
            video, _, number = text.rpartition(" ")
            if number not in ("0", "1", "2") or not video:
                raise ManifestError(f"{path}:{line}: wanted a video and 0, 1 or 2, got {text!r}")
            if number == HMDB51_PARTS[part]:
                clips.append(Listed((f"{name}/{video.strip()}", video.strip()), name))
    return Annotations(tuple(clips), tuple(lists))


def read_something_v1(source: Path, labels: Path | None) -> Annotations:
    """Read a split of Something-Something V1 or Jester: a CSV `ID;label text`, and a folder ID of pictures a clip.

    labels: the list of labels. Raises ManifestError.
    """
    if labels is None:
        raise ManifestError(f"{source}: name the list of labels (something-something-v1-labels.csv) by --labels")
    classes = tuple(text for _, text in _lines(labels))
    clips = []
    for line, text in _lines(source):
        identity, semicolon, label = text.partition(";")
        if not semicolon:
            raise ManifestError(f"{source}:{line}: wanted ID;label, got {text!r} (a test list has no labels)")
        if label not in classes:
            raise ManifestError(f"{source}:{line}: the label {label!r} does not stand in {labels}")
        clips.append(Listed((identity,), label))
    return Annotations(tuple(clips), classes)


def read_something_v2(source: Path, labels: Path | None) -> Annotations:
    """Read a split of Something-Something V2: a JSON list of objects with id and template, and ID.webm a clip.

    labels: the JSON object from label to number. Raises ManifestError.
    """
    if labels is None:
        raise ManifestError(f"{source}: name the labels' numbers (something-something-v2-labels.json) by --labels")
    classes = _numbered_labels(labels)
    listed = _json(source)
    if not isinstance(listed, list):
        raise ManifestError(f"{source}: wanted a JSON list of clips")
    clips = []
    for place, clip in enumerate(listed):
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


def _numbered_labels(path: Path) -> tuple[str, ...]:
    """Return the labels in the order of their numbers: {"Approaching something with your camera": "0", ...}."""
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


def read_folders(source: Path) -> Annotations:
    """Read CLASS/clip below a folder; a clip is a video or a folder of pictures. Raises ManifestError."""
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
    """Read lines `path label` or `path num_frames label`; a label is a number, or a name of `classes`.

    num_frames is ignored: `locate` counts the frames. Raises ManifestError.
    """
    found = []
    for line, text in _lines(source):
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


def read_annotations(
    kind: str,
    source: Path,
    labels: Path | None = None,
    classes: tuple[str, ...] | None = None,
    split: int = 1,
    part: str | None = None,
) -> Annotations:
    """Read one split of a data set of this kind, one of KINDS. Raises ManifestError.

    labels: the data set's list of labels. classes: those of the other split, where that was imported before. split,
    part: of HMDB51.
    """
    if kind == "hmdb51" and part is None:
        raise ManifestError(f"{source}: say --part train or --part test")
    readers: dict[str, Callable[[], Annotations]] = {
        "kinetics": lambda: read_kinetics(source, classes),
        "ucf101": lambda: read_ucf101(source, labels),
        "hmdb51": lambda: read_hmdb51(source, split, str(part)),
        "something_v1": lambda: read_something_v1(source, labels),
        "something_v2": lambda: read_something_v2(source, labels),
        "jester": lambda: read_something_v1(source, labels),
        "folders": lambda: read_folders(source),
        "list": lambda: read_list(source, classes),
    }
    return readers[kind]()
