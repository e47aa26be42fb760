"""The boxes of a list of videos: which object is where, in which frame. Reading the list, checking it, writing it.

The list is a CSV with a row for each box. It is read in blocks, so that millions of rows are never Python objects at
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.core.files import write_text
from summit_train.core.text import csv_text
from summit_train.data.manifest.tables import DTYPES, Table, csv_rows, opened, parse_flag, parse_label
from summit_train.data.video.augment import View

# One box of one frame, in pixels of the upright frame as it is stored: left and top are the edges of the first pixel,
# right and bottom those behind the last one. track: the same for an object in all frames of its video. label: from 0.
# ignored: neither finding nor missing it is an error. hidden: it can hardly be seen in this frame alone.
BOX = np.dtype(
    [
        ("frame", "<i4"),
        ("track", "<i4"),
        ("label", "<i4"),
        ("box", "<f4", (4,)),
        ("ignored", "?"),
        ("hidden", "?"),
    ]
)
BOX_COLUMNS = ("track", "label", "left", "top", "width", "height")
COLUMNS = ("video", "frame", *BOX_COLUMNS)
FLAGS = ("ignore", "hidden")  # optional, as are the facts of a video, which one of its rows has
FACTS = ("num_frames", "sha256")
IGNORED, NO_BOX = -2, -1  # in place of a label in a target
_INT32_MAX = 2**31 - 1
_MAX_PIXELS = 1e6
_ABOVE_0 = math.ulp(0.0)
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True, eq=False)
class Boxes:
    """The boxes of V videos. rows: (B,) of BOX, by video, in it by frame. ends: int64 (V + 1,), 0 first.

    Video v has rows[ends[v]:ends[v + 1]]. lines: int32 (B,), in the list `source`, or (0,) where they are not known.
    """

    rows: NDArray[np.void]
    ends: NDArray[np.int64]
    lines: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    source: str = ""

    def of(self, video: int) -> NDArray[np.void]:
        return self.rows[self.ends[video] : self.ends[video + 1]]

    def only(self, video: int) -> Boxes:
        """Return the boxes of one video."""
        part = slice(self.ends[video], self.ends[video + 1])
        return Boxes(self.rows[part], np.array([0, part.stop - part.start]), self.lines[part], self.source)

    def clip_labels(self) -> dict[str, NDArray[Any]]:
        """Return the labels of the clips, see `reading.Manifest`: the classes that occur in each."""
        videos = np.repeat(np.arange(len(self.ends) - 1), np.diff(self.ends))
        width = 1 + int(self.rows["label"].max(initial=0))
        clips, labels = np.divmod(np.unique(videos * width + self.rows["label"]), width)
        is_first = np.diff(clips, prepend=-1) > 0
        first = np.full(len(self.ends) - 1, -1, np.int32)
        more = np.zeros(int(np.sum(~is_first)), DTYPES["more_labels"])
        first[clips[is_first]] = labels[is_first]
        more["clip"], more["label"] = clips[~is_first], labels[~is_first]
        return {"labels": first, "more_labels": more}

    def check_frames(self, frame_counts: NDArray[np.int32]) -> None:
        """Raise UserError at the first box in a frame that its video does not have. frame_counts: -1 where unknown."""
        counts = np.repeat(frame_counts, np.diff(self.ends))
        bad = np.flatnonzero((counts > 0) & (self.rows["frame"] >= counts))
        if len(bad):
            what = f"frame {self.rows['frame'][bad[0]]} must be below num_frames, {counts[bad[0]]}"
            raise UserError(f"{self.source}:{self.lines[bad[0]]}: {what}: frames are numbered from 0")

    def cut(self, videos: NDArray[np.int64], starts: NDArray[np.int64]) -> Boxes:
        """Return the boxes of spans, which begin at these frames of these videos, and end where the next one begins."""
        firsts = [
            int(self.ends[video]) + int(np.searchsorted(self.of(video)["frame"], start)) if start else self.ends[video]
            for video, start in zip(videos.tolist(), starts.tolist(), strict=True)
        ]
        return Boxes(self.rows, np.array([*firsts, self.ends[-1]], np.int64), self.lines, self.source)

    def problem(self, video: int, num_frames: int, width: int, height: int) -> str | None:
        """Return which box does not lie in the frames of its video, with its line, and how many; None if all do."""
        rows = self.of(video)
        left, top, right, bottom = rows["box"].T
        is_outside = (left >= width) | (top >= height) | (right <= 0) | (bottom <= 0)
        bad = np.flatnonzero(is_outside | (rows["frame"] >= num_frames))
        if not len(bad):
            return None
        row, place = rows[bad[0]], int(self.ends[video] + bad[0])
        line = f" ({self.source}:{self.lines[place]})" if len(self.lines) else ""
        what = f"its box of track {row['track']} in frame {row['frame']}{line}"
        others = f"; {len(bad)} boxes are wrong" if len(bad) > 1 else ""
        if row["frame"] >= num_frames:
            return f"{what} has no frame: the video has {num_frames}, numbered from 0{others}"
        left, top, right, bottom = row["box"].tolist()
        at = f"{left:g}, {top:g} to {right:g}, {bottom:g}"
        return f"{what} lies outside the frame of {width} x {height}: {at}{others}"

    def targets(self, video: int, frames: NDArray[np.int64], view: View, size: tuple[int, int]) -> list[Any]:
        """Return what a view shows of each frame's boxes: float32 (n, 5), see `loader.MicroBatch`.

        frames: int64 (T,), numbers in the video. size: width and height of the frame that the view was made for. A box
        of which less than a pixel is left on a side is not among them.
        """
        rows = self.of(video)
        edges = np.searchsorted(rows["frame"], [frames, frames + 1])
        found = []
        for first, end in edges.T.tolist():
            here = rows[first:end]
            boxes = view.boxes(here["box"], size)
            labels = np.where(here["ignored"], IGNORED, here["label"])
            seen = np.all(boxes[:, 2:] - boxes[:, :2] >= 1, axis=1)
            found.append(np.column_stack([boxes, labels])[seen].astype(np.float32))
        return found


def stacked_targets(clips: Sequence[Sequence[NDArray[np.float32]]]) -> NDArray[np.float32]:
    """Return the targets of n clips of T frames as one array (n, T, most, 5); rows without a box are -1."""
    most = max(1, *(len(frame) for clip in clips for frame in clip))
    stacked = np.full((len(clips), len(clips[0]), most, 5), NO_BOX, np.float32)
    for places, clip in zip(stacked, clips, strict=True):
        for place, frame in zip(places, clip, strict=True):
            place[: len(frame)] = frame
    return stacked


# The list.


def box_header(source: Path) -> tuple[int, list[str]] | None:
    """Return the line and the names of a list's header if the list has boxes, else None. Raises UserError."""
    with opened(source, "the manifest ") as file:
        line, text = next(((line, text) for line, text in enumerate(file, 1) if text.strip()), (0, ""))
    names = [name.strip().strip('"') for name in text.split(",")]
    if not {"video", "frame"} <= set(names) or "path" in names:
        return None
    for name in COLUMNS:
        if names.count(name) != 1:
            raise UserError(f"{source}:{line}: a list with boxes must have one column {name!r}, got {','.join(names)}")
    return line, names


def read_boxes(source: Path, header: tuple[int, list[str]], classes: tuple[str, ...] | None) -> tuple[Table, Boxes]:
    """Read a list with boxes: its videos, in the order of their first rows, as a table of clips, and their boxes.

    header: from `box_header`. Raises UserError at the first wrong row.
    """
    line, names = header
    block = _Blocks(source, classes)
    with opened(source, "the manifest ") as file:
        rows = csv_rows(source, file, line, len(names))
        parts = [block.read(names, part) for part in iter(lambda: list(islice(rows, _ROWS_AT_ONCE)), [])]
    videos, lines, found = (np.concatenate(column) for column in zip(*parts, strict=True)) if parts else _nothing()
    order = np.lexsort((found["track"], found["frame"], videos))
    videos, lines, found = videos[order], lines[order], found[order]
    same = np.all([np.diff(column) == 0 for column in (videos, found["frame"], found["track"])], axis=0)
    if same.any():
        first = int(np.argmax(same))
        one, other = sorted((int(lines[first]), int(lines[first + 1])))
        what = f"track {found['track'][first]} already has a box in frame {found['frame'][first]}, in line {one}"
        raise UserError(f"{source}:{other}: {what}")
    ends = np.searchsorted(videos, np.arange(len(block.videos) + 1))
    cells: dict[str, Sequence[str]] = {"path": list(block.videos), "label": ["0"] * len(block.videos)}
    cells |= {name: [block.facts[name].get(video, "") for video in range(len(ends) - 1)] for name in FACTS}
    return (block.first_lines, cells), Boxes(found, ends.astype(np.int64), lines, str(source))


def _nothing() -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.void]]:
    return np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, BOX)


class _Blocks:
    """Parses blocks of rows. videos: the number of each video that was seen so far; first_lines: their first lines.

    facts: of some videos, by their numbers.
    """

    def __init__(self, source: Path, classes: tuple[str, ...] | None) -> None:
        self.source = source
        self.numbers = {name: number for number, name in enumerate(classes or ())}
        self.videos, self.first_lines = dict[str, int](), list[int]()
        self.facts: dict[str, dict[int, str]] = {name: {} for name in FACTS}

    def read(self, names: list[str], rows: list[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.void]]:
        """Return the video, the line and the box of each row that has a box."""
        lines, *texts = zip(*rows, strict=True)
        cells = dict(zip(names, texts, strict=True))
        videos = [self.videos.setdefault(video, len(self.videos)) for video in cells["video"]]
        for video, line in zip(videos, lines, strict=True):
            if video == len(self.first_lines):
                self.first_lines.append(line)
        self._note_facts(cells, videos, lines)
        text = np.char.strip(np.array([cells[name] for name in BOX_COLUMNS]))
        lacking = (text == "").sum(0)
        self._refuse(lines, (lacking > 0) & (lacking < len(text)), lambda row: "must have all cells of a box, or none")
        # The frame of a row without a box is checked, too.
        frames = np.char.strip(np.array(cells["frame"]))
        has_box = lacking == 0
        whole = self._numbers(lines, "frame", np.where((frames == "") & ~has_box, "0", frames), 0, is_whole=True)
        here, at = np.flatnonzero(has_box), [line for line, use in zip(lines, has_box, strict=True) if use]
        boxes = np.zeros(len(here), BOX)
        boxes["frame"] = whole[here]
        boxes["track"] = self._numbers(at, "track", text[0, here], 0, is_whole=True)
        boxes["label"] = self._each(at, text[1, here], lambda cell: parse_label(self.numbers, cell))
        lows = (-_MAX_PIXELS, -_MAX_PIXELS, _ABOVE_0, _ABOVE_0)
        columns = zip(BOX_COLUMNS[2:], text[2:, here], lows, strict=True)
        left, top, width, height = (self._numbers(at, name, column, low) for name, column, low in columns)
        boxes["box"] = np.column_stack([left, top, left + width, top + height])
        for name, flag in zip(FLAGS, ("ignored", "hidden"), strict=True):
            if name in cells:
                boxes[flag] = self._each(at, np.array(cells[name])[here], partial(parse_flag, name))
        return np.array(videos)[here], np.array(at, np.int32), boxes

    def _note_facts(self, cells: Mapping[str, Sequence[str]], videos: list[int], lines: Sequence[int]) -> None:
        for name in FACTS:
            known = self.facts[name]
            for video, line, cell in zip(videos, lines, cells.get(name, ()), strict=False):
                if cell and known.setdefault(video, cell) != cell:
                    raise UserError(
                        f"{self.source}:{line}: {name} must be {known[video]} as in the rows before, got {cell}"
                    )

    def _refuse(self, lines: Sequence[int], bad: NDArray[np.bool_], why: Callable[[int], str]) -> None:
        if bad.any():
            row = int(np.argmax(bad))
            raise UserError(f"{self.source}:{lines[row]}: {why(row)}")

    def _numbers(
        self, lines: Sequence[int], name: str, cells: NDArray[Any], low: float, *, is_whole: bool = False
    ) -> NDArray[np.float64]:
        """Return the cells of a column as numbers, checked."""
        try:
            values = cells.astype(np.float64)
        except ValueError:
            values = np.array([_number(cell) for cell in cells.tolist()])
        high = _INT32_MAX if is_whole else _MAX_PIXELS
        bad = ~((values >= low) & (values <= high)) | (is_whole & (values != np.floor(values)))
        right = "a whole number from 0 on" if is_whole else "a number of pixels" + (" above 0" if low > 0 else "")
        self._refuse(lines, bad, lambda row: f"{name} must be {right}, got {str(cells[row])!r}")
        return values

    def _each(self, lines: Sequence[int], cells: NDArray[Any], parse: Callable[[str], Any]) -> list[Any]:
        """Parse each different cell once."""
        values = dict[str, Any]()
        texts = cells.tolist()
        for cell in dict.fromkeys(texts):
            try:
                values[cell] = parse(cell)
            except ValueError as error:
                raise UserError(f"{self.source}:{lines[texts.index(cell)]}: {error}") from None
        return [values[cell] for cell in texts]


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def write_boxes(path: str | Path, videos: Iterable[tuple[str, int | None, str | None, NDArray[np.void]]]) -> None:
    """Write a list with boxes, whole or not at all. videos: path, number of frames, SHA-256 and boxes of each."""
    write_text(path, csv_text(_written(videos)))


def _written(videos: Iterable[tuple[str, int | None, str | None, NDArray[np.void]]]) -> Iterator[Sequence[object]]:
    yield *COLUMNS, *FLAGS, *FACTS
    for path, num_frames, sha256, boxes in videos:
        yield path, *[""] * (len(COLUMNS) + len(FLAGS) - 1), num_frames or "", sha256 or ""
        for frame, track, label, box, ignored, hidden in boxes.tolist():
            left, top, right, bottom = box.tolist()
            numbers = (f"{round(one, 3):.12g}" for one in (left, top, right - left, bottom - top))
            yield path, frame, track, label, *numbers, int(ignored), int(hidden), "", ""
