"""A data set's list of clips: read from a CSV, a header-less list, class folders or a packed set.

That of a packed set is a folder of .npy files, which all processes of a node map.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from summit_train.core.errors import UserError
from summit_train.core.files import read_file, regular, replacing, write_json, write_text
from summit_train.core.machine import free_memory
from summit_train.core.text import binary_size, from_json
from summit_train.data.manifest import tables
from summit_train.data.manifest.clip import Clip, ManifestRow
from summit_train.data.manifest.tables import CLASSES_FILE, DTYPES, OPTIONAL, Table, label_text, opened
from summit_train.data.video.region import WHOLE_FRAME, Region
from summit_train.data.video.span import WHOLE, Span

if TYPE_CHECKING:
    from summit_train.tasks.detection.boxes import Boxes

# A packed set: its record, the columns of its manifest, and the folder that exists until it is finished.
PACK_FILE = "pack.json"
PACKED_MANIFEST = "manifest"
PACKING_FOLDER = ".packing"
_ABOUT = "columns.json"


@dataclass(frozen=True, eq=False)
class Manifest:
    """The N clips of a data set, from `read_manifest`. That of a packed set is pickled as the set's folder.

    source: the file or folder it came from. folder: of class folders, to which the stored paths are relative ("" for
    lists, whose paths are relative to `data.root`). paths: all paths' bytes, uint8; path i is
    paths[offsets[i]:offsets[i + 1]]. offsets: uint32 or int64 (N + 1,). labels: int32 (N,), each clip's lowest label,
    -1 for none. more_labels: the others, `clip` and `label` of each, rising, or (0,) where every clip has one at most.
    frame_counts: int32 (N,), -1 where unknown. reversed_flags: bool (N,), True for clips that are played backwards.
    lines: int32 (N,), in the source, 0 in class folders. digests: V32 (N,), the files' SHA-256, zeros where unknown, or
    (0,) where none is known. spans: (N,), each clip's `start` and `end` in its video, see Span, or (0,) where all are
    whole videos. is_packed: the clips are in shards, in the folder `source`. stored_fingerprint: a packed set's.
    pixels: what packing did to the pixels ("": nothing). regions: (N,), each clip's part of the frame, see Region, or
    (0,) where it is not read. groups: int32 (N,), the place of each clip's group in `group_names`, -1 where it has
    none, or (0,) if all have none. boxes: those in the clips' frames, which the labels then follow from. skipped: the
    number of the other files in class folders by extension.
    """

    source: str
    folder: str
    classes: tuple[str, ...] | None
    paths: NDArray[np.uint8]
    offsets: NDArray[np.uint32] | NDArray[np.int64]
    labels: NDArray[np.int32]
    frame_counts: NDArray[np.int32]
    reversed_flags: NDArray[np.bool_]
    lines: NDArray[np.int32]
    digests: NDArray[np.void]
    spans: NDArray[np.void]
    more_labels: NDArray[np.void]
    is_packed: bool = False
    stored_fingerprint: str = ""
    pixels: str = ""
    regions: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, DTYPES["regions"]))
    groups: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    group_names: tuple[str, ...] = ()
    boxes: Boxes | None = None
    skipped: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        """Return a clip's path: absolute, or relative to `data.root`."""
        return os.path.join(self.folder, self.clip(index).path)

    def clip(self, index: int) -> Clip:
        """Return a clip with its path as it enters the fingerprint: in class folders relative to them."""
        path = self.paths[self.offsets[index] : self.offsets[index + 1]].tobytes()
        span = Span(*self.spans[index].item()) if len(self.spans) else WHOLE
        region = Region(*self.regions[index].item()) if len(self.regions) else WHOLE_FRAME
        return Clip(path.decode("utf-8", "surrogateescape"), span, bool(self.reversed_flags[index]), region)

    def num_frames(self, index: int) -> int | None:
        """Return the video's frame count, or None where unknown."""
        count = int(self.frame_counts[index])
        return count if count > 0 else None

    def sha256(self, index: int) -> bytes | None:
        """Return the SHA-256 of the clip's file, 32 bytes, or None where unknown."""
        digest = self.digests[index : index + 1].tobytes()
        return digest if any(digest) else None

    def group(self, index: int) -> str | None:
        """Return the name of the group that a clip belongs to."""
        number = int(self.groups[index]) if self.group_names else -1
        return self.group_names[number] if number >= 0 else None

    @property
    def has_spans(self) -> bool:
        """Return True if a clip is less than its whole video."""
        return bool(np.any(self.spans["start"] != WHOLE.start) or np.any(self.spans["end"] != WHOLE.end))

    def row(self, index: int) -> ManifestRow:
        """Return a clip's row without the columns that training does not read (see `read_rows`)."""
        clip = self.clip(index)
        digest = self.sha256(index)
        return ManifestRow(
            self.path(index),
            label_text(self.labels_of(index)),
            self.num_frames(index),
            group=self.group(index),
            sha256=digest.hex() if digest else None,
            reversed=clip.is_reversed,
            span=clip.span,
            boxes=self.boxes and self.boxes.only(index),
        )

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes, label by label: numbers if they have none."""
        return self.classes or tuple(map(str, range(self.num_labels)))

    @property
    def num_labels(self) -> int:
        """Return the highest label + 1."""
        return 1 + max(int(self.labels.max()), int(self.more_labels["label"].max(initial=-1)))

    def labels_of(self, clip: int) -> tuple[int, ...]:
        first = int(self.labels[clip])
        clips = self.more_labels["clip"]
        more = slice(bisect_left(clips, clip), bisect_right(clips, clip))  # searchsorted would copy all of them
        return (*((first,) if first >= 0 else ()), *self.more_labels["label"][more].tolist())

    def class_labels(self, clips: NDArray[np.int64], num_classes: int | None) -> NDArray[np.int64] | NDArray[np.bool_]:
        """Return the labels of clips, of one class each, int64 (n,).

        num_classes: where a clip may have several or none, and its labels are bool (n, num_classes); higher labels are
        left out.
        """
        if num_classes is None:
            return self.labels[clips].astype(np.int64)
        hot = np.zeros((len(clips), num_classes), np.bool_)
        for row, clip in zip(hot, clips.tolist(), strict=True):
            row[[label for label in self.labels_of(clip) if label < num_classes]] = True
        return hot

    def label_pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return all pairs of a clip and a class that it belongs to: the clips, (P,), and their labels, (P,)."""
        first = np.flatnonzero(self.labels >= 0)
        clips = np.concatenate([first, self.more_labels["clip"]])
        return clips, np.concatenate([self.labels[first], self.more_labels["label"]]).astype(np.int64)

    @cached_property
    def clips_per_class(self) -> dict[str, int]:
        """The number of clips of each class, label by label. A clip of several classes counts in each."""
        _, labels = self.label_pairs()
        counts = np.bincount(labels, minlength=len(self.class_names))
        return dict(zip(self.class_names, counts.tolist(), strict=True))

    def not_single(self) -> str | None:
        """Return which clip has no label or several, with its place; None where each has one."""
        several = np.concatenate([np.flatnonzero(self.labels < 0), self.more_labels["clip"][:1]])
        if not len(several):
            return None
        return f"{self.place(several[0])}: has {len(self.labels_of(several[0])) or 'no'} labels"

    def place(self, index: int) -> str:
        """Return a clip's place as file:line (in class folders, its path)."""
        line = int(self.lines[index])
        return f"{self.source}:{line}" if line else self.path(index)

    def no_flow(self) -> str | None:
        """Return a sentence about the first clip that is played backwards, if any: its flow is not the video's."""
        if not self.reversed_flags.any():
            return None
        place = self.place(int(np.argmax(self.reversed_flags)))
        return f"{place}: this clip is played backwards, and a clip of optical flow must not be"

    def check_labels(self, num_classes: int) -> None:
        """Raise UserError at the first label of `num_classes` or more, or if another number of classes is named."""
        clips, labels = self.label_pairs()
        if not len(labels):
            raise UserError(f"{self.source}: must have a label, got none in {len(self):,} clips")
        bad = np.flatnonzero(labels >= num_classes)
        if len(bad):
            right = f"try model.num_classes={max(len(self.class_names), self.num_labels)}"
            what = f"label must be from 0 to {num_classes - 1}, as model.num_classes is {num_classes}"
            raise UserError(f"{self.place(clips[bad[0]])}: {what}, got {labels[bad[0]]}; {right}")
        if self.classes is not None and len(self.classes) != num_classes:
            named = f"{self.source} has {len(self.classes)} classes by its {'folders' if self.folder else CLASSES_FILE}"
            raise UserError(f"model.num_classes must be {len(self.classes)}, got {num_classes}: {named}")

    def fingerprint(self) -> str:
        """Return 32 hexadecimal digits of the clips' paths, labels, directions, spans, regions, boxes, in order.

        Whole videos have the same one with and without columns for spans. A set of packed bytes has the fingerprint of
        its videos; packing that changes the pixels changes it.
        """
        if self.stored_fingerprint:
            return self.stored_fingerprint
        digest = hashlib.blake2b(digest_size=16, person=b"manifest")
        columns: list[tuple[NDArray[Any], DTypeLike]] = [(self.offsets, "<i8"), (self.paths, "u1")]
        columns += [(self.labels, "<i4"), (self.reversed_flags, "u1")]
        columns += [(self.spans, DTYPES["spans"])] if self.has_spans else []
        if len(self.more_labels):
            digest.update(b"several labels")
            columns += [(self.more_labels, DTYPES["more_labels"])]
        columns += [(self.regions, DTYPES["regions"])] if len(self.regions) else []
        if self.boxes is not None:
            columns += [(self.boxes.columns[name], dtype) for name, dtype in self.boxes.types.items()]
        for column, dtype in columns:
            digest.update(np.ascontiguousarray(column, dtype).data)
        digest.update(self.pixels.encode())
        return digest.hexdigest()

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self.is_packed:
            return _reopen, (self.source, self.fingerprint())
        return partial(Manifest, **{column.name: getattr(self, column.name) for column in fields(self)}), ()


def read_manifest(path: str | Path, region: str | None = None) -> Manifest:
    """Read a CSV with a header, a header-less list of `path label`, a folder of class folders, or a packed set.

    CSV: the columns `path,label` and optionally those of `ManifestRow`; others are ignored. A label is an integer or a
    name in `classes.txt` next to the file (one name a line, the first is label 0). An integer is always the label
    itself, also where a class has that name. A clip of several classes has several, `3;17`, of none `;`. List: the
    label follows the last blank; `path num_frames label` too, where path is a folder of pictures. region: data.region;
    a packed set was cut when it was packed. A list with boxes has a row for each of them. Raises UserError, naming
    file and line.
    """
    return _read(Path(path), region)[0]


def read_rows(path: str | Path, region: str | None = None) -> tuple[Manifest, list[ManifestRow]]:
    """Read a list, and each clip's row with all columns, also those that training ignores. Raises UserError.

    Both are of one reading: a list that changes afterwards cannot give a clip the cells of another one.
    """
    manifest, read = _read(Path(path), region, keep=True)
    rows = list(map(manifest.row, range(len(manifest))))
    others = [
        tuple((name, column[place]) for name, column in cells.items() if name not in tables.READ_COLUMNS)
        for lines, cells in read
        for place in range(len(lines))
    ]
    return manifest, [replace(row, others=more) for row, more in zip(rows, others or [()] * len(rows), strict=True)]


def _read(source: Path, region: str | None, *, keep: bool = False) -> tuple[Manifest, list[Table]]:
    """Read a manifest. keep: return also the tables of a list of clips; they take several times its size."""
    if (source / PACK_FILE).is_file():
        return read_packed(source), []
    if (source / PACKING_FOLDER).is_dir():
        raise UserError(f"{source}: its packing was not finished; run `data pack` again to continue it")
    skipped = Counter[str]()
    kept = list[Table]()
    if source.is_dir():
        folder = os.path.abspath(source)
        classes: tuple[str, ...] | None
        classes = names = tables.class_folders(source)
        columns = tables.parse_tables(source, [tables.folder_table(source, names, skipped)], classes, region)
    else:
        folder = ""
        classes = read_classes(source.parent / CLASSES_FILE)
        columns, kept = _read_list(source, classes, region, keep=keep)
    if not len(columns["labels"]):
        raise UserError("; ".join([f"{source}: must have a clip, got none", *tables.skipped_text(skipped)]))
    return Manifest(str(source), folder, classes, skipped=skipped, **columns), kept


def _read_list(
    source: Path, classes: tuple[str, ...] | None, region: str | None, *, keep: bool
) -> tuple[dict[str, Any], list[Table]]:
    """Return the columns of a text file and, to keep, its tables; one with boxes has none. Raises UserError."""
    if source.is_file() and 3 * (size := source.stat().st_size) > (free := free_memory()):  # measured: 2.9 to 6.2
        need = f"must have 3 to 6 times its {binary_size(size)} as free memory, got {binary_size(free)}"
        raise UserError(f"{source}: {need}; try a machine with more, or split the list")
    boxes: Boxes | None = None
    with opened(source, "the manifest ") as file:
        lines = ((line, text) for line, text in enumerate(iter(file.readline, ""), 1) if text.strip())
        line, head = next(lines, (1, ""))
        names = tables.header_names(head)
        if {"video", "frame"} <= set(names) and "path" not in names:
            from summit_train.tasks.detection.boxes import read_boxes

            read: Iterable[Table]
            read, boxes = read_boxes(source, file, line, names, classes)
        else:
            read = tables.read_tables(source, file, line, head)
        kept = list(read) if keep else []
        columns = tables.parse_tables(source, kept or read, classes, region)
    if boxes is None:
        return columns, kept
    boxes.check_list(columns["frame_counts"])
    return columns | {"boxes": boxes} | boxes.clip_columns(), []


def read_packed(source: Path) -> Manifest:
    """Map the manifest of a packed set, which `write_packed_manifest` wrote."""
    folder = source / PACKED_MANIFEST
    try:
        about = dict(from_json(read_file(folder / _ABOUT)))
        names = [name for name in DTYPES if name not in OPTIONAL or about.get(name)]
        columns: dict[str, Any] = {name: load_column(folder / f"{name}.npy", DTYPES[name]) for name in names}
        of_clips = {name: column for name, column in columns.items() if name != "more_labels"}
        lengths = {len(column) for name, column in of_clips.items() if name != "digests" or len(column)}
        columns["offsets"] = load_column(folder / "offsets.npy", np.uint32, np.int64)
        columns["paths"] = load_column(folder / "paths.npy", np.uint8)
        if lengths != {len(columns["offsets"]) - 1} or columns["offsets"][-1] != len(columns["paths"]):
            raise ValueError(f"{folder}: its columns are not of one length")
        for name in OPTIONAL:
            columns.setdefault(name, np.zeros(0, DTYPES[name]))
        clips, labels = (columns["more_labels"][name] for name in ("clip", "label"))
        if np.any(np.diff(clips) < 0) or np.any((clips < 0) | (clips >= len(columns["labels"])) | (labels < 0)):
            raise ValueError(f"{folder}: some of its labels do not belong to a clip")
        columns["group_names"] = tuple(about.get("group_names", ()))
        if np.any(columns["groups"] >= len(columns["group_names"])):
            raise ValueError(f"{folder}: some of its groups have no name")
        if about.get("boxes"):
            from summit_train.tasks.detection.boxes import Boxes

            stored = {name: load_column(folder / f"{name}.npy", dtype) for name, dtype in Boxes.types.items()}
            columns["boxes"] = Boxes.of_columns(stored, len(columns["labels"]), str(source))
        columns |= {"is_packed": True, "stored_fingerprint": about["fingerprint"], "pixels": about["pixels"]}
        return Manifest(str(source), "", None if about["classes"] is None else tuple(about["classes"]), **columns)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{source}: is damaged ({error}); see `data verify` for what else is") from error


def _reopen(source: str, fingerprint: str) -> Manifest:
    """Unpickle the manifest of a packed set in a loader worker."""
    manifest = read_manifest(source)
    if manifest.fingerprint() != fingerprint:
        raise UserError(f"{source}: was packed again while a run was using it; start the run again")
    return manifest


def write_packed_manifest(folder: Path, manifest: Manifest) -> str:
    """Write a manifest into the folder of a packed set; return its fingerprint."""
    wide = len(manifest.paths) >= 1 << 32
    dtypes = DTYPES | {"paths": np.uint8, "offsets": np.int64 if wide else np.uint32}
    columns = {name: (getattr(manifest, name), dtype) for name, dtype in dtypes.items()}
    used: dict[str, Any] = {name: True for name in OPTIONAL if len(columns[name][0])}
    columns = {name: column for name, column in columns.items() if name not in OPTIONAL or name in used}
    if manifest.boxes is not None:
        columns |= {name: (manifest.boxes.columns[name], dtype) for name, dtype in manifest.boxes.types.items()}
        used["boxes"] = True
    for name, (column, dtype) in columns.items():
        with replacing(folder / PACKED_MANIFEST / f"{name}.npy") as file:
            np.save(file, column.astype(dtype, copy=False))
    fingerprint = manifest.fingerprint()
    used |= {"group_names": manifest.group_names} if manifest.group_names else {}
    about = {"classes": manifest.classes, "pixels": manifest.pixels, "fingerprint": fingerprint}
    write_json(folder / PACKED_MANIFEST / _ABOUT, about | used)
    return fingerprint


def load_column(path: Path, *dtypes: DTypeLike) -> NDArray[Any]:
    """Map a .npy file of one of these types. Raises OSError, and ValueError where it is damaged or of another type."""
    try:
        with open(path, "rb", opener=regular):
            column: NDArray[Any] = np.lib.format.open_memmap(path, mode="r").view(np.ndarray)
    except (ArithmeticError, EOFError, SyntaxError, TokenError, TypeError) as error:  # by a damaged header
        raise ValueError(f"{path}: its header is damaged: {error}") from error
    if column.ndim != 1 or column.dtype not in [np.dtype(dtype) for dtype in dtypes]:
        raise ValueError(f"{path}: must be a column of {np.dtype(dtypes[0])}, got {column.dtype} {column.shape}")
    return column


# Classes.


def read_classes(path: str | Path) -> tuple[str, ...] | None:
    """Return the class names of a `classes.txt`, label 0 first, or None where it is missing. Raises UserError."""
    if not Path(path).exists():
        return None
    with opened(path) as file:
        names = tuple(line.strip() for line in file.read().rstrip().split("\n"))
    seen = set[str]()
    for line, name in enumerate(names, 1):
        if not name or name in seen:
            wrong = f"{name!r} again" if name else "an empty line"
            raise UserError(f"{path}:{line}: must be the name of another class, got {wrong}")
        seen.add(name)
    return names or None


def check_classes(place: str | Path, classes: Iterable[str]) -> None:
    """Raise UserError for a class that classes.txt cannot hold. place: what names it, for the message."""
    for name in classes:
        if "\n" in name or name != name.strip():
            what = f"a class must have a name of one line without a blank around it, got {name!r}"
            raise UserError(f"{place}: {what}; rename it")


def write_classes(folder: Path, classes: Iterable[str]) -> None:
    """Write a folder's classes.txt: the names of the classes, label 0 first. Raises UserError as `check_classes`."""
    classes = list(classes)
    check_classes(folder / CLASSES_FILE, classes)
    write_text(folder / CLASSES_FILE, "".join(f"{name}\n" for name in classes))


def check_same_classes(one: object, classes: Iterable[str] | None, other: object, others: Iterable[str] | None) -> None:
    """Raise UserError where two lists, or what was made of them, number classes differently. None: without names."""
    names = tuple(classes or ())
    theirs = tuple(others or ())
    if names and theirs and names != theirs:
        differing = ", ".join(map(repr, sorted({*names} ^ {*theirs})[:5])) or "their order"
        right = "must have the same classes, as labels are their places"
        raise UserError(f"{one} and {other} {right}; they differ in {differing}")


def check_beside(manifest: Path, classes: tuple[str, ...] | None, source: Path) -> None:
    """Raise UserError where a new manifest of these classes would be read with other ones."""
    check_classes(source, classes or ())
    names = manifest.parent / CLASSES_FILE
    if read_classes(names) not in (None, classes):
        raise UserError(f"{names}: must have the classes of {source}, got others; write to another folder")
