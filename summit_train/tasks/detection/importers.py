"""Data sets with boxes, read from the files that they come with: ImageNet VID and DET, MOTChallenge."""

from __future__ import annotations

import configparser
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from summit_train.core.errors import UserError
from summit_train.data.manifest.clip import ManifestRow
from summit_train.data.manifest.tables import opened, parse_integer, parse_number
from summit_train.data.video.pictures import list_pictures, picture_size
from summit_train.data.video.source import DecodeError, read_bytes
from summit_train.tasks.detection.boxes import BOX, INT32_MAX, MAX_PIXELS, Boxes

# The 30 classes of ImageNet VID in their usual order, and how its files name them.
VID_CLASSES = {
    "n02691156": "airplane", "n02419796": "antelope", "n02131653": "bear", "n02834778": "bicycle",
    "n01503061": "bird", "n02924116": "bus", "n02958343": "car", "n02402425": "cattle", "n02084071": "dog",
    "n02121808": "domestic_cat", "n02503517": "elephant", "n02118333": "fox", "n02510455": "giant_panda",
    "n02342885": "hamster", "n02374451": "horse", "n02129165": "lion", "n01674464": "lizard",
    "n02484322": "monkey", "n03790512": "motorcycle", "n02324045": "rabbit", "n02509815": "red_panda",
    "n02411705": "sheep", "n01726692": "snake", "n02355227": "squirrel", "n02129604": "tiger",
    "n04468005": "train", "n01662784": "turtle", "n04530566": "watercraft", "n02062744": "whale",
    "n02391049": "zebra",
}  # fmt: skip
_EDGES = ("xmin", "ymin", "xmax", "ymax")
# MOT16 and later: pedestrians count; persons on vehicles, standing ones, dummies and reflections are ignored.
_PEDESTRIAN, _IGNORED = 1, (2, 7, 8, 12)
HIDDEN_BELOW = 0.25  # of a person can be seen
LEAST_SIDE = 0.1  # pixels: what is less in fp32 or with three decimals may be nothing
_Row = tuple[int, int, int, tuple[float, float, float, float], bool, bool]  # see BOX


@dataclass(frozen=True)
class LabelledPictures:
    """The videos of a data set with boxes. clips: folders of pictures, or single pictures.

    read: yields, of a clip, its pictures and their size, where each box is written, and the box.
    """

    clips: tuple[Path, ...]
    classes: tuple[str, ...]
    read: Callable[[Path, list[str], tuple[int, int]], Iterator[tuple[str, _Row]]]

    def located(self, root: str) -> Iterator[ManifestRow | DecodeError]:
        """Yield each clip's row, with its path below `root`, or why it is left out."""
        for clip in self.clips:
            try:
                num_frames, boxes = self._found(clip)
                yield ManifestRow(os.path.relpath(clip, root), ";", num_frames, boxes=boxes)
            except DecodeError as error:
                yield DecodeError(os.path.relpath(error.path, root), error.reason)

    def _found(self, clip: Path) -> tuple[int, Boxes]:
        """Return the number of frames and the boxes. Raises DecodeError."""
        pictures = list_pictures(str(clip))
        size, rows = picture_size(pictures[0]), dict[tuple[int, int], _Row]()
        for place, row in self.read(clip, pictures, size):
            frame, track, _, box, *_ = row
            if not all(abs(edge) <= MAX_PIXELS for edge in box) or min(box[2] - box[0], box[3] - box[1]) < LEAST_SIDE:
                raise DecodeError(
                    clip, f"{place}: width and height of a box must be above 0, its edges within a million"
                )
            if not 0 <= track <= INT32_MAX:
                raise DecodeError(clip, f"{place}: a track must be a number from 0 to {INT32_MAX}, got {track}")
            if rows.setdefault((frame, track), row) is not row:
                raise DecodeError(clip, f"{place}: track {track} already has a box in frame {frame}")
        boxes = Boxes(np.array(sorted(rows.values()), BOX), np.array([0, len(rows)]))
        boxes.check(0, clip, len(pictures), *size)
        return len(pictures), boxes


def read_vid(source: Path) -> LabelledPictures:
    """Read ImageNet VID, or pictures of DET: source is .../Data/VID/train, next to .../Annotations/VID/train.

    A folder of annotations 000000.xml, ... is a video. One of another name is a picture, a video of one frame, which is
    left out if none of the classes is in it. Objects of other classes do not count, occluded ones are hidden.
    """
    if "Data" not in os.path.realpath(source).split(os.sep):
        raise UserError(f"{source}: must be a folder below Data, such as ILSVRC2015/Data/VID/train")
    annotations = _annotations(source)
    clips = list[Path]()
    for folder, below, files in os.walk(annotations):
        below.sort()
        stems = sorted(Path(file).stem for file in files if file.endswith(".xml"))
        clip = source / Path(folder).relative_to(annotations)
        is_video = stems and all(map(str.isdecimal, stems))
        clips += [clip] if is_video else [clip / f"{stem}.JPEG" for stem in stems]
    if not clips:
        raise UserError(f"{annotations}: must have the annotations of {source}; has no XML file")
    return LabelledPictures(tuple(clips), tuple(VID_CLASSES.values()), _vid_boxes)


def _annotations(path: Path) -> Path:
    """Return the path of the annotations of `path`: Annotations in place of its last folder Data."""
    parts = list(Path(os.path.realpath(path)).parts)
    parts[len(parts) - 1 - parts[::-1].index("Data")] = "Annotations"
    return Path(*parts)


def _vid_boxes(clip: Path, pictures: list[str], size: tuple[int, int]) -> Iterator[tuple[str, _Row]]:
    annotations = _annotations(clip)
    numbers = list(VID_CLASSES)
    is_empty = True
    files = sorted(annotations.glob("*.xml")) if clip.is_dir() else [annotations.with_suffix(".xml")]
    if [Path(picture).stem for picture in pictures] != [file.stem for file in files]:
        raise DecodeError(clip, f"has {len(pictures)} frames, which do not match its {len(files)} annotations")
    for frame, file in enumerate(files):
        tree = _xml(clip, file)
        try:
            stated = [parse_integer(tree.findtext(f"size/{side}", "")) for side in ("width", "height")]
            for number, item in enumerate(tree.iterfind("object")):
                if (name := item.findtext("name")) in VID_CLASSES:
                    left, top, right, bottom = (parse_number(item.findtext(f"bndbox/{edge}", "")) for edge in _EDGES)
                    box = left, top, right + 1, bottom + 1  # the last pixels belong to it
                    track = parse_integer(item.findtext("trackid", str(number)))
                    hidden = item.findtext("occluded") == "1"
                    yield str(file), (frame, track, numbers.index(name), box, False, hidden)
                    is_empty = False
        except ValueError as error:
            raise DecodeError(clip, f"{file}: invalid number: {error}") from error
        if stated != list(size):
            what = f"{file}: says {stated[0]} x {stated[1]} pixels, but the frame has {size[0]} x {size[1]}"
            raise DecodeError(clip, what)
    if is_empty and not clip.is_dir():
        raise DecodeError(clip, f"has no object of the {len(numbers)} classes")


def _xml(clip: Path, file: Path) -> ElementTree.Element:
    """Parse a file of annotations. One with a document type, where entities are defined, is refused unread."""
    content = read_bytes(str(file))
    if b"<!DOCTYPE" in content or b"\0" in content:  # a zero byte: UTF-16, which would hide the word
        raise DecodeError(clip, f"{file}: must be plain XML without a document type")
    try:
        return ElementTree.fromstring(content)
    except (ElementTree.ParseError, LookupError, ValueError) as error:  # an encoding that there is not
        raise DecodeError(clip, f"{file}: is not XML: {error}") from error


def read_mot(source: Path) -> LabelledPictures:
    """Read MOTChallenge: source is a folder of sequences, or one of them, each with img1/ and gt/gt.txt."""
    found = sorted(path.parent.parent / "img1" for path in source.rglob("gt.txt") if path.parent.name == "gt")
    if not found:
        raise UserError(f"{source}: must have sequences with img1/ and gt/gt.txt; has none (test sets have no gt)")
    return LabelledPictures(tuple(found), ("person",), _mot_boxes)


def _mot_boxes(clip: Path, pictures: list[str], size: tuple[int, int]) -> Iterator[tuple[str, _Row]]:
    """Read gt.txt: frame, id, left, top, width, height, flag; in nine columns also class and visibility. All from 1.

    Ignored are flag 0 and what looks like a person; other classes do not count.
    """
    _check_seqinfo(clip, [len(pictures), *size])
    path = clip.parent / "gt" / "gt.txt"
    with opened(path) as file:
        for line, text in enumerate(file, 1):
            cells = text.split(",")
            try:
                frame, track, left, top, width, height, flag = map(parse_number, cells[:7])
                kind, visible = map(parse_number, cells[7:9]) if len(cells) == 9 else (_PEDESTRIAN, 1.0)
                if frame < 1 or frame != int(frame) or track != int(track):
                    raise ValueError
            except ValueError:
                what = f"{path}:{line}: must be frame,id,left,top,width,height,flag, ..., got {text.strip()!r:.200}"
                raise DecodeError(clip, what) from None
            if kind == _PEDESTRIAN or kind in _IGNORED:
                box = left - 1, top - 1, left - 1 + width, top - 1 + height
                is_ignored = flag == 0 or kind != _PEDESTRIAN
                yield f"{path}:{line}", (int(frame) - 1, int(track), 0, box, is_ignored, visible < HIDDEN_BELOW)


def _check_seqinfo(clip: Path, found: list[int]) -> None:
    """Compare the frames, the width and the height with seqinfo.ini, where there is one. Raises DecodeError."""
    info, path = configparser.ConfigParser(interpolation=None), clip.parent / "seqinfo.ini"
    try:
        if path.exists():
            info.read_string(read_bytes(str(path)).decode())
        section = dict(info.items("Sequence")) if info.has_section("Sequence") else {}
        stated = [parse_integer(section[name]) for name in ("seqlength", "imwidth", "imheight") if name in section]
    except (configparser.Error, ValueError) as error:
        raise DecodeError(clip, f"its seqinfo.ini is wrong: {error}") from error
    if stated and stated != found:
        raise DecodeError(clip, f"has frames, width and height {found}, but seqinfo.ini says {stated}")
