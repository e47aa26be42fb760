"""The boxes of a list of videos: which object is where, in which frame. Reading the list, checking it, writing it.

The list is a CSV with a row for each box. It is read row by row: millions of rows are never Python objects at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from summit_train.core.errors import UserError
from summit_train.data.manifest import tables
from summit_train.data.manifest.tables import DTYPES, FLAG, Table, check_header, csv_rows, parse_label
from summit_train.data.video.augment import View
from summit_train.data.video.encode import with_areas
from summit_train.data.video.source import DecodeError

# One box of one frame, in pixels of the upright frame as it is stored: left and top are the edges of the first pixel,
# right and bottom those behind the last one. track: the same for an object in all frames of its video. label: from 0.
# ignored: neither finding nor missing it is an error. hidden: it can hardly be seen in this frame alone.
BOX = np.dtype([
    ("frame", "<i4"), ("track", "<i4"), ("label", "<i4"), ("box", "<f4", (4,)), ("ignored", "?"), ("hidden", "?"),
])  # fmt: skip
BOX_COLUMNS = ("track", "label", "left", "top", "width", "height")
COLUMNS = ("video", "frame", *BOX_COLUMNS)
FLAGS = ("ignore", "hidden")  # optional, as are the facts of a video, which one of its rows has
FACTS = ("num_frames", "sha256")
LIST_HEADER = (*COLUMNS, *FLAGS, *FACTS)
IGNORED, NO_BOX = -2, -1  # in place of a label in a target
INT32_MAX = 2**31 - 1
FrameBoxes = list[NDArray[np.float32]]  # of each frame of a view, float32 (n, 5): see Boxes.stacked
MAX_PIXELS = 1e6


@dataclass(frozen=True, eq=False)
class Boxes:
    """The boxes of V videos. rows: (B,) of BOX, by video, in it by frame. ends: int64 (V + 1,), 0 first.

    Video v has rows[ends[v]:ends[v + 1]]. lines: int32 (B,), in the list `source`, or (0,) where they are not known.
    types: of `columns`, which a packed set keeps under these names.
    """

    types: ClassVar[Mapping[str, DTypeLike]] = MappingProxyType({"boxes": BOX, "box_ends": np.int64})

    rows: NDArray[np.void]
    ends: NDArray[np.int64]
    lines: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    source: str = ""

    @classmethod
    def of_columns(cls, columns: Mapping[str, NDArray[Any]], num_clips: int, source: str) -> Boxes:
        """Read the boxes of a packed set. Raises ValueError for columns that do not fit together."""
        rows = columns["boxes"]
        ends = columns["box_ends"]
        is_whole = len(ends) == num_clips + 1 and (ends[0], ends[-1]) == (0, len(rows))
        if not is_whole or np.any(np.diff(ends) < 0):
            raise ValueError("some of its boxes do not belong to a clip")
        return cls(rows, ends, source=source)

    def list_rows(self, path: str, num_frames: int | None, sha256: str | None) -> Iterator[Sequence[object]]:
        """Yield the rows of one video in a list: that of its facts, without a box, and one for each box."""
        yield path, *[""] * (len(COLUMNS) + len(FLAGS) - 1), num_frames or "", sha256 or ""
        for frame, track, label, box, ignored, hidden in self.rows.tolist():
            left, top, right, bottom = box.tolist()
            numbers = (f"{round(edge, 3):.12g}" for edge in (left, top, right - left, bottom - top))
            yield path, frame, track, label, *numbers, int(ignored), int(hidden), "", ""

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        return {"boxes": self.rows, "box_ends": self.ends}

    def of(self, video: int) -> NDArray[np.void]:
        return self.rows[self.ends[video] : self.ends[video + 1]]

    def only(self, clip: int) -> Boxes:
        """Select the boxes of one clip."""
        part = slice(self.ends[clip], self.ends[clip + 1])
        return Boxes(self.rows[part], np.array([0, part.stop - part.start]), self.lines[part], self.source)

    def clip_columns(self) -> dict[str, NDArray[Any]]:
        """Return the labels of the clips: the classes of the boxes of each that count."""
        videos = np.repeat(np.arange(len(self.ends) - 1), np.diff(self.ends))
        width = 1 + int(self.rows["label"].max(initial=0))
        numbers = (videos * width + self.rows["label"])[~self.rows["ignored"]]
        clips, labels = np.divmod(np.unique(numbers), width)
        is_first = np.diff(clips, prepend=-1) > 0
        first = np.full(len(self.ends) - 1, -1, np.int32)
        more = np.zeros(int(np.sum(~is_first)), DTYPES["more_labels"])
        first[clips[is_first]] = labels[is_first]
        more["clip"], more["label"] = clips[~is_first], labels[~is_first]
        return {"labels": first, "more_labels": more}

    def check_list(self, frame_counts: NDArray[np.int32]) -> None:
        """Raise UserError at the first box in a frame that its video does not have."""
        counts = np.repeat(frame_counts, np.diff(self.ends))
        bad = np.flatnonzero((counts > 0) & (self.rows["frame"] >= counts))
        if len(bad):
            what = f"frame {self.rows['frame'][bad[0]]} must be below num_frames, {counts[bad[0]]}"
            raise UserError(f"{self.source}:{self.lines[bad[0]]}: {what}: frames are numbered from 0")

    def check_training(self, num_classes: int, class_names: Sequence[str]) -> None:
        """Raise UserError for a class that cannot be learned."""
        lacking = sorted(set(range(num_classes)) - set(np.unique(self.rows["label"][~self.rows["ignored"]]).tolist()))
        if lacking:
            names = dict(enumerate(class_names))
            classes = ", ".join(repr(names.get(label, str(label))) for label in lacking[:5])
            what = f"{self.source} has no box of {len(lacking)} of {num_classes} classes: {classes}"
            raise UserError(f"data.train: {what}; each class must have a box that is not ignored")

    def num_frames(self) -> NDArray[np.int64]:
        """Return the least number of frames of each video, by its last box."""
        return np.array([1 + self.of(video)["frame"].max(initial=-1) for video in range(len(self.ends) - 1)], np.int64)

    def cut(self, videos: NDArray[np.int64], starts: NDArray[np.int64]) -> Boxes:
        """Divide the boxes among spans, which begin at these frames of these videos and end at the next one."""
        owners = np.repeat(np.arange(len(self.ends) - 1), np.diff(self.ends))
        firsts = np.searchsorted(owners << 32 | self.rows["frame"], videos << 32 | starts)
        return Boxes(self.rows, np.array([*firsts, self.ends[-1]], np.int64), self.lines, self.source)

    def check(self, clip: int, path: str | Path, num_frames: int, width: int, height: int) -> None:
        """Raise DecodeError at the first box outside the frames of its video, `path`, with its line."""
        rows = self.of(clip)
        left, top, right, bottom = rows["box"].T
        is_outside = (left >= width) | (top >= height) | (right <= 0) | (bottom <= 0)
        bad = np.flatnonzero(is_outside | (rows["frame"] >= num_frames))
        if not len(bad):
            return
        row = rows[bad[0]]
        place = int(self.ends[clip] + bad[0])
        line = f" ({self.source}:{self.lines[place]})" if len(self.lines) else ""
        what = f"its box of track {row['track']} in frame {row['frame']}{line}"
        others = f"; {len(bad)} boxes are wrong" if len(bad) > 1 else ""
        if row["frame"] >= num_frames:
            raise DecodeError(path, f"{what} has no frame: the video has {num_frames}, numbered from 0{others}")
        left, top, right, bottom = row["box"].tolist()
        at = f"{left:g}, {top:g} to {right:g}, {bottom:g}"
        raise DecodeError(path, f"{what} lies outside the frame of {width} x {height}: {at}{others}")

    def targets(self, clip: int, frames: NDArray[np.int64], view: View, size: tuple[int, int]) -> FrameBoxes:
        """Map the boxes of frames (T,), by their numbers in the video, into a view.

        A box of which less than a pixel is left on a side is not among them. size: width and height of the frame that
        the view was made for.
        """
        rows = self.of(clip)
        edges = np.searchsorted(rows["frame"], [frames, frames + 1])
        found = []
        for first, end in edges.T.tolist():
            here = rows[first:end]
            boxes = view.moved(here["box"], size)
            labels = np.where(here["ignored"], IGNORED, here["label"])
            seen = np.all(boxes[:, 2:] - boxes[:, :2] >= 1, axis=1)
            found.append(np.column_stack([boxes, labels])[seen].astype(np.float32))
        return found

    @staticmethod
    def drawn(frames: NDArray[np.uint8], targets: FrameBoxes, places: Sequence[int], scale: float) -> NDArray[np.uint8]:
        """Return the frames at these places of a view, scaled, (n, H, W, 3), with the boxes that count.

        Each class has a colour of its own.
        """
        shown = []
        for frame, place in zip(frames, places, strict=True):
            boxes = (targets[place][targets[place][:, 4] >= 0] * [scale, scale, scale, scale, 1]).tolist()
            areas = [(int(label), "", (x, y, right - x, bottom - y)) for x, y, right, bottom, label in boxes]
            shown.append(with_areas(frame, areas))
        return np.stack(shown)

    @staticmethod
    def stacked(targets: Sequence[FrameBoxes]) -> NDArray[np.float32]:
        """Return the boxes of n clips of T frames, float32 (n, T, most, 5): left, top, right, bottom, label.

        They are in pixels of the clip. The label of an ignored box is -2; a row without a box is -1.
        """
        most = max(1, *(len(frame) for clip in targets for frame in clip))
        stacked = np.full((len(targets), len(targets[0]), most, 5), NO_BOX, np.float32)
        for places, clip in zip(stacked, targets, strict=True):
            for place, frame in zip(places, clip, strict=True):
                place[: len(frame)] = frame
        return stacked


# The list.


def read_boxes(
    source: Path, texts: Iterable[str], line: int, names: Sequence[str], classes: tuple[str, ...] | None
) -> tuple[list[Table], Boxes]:
    """Read a list with boxes: its videos as a table of clips, and the boxes.

    texts: the lines after its header, which is in `line` and has these names. Raises UserError.
    """
    check_header(f"{source}:{line}", names, COLUMNS, LIST_HEADER)
    reader = _Rows(names, classes)
    parsed = reader.parsed(source, csv_rows(source, texts, line, len(names)))
    found = np.fromiter(parsed, np.dtype([("video", "<i4"), ("line", "<i4"), ("box", BOX)]))
    boxes = found["box"]
    found = found[np.lexsort((boxes["track"], boxes["frame"], found["video"]))]
    boxes = found["box"]
    same = np.all([np.diff(key) == 0 for key in (found["video"], boxes["frame"], boxes["track"])], axis=0)
    if same.any():
        first = int(np.argmax(same))
        one, other = sorted(found["line"][first : first + 2].tolist())
        what = f"track {boxes['track'][first]} already has a box in frame {boxes['frame'][first]}, in line {one}"
        raise UserError(f"{source}:{other}: {what}")
    sides = boxes["box"][:, 2:] - boxes["box"][:, :2]
    if len(flat := np.flatnonzero((sides <= 0).any(1))):
        what = "width or height is too small for a box so far from the frame's corner"
        raise UserError(f"{source}:{found['line'][flat[0]]}: {what}")
    ends = np.searchsorted(found["video"], np.arange(len(reader.videos) + 1))
    cells: dict[str, Sequence[str]] = {"path": list(reader.videos), "label": ["0"] * len(reader.videos)}
    cells |= {name: [facts.get(name, "") for facts in reader.facts] for name in FACTS}
    return [(reader.first_lines, cells)], Boxes(boxes.copy(), ends.astype(np.int64), found["line"].copy(), str(source))


class _Rows:
    """Parses the rows of a list. videos: the number of each video so far; first_lines, facts: of each of them."""

    def __init__(self, names: Sequence[str], classes: tuple[str, ...] | None) -> None:
        numbers = {name: number for number, name in enumerate(classes or ())}
        # Each different cell is parsed once.
        self._label = cache(partial(parse_label, numbers))
        self._flags = {name: cache(partial(FLAG.value, name)) for name in FLAGS}
        self._names = names
        self.videos, self.first_lines, self.facts = dict[str, int](), list[int](), list[dict[str, str]]()

    def parsed(self, source: Path, rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, int, tuple[Any, ...]]]:
        """Yield the video, the line and the box of each row that has a box."""
        for line, *texts in rows:
            cells = dict(zip(self._names, texts, strict=True))
            try:
                video, box = self._video(line, cells), self._box(cells)
            except ValueError as error:
                raise UserError(f"{source}:{line}: {error}") from None
            if box is not None:
                yield video, line, box

    def _video(self, line: int, cells: Mapping[str, str]) -> int:
        video = self.videos.setdefault(cells["video"], len(self.videos))
        if video == len(self.facts):
            self.first_lines.append(line)
            self.facts.append({})
        for name in FACTS:
            if (cell := cells.get(name)) and (known := self.facts[video].setdefault(name, cell)) != cell:
                raise ValueError(f"{name} must be {known} as in the rows before, got {cell}")
        return video

    def _box(self, cells: Mapping[str, str]) -> tuple[Any, ...] | None:
        """Return the row of BOX, None for a row without a box."""
        num_empty = sum(not cells[name].strip() for name in BOX_COLUMNS)
        if 0 < num_empty < len(BOX_COLUMNS):
            raise ValueError("must have all cells of a box, or none")
        if num_empty:
            if cells["frame"].strip():
                _whole(cells, "frame")
            return None
        is_place, is_length = (lambda one: abs(one) <= MAX_PIXELS), (lambda one: 0 < one <= MAX_PIXELS)
        left, top = (_number(cells, name, is_place, "a number of pixels") for name in ("left", "top"))
        width, height = (_number(cells, name, is_length, "a number of pixels above 0") for name in ("width", "height"))
        flags = (name in cells and flag(cells[name]) for name, flag in self._flags.items())
        edges = left, top, left + width, top + height
        return _whole(cells, "frame"), _whole(cells, "track"), self._label(cells["label"]), edges, *flags


def _whole(cells: Mapping[str, str], name: str) -> int:
    return int(
        _number(cells, name, lambda value: 0 <= value <= INT32_MAX and value.is_integer(), "a whole number from 0 on")
    )


def _number(cells: Mapping[str, str], name: str, is_right: Callable[[float], bool], expected: str) -> float:
    with suppress(ValueError):
        value = tables.parse_number(cells[name])
        if is_right(value):
            return value
    raise ValueError(f"{name} must be {expected}, got {cells[name].strip()!r}")
