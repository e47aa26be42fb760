"""From videos to a manifest: which files there are, and which of them are whole after a full decode."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from summit_train.data.check.survey import Found
from summit_train.data.manifest import Manifest, ManifestError, ManifestRow, read_manifest
from summit_train.data.manifest.tables import VIDEO_EXTENSIONS, class_folders, file_tables, folder_tables
from summit_train.data.video.source import MISSING, DecodeError


@dataclass(frozen=True)
class Listing:
    """The videos to decode: rows with a path relative to `root` and a label.

    classes: their names, label by label, None where the labels come from a manifest. skipped: the number of files of
    each extension that is no video's.
    """

    root: Path
    rows: tuple[ManifestRow, ...]
    classes: tuple[str, ...] | None
    skipped: Counter[str]


def list_videos(source: str | Path, root: str | Path | None = None) -> Listing:
    """List the videos to index.

    source: a folder with a folder for each class; a folder of videos, which is one class with the folder's
    name; or a manifest, whose labels, groups and directions are kept and whose paths are relative to `root`
    (default: the manifest's folder). Raises ManifestError where there is no video, and for videos beside class
    folders: their class is unknown.
    """
    source = Path(source)
    if not source.is_dir():
        return _listed_in_manifest(source, root)
    names = sorted(entry.name for entry in os.scandir(source) if entry.is_file())
    beside = tuple(ManifestRow(name, 0) for name in names if _is_video(name))
    has_folders = any(entry.is_dir() and not entry.name.startswith(".") for entry in os.scandir(source))
    rows = tuple(
        ManifestRow(path, int(label))
        for table in (folder_tables(source) if has_folders else ())
        for path, label in zip(table.cells["path"], table.cells["label"], strict=True)
    )
    if rows and beside:
        raise ManifestError(
            f"{source / beside[0].path}: stands beside class folders; move it into the one of its class"
        )
    if not rows and not beside:
        raise ManifestError(f"{source}: no video in it, no name with {', '.join(VIDEO_EXTENSIONS)}")
    classes = class_folders(source) if rows else (source.resolve().name,)
    others = (file for _, _, files in os.walk(source) for file in files if not _is_video(file))
    skipped = Counter(os.path.splitext(file)[1].lower() or "none" for file in others)
    return Listing(source, rows or beside, classes, skipped)


def _listed_in_manifest(source: Path, root: str | Path | None) -> Listing:
    manifest = read_manifest(source)
    tables = file_tables(source)
    groups = [group for table in tables for group in table.cells.get("group", [""] * len(table.lines))]
    rows = tuple(
        ManifestRow(manifest.path(i), manifest.label(i), group=group or None, reversed=manifest.is_reversed(i))
        for i, group in enumerate(groups)
    )
    return Listing(Path(root or source.parent), rows, manifest.classes, Counter())


def with_facts(row: ManifestRow, found: Found) -> ManifestRow | DecodeError:
    """Return a row with the facts of its file; a bad file stays an error."""
    return found if isinstance(found, DecodeError) else replace(row, **asdict(found))


def _is_video(name: str) -> bool:
    return name.lower().endswith(VIDEO_EXTENSIONS) and not name.startswith(".")


@dataclass(frozen=True)
class Summary:
    """The result of an index: `rows` go into the manifest, the others are errors with the reason, path by path.

    copies: (path, an earlier path) of files with the same bytes.
    """

    rows: tuple[ManifestRow, ...]
    missing: tuple[DecodeError, ...]
    unreadable: tuple[DecodeError, ...]
    short: tuple[DecodeError, ...]
    copies: tuple[tuple[str, str], ...]

    @property
    def left_out(self) -> tuple[DecodeError, ...]:
        """Return the errors of all files that are not in the manifest."""
        return self.missing + self.unreadable + self.short


def summarise(rows: Sequence[ManifestRow | DecodeError], min_frames: int = 1) -> Summary:
    """Sort the rows of an index; those with fewer than `min_frames` frames are left out."""
    bad = list({row.path: row for row in rows if isinstance(row, DecodeError)}.values())
    good = [row for row in rows if isinstance(row, ManifestRow)]
    short = {row.path: row.num_frames for row in good if (row.num_frames or 0) < min_frames}
    rows_left = tuple(row for row in good if row.path not in short)
    return Summary(
        rows_left,
        tuple(error for error in bad if error.reason == MISSING),
        tuple(error for error in bad if error.reason != MISSING),
        tuple(DecodeError(path, f"has {count} frames, fewer than {min_frames}") for path, count in short.items()),
        tuple(_copies(rows_left)),
    )


def _copies(rows: Sequence[ManifestRow]) -> Iterator[tuple[str, str]]:
    by_digest = defaultdict[str | None, dict[str, None]](dict)  # dicts keep the order
    for row in rows:
        by_digest[row.sha256][row.path] = None
    for first, *others in by_digest.values():
        yield from ((path, first) for path in others)


def compare(manifest: Manifest, clip: int, found: Found) -> DecodeError | None:
    """Return why a clip should not be trained on, given the finding for its file; None where it may be."""
    path = manifest.path(clip)
    if isinstance(found, DecodeError):
        return DecodeError(path, found.reason)
    digest, num_frames = manifest.sha256(clip), manifest.num_frames(clip)
    if digest is not None and digest.hex() != found.sha256:
        return DecodeError(path, "has changed since it was indexed: its SHA-256 is not the manifest's")
    if num_frames not in (None, found.num_frames):
        return DecodeError(path, f"has {found.num_frames} frames, but the manifest says {num_frames}")
    return None


def bad_clips(manifest: Manifest, found: Mapping[str, Found]) -> list[DecodeError]:
    """Return the bad clips of a manifest, each path once. found: by path."""
    errors = dict[str, DecodeError]()
    for clip in range(len(manifest)):
        error = compare(manifest, clip, found[manifest.path(clip)])
        if error is not None:
            errors.setdefault(error.path, error)
    return list(errors.values())
