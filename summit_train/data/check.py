"""What the files of a data set really hold: which there are, and which of them are whole after a full decode.

Many processes decode. A file that brings its process down does not end the survey. A journal lets an interrupted survey
continue: a folder next to the result with a file for each rank, one JSON object a line: the path, its file's size and
modification time, and the finding. A line counts only while the file is unchanged.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

from summit_train.core.errors import UserError
from summit_train.core.files import naming
from summit_train.data.manifest import Manifest, ManifestRow, read_manifest
from summit_train.data.manifest.reading import read_rows
from summit_train.data.manifest.tables import VIDEO_EXTENSIONS, class_folders, folder_table, is_video
from summit_train.data.video.clips import probe_folder
from summit_train.data.video.source import MISSING, NO_HURRY, DecodeError, VideoInfo, load_video, worker_pool
from summit_train.data.video.span import Span
from summit_train.data.video.stream import probe

_PATHS_PER_WORKER = 16
# The decoder checks the time itself; its process is killed only where it cannot.
_PATIENCE = 1.5


@dataclass(frozen=True)
class Facts(VideoInfo):
    """What a video or a folder of pictures holds. sha256: in hexadecimal digits."""

    sha256: str


Found = Facts | DecodeError
Examine = Callable[[str, str], Found]


def survey(root: str, paths: Sequence[str], workers: int) -> Iterator[Found]:
    """Yield what each path below `root` holds, in order, or why it cannot be used. Errors name the path as given.

    workers: processes that decode; 0 decodes in this one. A file that crashes its process, or blocks it for an hour, is
    reported like any other bad file.
    """
    if workers:
        yield from spread(examine, root, paths, min(workers, len(paths)))
    else:
        yield from (examine(root, path) for path in paths)


def examine(root: str, path: str) -> Found:
    """Decode one video or folder of pictures in full. The error names the path as it is given."""
    full = os.path.join(root, path)
    try:
        if os.path.isdir(full):
            info, digest = probe_folder(full)
        else:
            video = load_video(full, None)
            info, digest = probe(video), video.sha256()
    except DecodeError as error:
        within = f"{os.path.relpath(error.path, full)} " if error.path.startswith(f"{full}{os.sep}") else ""
        return DecodeError(path, f"{within}{error.reason}")
    except OSError as error:
        return DecodeError(path, error.strerror or str(error))
    fps, duration = (value and round(value, 6) for value in (info.fps, info.duration))
    return Facts(**asdict(info) | {"fps": fps, "duration": duration, "sha256": digest})


def spread(
    examine: Examine, root: str, paths: Iterable[str], workers: int, seconds: float = _PATIENCE * NO_HURRY.seconds
) -> Iterator[Found]:
    """Examine all paths by `workers` processes; replace those that a file crashed or blocked for `seconds`."""
    in_time, left = partial(_in_time, examine, root, seconds), iter(paths)
    while batch := list(islice(left, workers * _PATHS_PER_WORKER)):
        with worker_pool(workers) as pool:
            while batch:
                num_found = 0
                try:
                    for found in pool.map(in_time, batch):
                        num_found += 1
                        yield found
                except BrokenProcessPool:
                    yield from (_alone(in_time, path, seconds) for path in batch[num_found:])
                    break
                batch = list(islice(left, workers * _PATHS_PER_WORKER))


def _alone(in_time: Callable[[str], Found], path: str, seconds: float) -> Found:
    began = time.monotonic()
    with worker_pool(1) as pool:
        try:
            return pool.submit(in_time, path).result()
        except BrokenProcessPool:
            if time.monotonic() - began > seconds:
                return DecodeError(path, f"is not read within {seconds:g} s: its reader never came back")
            return DecodeError(path, "decoding it kills the process")


def _in_time(examine: Examine, root: str, seconds: float, path: str) -> Found:
    """Examine a path in a worker. SIGALRM, which has no handler, kills it if a decoder never returns."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return examine(root, path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@dataclass(frozen=True)
class Journal:
    """The findings for files below `root`; all ranks share the folder, and each appends to its own file."""

    folder: Path
    root: str

    def read(self, paths: Collection[str]) -> dict[str, Found]:
        asked, found = set(paths), dict[str, Found]()
        for line in chain.from_iterable(f.read_bytes().splitlines() for f in sorted(self.folder.glob("*.jsonl"))):
            try:
                record = json.loads(line)
            except ValueError:  # the process was killed while it wrote this line
                continue
            path = record["path"]
            if path in asked and record["state"] == _state(self.root, path):
                found[path] = DecodeError(path, record["error"]) if "error" in record else Facts(**record["facts"])
        return found

    def add(self, rank: int, path: str, found: Found) -> None:
        what = {"error": found.reason} if isinstance(found, DecodeError) else {"facts": asdict(found)}
        record = {"path": path, "state": _state(self.root, path)} | what
        self.folder.mkdir(parents=True, exist_ok=True)
        journal = self.folder / f"{rank:06}.jsonl"
        with naming(journal), open(journal, "ab") as file:
            file.write(b"\n" + json.dumps(record).encode())  # the line before may be incomplete

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _state(root: str, path: str) -> list[int] | None:
    """Return a file's size in bytes and its modification time in ns, None without a file."""
    try:
        status = os.stat(os.path.join(root, path))
    except (OSError, ValueError):
        return None
    return [status.st_size, status.st_mtime_ns]


# The result: rows of a manifest, or its clips that should not be trained on.


@dataclass(frozen=True)
class Listing:
    """The videos to decode: rows with a path relative to `root` and a label.

    classes: their names, label by label, None if the labels come from a manifest. skipped: the number of files of each
    extension that is not a video's.
    """

    root: Path
    rows: Sequence[ManifestRow]
    classes: tuple[str, ...] | None
    skipped: Counter[str]


def list_videos(source: str | Path, root: str | Path | None = None) -> Listing:
    """List the videos to index.

    source: a folder with a folder for each class; a folder of videos, which is one class with the folder's name; or a
    manifest, whose columns are kept and whose paths are relative to `root` (default: the manifest's folder). Raises
    UserError without a video, and for videos next to class folders: their class is unknown.
    """
    source = Path(source)
    if not source.is_dir():
        manifest = read_manifest(source)
        return Listing(Path(root or source.parent), list(read_rows(manifest)), manifest.classes, Counter())
    entries = sorted(os.scandir(source), key=lambda entry: entry.name)
    loose = [ManifestRow(entry.name, 0) for entry in entries if entry.is_file() and is_video(entry.name)]
    has_folders = any(entry.is_dir() and not entry.name.startswith(".") for entry in entries)
    cells = folder_table(source).cells if has_folders else {"path": [], "label": []}
    rows = [ManifestRow(path, int(label)) for path, label in zip(cells["path"], cells["label"], strict=True)]
    if rows and loose:
        raise UserError(f"{source / loose[0].path}: is next to class folders; move it into the folder of its class")
    if not rows and not loose:
        raise UserError(f"{source}: no video in it, no name with {', '.join(VIDEO_EXTENSIONS)}")
    classes = class_folders(source) if rows else (source.resolve().name,)
    others = (file for _, _, files in os.walk(source) for file in files if not is_video(file))
    skipped = Counter(os.path.splitext(file)[1].lower() or "none" for file in others)
    return Listing(source, rows or loose, classes, skipped)


def with_facts(row: ManifestRow, found: Found) -> ManifestRow | DecodeError:
    """Return a row with the facts of its file; a bad file stays an error, and a span outside it becomes one."""
    if isinstance(found, DecodeError):
        return found
    try:
        row.span.frames(row.path, found.num_frames)
    except DecodeError as error:
        return error
    return replace(row, **asdict(found))


def clip_frames(row: ManifestRow) -> int:
    """Return the number of frames of a clip whose file was found, a span's own."""
    return len(row.span.frames(row.path, row.num_frames or 0))


@dataclass(frozen=True)
class Summary:
    """The result of an index: `rows` go into the manifest, the others are errors with the reason, path by path.

    copies: (path, an earlier path) of files with the same bytes.
    """

    rows: Sequence[ManifestRow]
    missing: Sequence[DecodeError]
    unreadable: Sequence[DecodeError]
    short: Sequence[DecodeError]
    copies: Sequence[tuple[str, str]]

    @property
    def left_out(self) -> list[DecodeError]:
        return [*self.missing, *self.unreadable, *self.short]


def summarise(rows: Sequence[ManifestRow | DecodeError], min_frames: int = 1) -> Summary:
    """Sort the rows of an index; those with fewer than `min_frames` frames are left out."""
    bad = {(row.path, row.span): row for row in rows if isinstance(row, DecodeError)}.values()
    good = [row for row in rows if isinstance(row, ManifestRow)]
    short = {(row.path, row.span): count for row in good if (count := clip_frames(row)) < min_frames}
    kept = [row for row in good if clip_frames(row) >= min_frames]
    by_digest = defaultdict[str | None, dict[str, None]](dict)  # dicts keep the order
    for row in kept:
        by_digest[row.sha256][row.path] = None
    return Summary(
        kept,
        [error for error in bad if error.reason == MISSING],
        [error for error in bad if error.reason != MISSING],
        [
            DecodeError(path, f"has {count} frames, fewer than {min_frames}", span)
            for (path, span), count in short.items()
        ],
        tuple((path, first) for first, *others in by_digest.values() for path in others),
    )


def bad_clips(manifest: Manifest, found: Mapping[str, Found]) -> list[DecodeError]:
    """Return the clips that should not be trained on, each file or bad span of one once, given each path's finding."""
    errors = dict[tuple[str, Span], DecodeError]()
    for clip in range(len(manifest)):
        error = _compared(manifest, clip, found[manifest.path(clip)])
        if error is not None:
            errors.setdefault((error.path, error.span), error)
    return list(errors.values())


def _compared(manifest: Manifest, clip: int, found: Found) -> DecodeError | None:
    path, digest, num_frames = manifest.path(clip), manifest.sha256(clip), manifest.num_frames(clip)
    if isinstance(found, DecodeError):
        return DecodeError(path, found.reason)
    if digest is not None and digest.hex() != found.sha256:
        return DecodeError(path, "has changed since it was indexed: its SHA-256 is not the manifest's")
    if num_frames not in (None, found.num_frames):
        return DecodeError(path, f"has {found.num_frames} frames, but the manifest says {num_frames}")
    try:
        manifest.span(clip).frames(path, found.num_frames)
    except DecodeError as error:
        return error
    return None
