"""The files that public data sets come with, read into annotations: one function a format, see `KINDS`.

`Annotations.located` then finds the listed clips on the disk.
"""

from __future__ import annotations

import csv
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from summit_train.core.errors import UserError
from summit_train.core.text import from_json
from summit_train.data.manifest import tables
from summit_train.data.manifest.clip import ManifestRow
from summit_train.data.manifest.tables import class_folders, clips_below, folder_entries, is_video, label_text, opened
from summit_train.data.video.pictures import list_clip
from summit_train.data.video.source import MISSING, DecodeError

HMDB51_PARTS = {"train": "1", "test": "2"}


@dataclass(frozen=True)
class Request:
    """The split to import.

    labels: the data set's list of labels. classes: those of a split that was imported before. split, part: of HMDB51.
    """

    source: Path
    labels: Path | None = None
    classes: tuple[str, ...] | None = None
    split: int = 1
    part: str | None = None


class Importable(Protocol):
    """The clips of one list, with their classes in the order of their labels."""

    @property
    def clips(self) -> Sequence[object]: ...

    @property
    def classes(self) -> tuple[str, ...]: ...

    def located(self, root: str) -> Iterator[ManifestRow | DecodeError]:
        """Yield each clip's row, with its path below `root`, or why it is left out."""


class Listed(NamedTuple):
    """A clip as a data set's own files list it. place: there. names: on the disk, the likeliest first."""

    place: str
    names: tuple[str, ...]
    labels: tuple[str, ...]
    group: str | None = None


@dataclass(frozen=True)
class Annotations:
    """All clips of one list. classes: in the order of their labels. by_stem: names have no folder and no extension.

    Raises UserError for a clip of another class.
    """

    clips: tuple[Listed, ...]
    classes: tuple[str, ...]
    by_stem: bool = False

    def __post_init__(self) -> None:
        known = set(self.classes)
        for clip in self.clips:
            for label in clip.labels:
                if label not in known:
                    raise UserError(f"{clip.place}: label must be one of the {len(known)} classes, got {label!r}")

    def located(self, root: str) -> Iterator[ManifestRow | DecodeError]:
        """Yield each clip's row, with its path below `root`, or why it is left out.

        The frames of a folder are counted, of flow its fields; those of a video are not.
        """
        labels = {name: number for number, name in enumerate(self.classes)}
        by_stem = defaultdict[str, list[str]](list)
        if self.by_stem:
            for path in clips_below(root, Counter()):
                if is_video(name := os.path.basename(path)):
                    by_stem[os.path.splitext(name)[0]].append(os.path.relpath(path, root))
        for clip in self.clips:
            if self.by_stem:
                paths = next((by_stem[name] for name in clip.names if name in by_stem), [])
            else:
                paths = [name for name in clip.names if os.path.exists(os.path.join(root, name))][:1]
            if len(paths) != 1:
                reason = f"must be there once, got {', '.join(paths[:5])}" if paths else MISSING
                yield DecodeError(clip.names[0], reason)
                continue
            full = os.path.join(root, paths[0])
            try:
                num_frames = list_clip(full)[1] if os.path.isdir(full) else None
            except DecodeError as error:
                yield DecodeError(paths[0], error.reason)
                continue
            label = label_text(sorted({labels[name] for name in clip.labels}))
            yield ManifestRow(paths[0], label, num_frames, group=clip.group)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (file:line, text) of a file's lines that are not blank. Raises UserError."""
    with opened(path) as file:
        yield from ((f"{path}:{number}", line.strip()) for number, line in enumerate(file, 1) if line.strip())


def _classes(path: Path, form: str, first: int) -> dict[str, str]:
    """Return the name of each class by its code, from lines `CODE Name` in order; form: of the numbers from `first` on.

    Raises UserError.
    """
    names = dict[str, str]()
    for place, text in _lines(path):
        code, _, name = text.partition(" ")
        expected = form.format(first + len(names))
        if code != expected or not name:
            raise UserError(f"{place}: must be `{expected} Name of the class`, got {text!r}")
        names[code] = name.strip()
    return names


def _cells(path: Path, columns: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return (file:line, cells of these columns) of a CSV's rows. Raises UserError."""
    with opened(path) as file:
        reader = csv.DictReader(file, restval="")
        lacking = [name for name in columns if name not in (reader.fieldnames or ())]
        if lacking:
            raise UserError(f"{path}:1: must have the columns {', '.join(columns)}; lacks {lacking[0]}")
        return [(f"{path}:{reader.line_num}", [row[name].strip() for name in columns]) for row in reader]


def _kinetics(ask: Request) -> Annotations:
    """Read a split of Kinetics-400, -600 or -700: a CSV with label,youtube_id,time_start,time_end,split.

    The usual downloaders cut the clip out and call it ID_000010_000020.mp4, in seconds, or keep ID.mp4; in one folder,
    or in a folder for each class. Labels are the class names' places in alphabetical order; one split may lack some.
    time_start and time_end are seconds of the original video and part of the clip's name: a clip is a whole file.
    """
    rows = _cells(ask.source, ("label", "youtube_id", "time_start", "time_end"))
    counts = Counter(identity for _, (_, identity, *_) in rows)
    clips: list[Listed] = []
    for place, (label, identity, *times) in rows:
        if not identity or not label:
            raise UserError(f"{place}: must have a youtube_id and a label (a test list has no labels)")
        try:
            start, end = (int(tables.parse_number(time)) for time in times)
        except ValueError:
            raise UserError(f"{place}: time_start and time_end must be seconds, got {times}") from None
        # A file ID.mp4 is ambiguous where several clips of the video are listed.
        whole = (identity,) if counts[identity] == 1 else ()
        clips.append(Listed(place, (f"{identity}_{start:06}_{end:06}", *whole), (label,)))
    names = sorted({name for clip in clips for name in clip.labels})
    return Annotations(tuple(clips), ask.classes or tuple(names), by_stem=True)


def _ucf101(ask: Request) -> Annotations:
    """Read a split of UCF101: trainlist01.txt (`Class/v_Class_g08_c01.avi 1`) or testlist01.txt (without the number).

    labels: classInd.txt, by default next to the list, with lines `1 ApplyEyeMakeup` and so on, without a gap.
    """
    classes = tuple(_classes(ask.labels or ask.source.parent / "classInd.txt", "{}", 1).values())
    clips = []
    for place, text in _lines(ask.source):
        path, _, number = text.partition(" ")
        name, slash, _ = path.partition("/")
        if not slash:
            raise UserError(f"{place}: must be Class/video.avi, got {text!r}")
        if number and name in classes and number != (right := str(1 + classes.index(name))):
            raise UserError(f"{place}: the number of {name} must be {right}, as in the list of classes, got {number}")
        group = re.search(r"_(g\d+)_", path)
        clips.append(Listed(place, (path,), (name,), group and f"{name}_{group[1]}"))
    return Annotations(tuple(clips), classes)


def _hmdb51(ask: Request) -> Annotations:
    """Read a split of HMDB51: CLASS_test_split1.txt for each class, of lines `video.avi 1`: 1 train, 2 test, 0 neither.

    part: 'train' or 'test'.
    """
    if ask.part is None:
        raise UserError(f"{ask.source}: --part must be train or test, got none")
    ending = f"_test_split{ask.split}.txt"
    lists = {path.name.removesuffix(ending): path for path in sorted(ask.source.glob(f"?*{ending}"))}
    if not lists:
        raise UserError(f"{ask.source}: must have files CLASS_test_split{ask.split}.txt, got none; try another --split")
    clips = []
    for name, path in lists.items():
        for place, text in _lines(path):
            video, _, number = text.rpartition(" ")
            if number not in ("0", "1", "2") or not video:
                raise UserError(f"{place}: must be a video and 0, 1 or 2, got {text!r}")
            if number == HMDB51_PARTS[ask.part]:
                clips.append(Listed(place, (f"{name}/{video.strip()}", video.strip()), (name,)))
    return Annotations(tuple(clips), tuple(lists))


def _something_v1(ask: Request) -> Annotations:
    """Read a split of Something-Something V1 or Jester: a CSV `ID;label text`, and a folder ID of pictures a clip."""
    labels = tuple(text for _, text in _lines(_needed_labels(ask, "something-something-v1-labels.csv")))
    clips = []
    for place, text in _lines(ask.source):
        identity, semicolon, label = text.partition(";")
        if not semicolon:
            raise UserError(f"{place}: must be ID;label, got {text!r} (a test list has no labels)")
        clips.append(Listed(place, (identity,), (label,)))
    return Annotations(tuple(clips), labels)


def _needed_labels(ask: Request, usual: str) -> Path:
    if ask.labels is None:
        raise UserError(f"{ask.source}: --labels must name the list of labels, such as {usual}, got none")
    return ask.labels


def _something_v2(ask: Request) -> Annotations:
    """Read a split of Something-Something V2: a JSON list of objects with id and template, and ID.webm a clip.

    labels: a JSON object from label to number: {"Approaching something with your camera": "0", ...}.
    """
    path = _needed_labels(ask, "something-something-v2-labels.json")
    numbers = _json(path)
    listed = _json(ask.source)
    try:
        names = {tables.parse_integer(str(number)): str(name) for name, number in numbers.items()}
    except (AttributeError, TypeError, ValueError):
        raise UserError(f"{path}: must be a JSON object from each label to its number") from None
    if sorted(names) != list(range(len(numbers))):
        raise UserError(f"{path}: must have the numbers 0 to {len(numbers) - 1}, each once")
    if not isinstance(listed, list):
        raise UserError(f"{ask.source}: must be a JSON list of clips")
    clips = []
    for number, clip in enumerate(listed):
        place = f"{ask.source}: entry {number}"
        try:
            identity = str(clip["id"])
            template = str(clip["template"])
        except (KeyError, TypeError):
            raise UserError(f"{place}: must have an id and a template (a test list has no labels)") from None
        # "Holding [something] next to [something]" is the label "Holding something next to something".
        label = template.replace("[", "").replace("]", "")
        clips.append(Listed(place, (f"{identity}.webm", f"{identity}.mp4"), (label,)))
    return Annotations(tuple(clips), tuple(names[number] for number in range(len(names))))


def _json(path: Path) -> Any:
    with opened(path) as file:
        try:
            return from_json(file.read())
        except ValueError as error:
            raise UserError(f"{path}: must be JSON: {error}") from error


def _charades(ask: Request) -> Annotations:
    """Read a split of Charades: a CSV with id, subject and actions, `c092 11.90 21.20;c147 0.00 12.60`, and ID.mp4.

    A video has each of its actions as a label, whenever it happens, or none; its group is the person. labels:
    Charades_v1_classes.txt, by default next to the list, with lines `c000 Holding some clothes` in order.
    """
    names = _classes(ask.labels or ask.source.parent / "Charades_v1_classes.txt", "c{:03}", 0)
    clips = []
    for place, (identity, person, actions) in _cells(ask.source, ("id", "subject", "actions")):
        codes = [action.split()[0] for action in actions.split(";") if action.strip()]
        labels = tuple(names.get(code, code) for code in codes)
        clips.append(Listed(place, (f"{identity}.mp4",), labels, person or None))
    return Annotations(tuple(clips), tuple(names.values()))


def _folders(ask: Request) -> Annotations:
    """Read CLASS/clip below a folder; a clip is a video or a folder of pictures."""
    classes = class_folders(ask.source)
    clips = [
        Listed(entry.path, (f"{name}/{entry.name}",), (name,))
        for name in classes
        for entry in folder_entries(str(ask.source / name))
        if is_video(entry.name) or entry.is_dir()
    ]
    if not clips:
        raise UserError(f"{ask.source}: must have a video or a folder of pictures in a class folder, got none")
    return Annotations(tuple(clips), classes)


def _vid(ask: Request) -> Importable:
    from summit_train.tasks.detection.importers import read_vid

    return read_vid(ask.source)


def _mot(ask: Request) -> Importable:
    from summit_train.tasks.detection.importers import read_mot

    return read_mot(ask.source)


Kind = tuple[Callable[[Request], Importable], str]  # its reader, which raises UserError, and what its source is

KINDS: dict[str, Kind] = {
    "kinetics": (_kinetics, "CSV of Kinetics-400, -600 or -700: label,youtube_id,time_start,time_end,split"),
    "ucf101": (_ucf101, "trainlist01.txt or testlist01.txt; --labels classInd.txt [next to it]"),
    "hmdb51": (_hmdb51, "folder of CLASS_test_split1.txt; --split and --part"),
    "something_v1": (_something_v1, "CSV ID;label; --labels something-something-v1-labels.csv"),
    "something_v2": (_something_v2, "JSON; --labels something-something-v2-labels.json"),
    "jester": (_something_v1, "CSV ID;label; --labels jester-v1-labels.csv"),
    "charades": (_charades, "CSV id,subject,...,actions,length; --labels Charades_v1_classes.txt [next to it]"),
    "folders": (_folders, "folder with a folder for each class, of videos or of folders of pictures"),
    "vid": (_vid, "boxes: ILSVRC2015/Data/VID/train, .../VID/val, or a folder of DET"),
    "mot": (_mot, "boxes: folder of MOTChallenge sequences with img1/ and gt/gt.txt"),
}
