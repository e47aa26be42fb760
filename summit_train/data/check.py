"""What the files of a data set really hold: which there are, and which of them are whole after a full decode.

Many processes decode. A file that ends one does not end the survey; an interrupted survey continues by a journal.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from summit_train.core.errors import UserError
from summit_train.core.files import naming, read_file
from summit_train.core.text import counted, from_json
from summit_train.data.manifest import Manifest, ManifestRow, read_manifest
from summit_train.data.manifest.folders import folder_table
from summit_train.data.manifest.reading import read_rows
from summit_train.data.manifest.tables import is_video
from summit_train.data.video.films import Films, is_film
from summit_train.data.video.pictures import holds_pictures, probe_folder
from summit_train.data.video.source import NO_HURRY, DecodeError, VideoInfo, load_video, worker_pool
from summit_train.data.video.stream import probe

_PATHS_PER_WORKER = 16
# The decoder checks the time itself; its process is killed only where it cannot.
_PATIENCE = 1.5


@dataclass(frozen=True)
class FileFacts(VideoInfo):
    """What a video or a folder of pictures holds. sha256: in hexadecimal digits."""

    sha256: str


Found = FileFacts | DecodeError
LeftOut = tuple[ManifestRow | None, DecodeError]  # None: of a clip that has no row
Item = TypeVar("Item")
Answer = TypeVar("Answer")


@cache
def _films() -> Films:
    """Return those of this process, which notes once that indexes cannot be kept."""
    return Films()


def examine(root: str, path: str) -> Found:
    """Decode one video or folder of pictures in full. The error names the path as it is given."""
    full = os.path.join(root, path)
    try:
        if holds_pictures(full):
            info, digest = probe_folder(full)
        else:
            video = load_video(full, None)
            info, digest = probe(video), video.sha256()
            if info.can_jump and is_film(os.path.getsize(full), info.num_frames):
                _films().load(full, None, info.num_frames, NO_HURRY)  # keeps the index for training
    except DecodeError as error:
        within = f"{os.path.relpath(error.path, full)} " if error.path.startswith(f"{full}{os.sep}") else ""
        return DecodeError(path, f"{within}{error.reason}")
    except OSError as error:
        return DecodeError(path, error.strerror or str(error))
    fps, duration = (value and round(value, 6) for value in (info.fps, info.duration))
    return FileFacts(**asdict(info) | {"fps": fps, "duration": duration, "sha256": digest})


def spread(
    examine: Callable[[str, Item], Answer],
    root: str,
    items: Iterable[Item],
    workers: int,
    seconds: float = _PATIENCE * NO_HURRY.seconds,
) -> Iterator[Answer | DecodeError]:
    """Examine all items below `root`, paths or clips, in order, by `workers` processes, or by this one for 0.

    A file that crashes its process, or blocks it for `seconds`, is an error like any other bad file.
    """
    if not workers:
        yield from (examine(root, item) for item in items)
        return
    in_time, left = partial(_in_time, examine, root, seconds), iter(items)
    while batch := list(islice(left, workers * _PATHS_PER_WORKER)):
        with worker_pool(workers) as pool:
            while batch:
                num_found = 0
                try:
                    for found in pool.map(in_time, batch):
                        num_found += 1
                        yield found
                except BrokenProcessPool:
                    yield from (_alone(in_time, item, seconds) for item in batch[num_found:])
                    break
                batch = list(islice(left, workers * _PATHS_PER_WORKER))


def _alone(in_time: Callable[[Item], Answer], item: Item, seconds: float) -> Answer | DecodeError:
    began = time.monotonic()
    with worker_pool(1) as pool:
        try:
            return pool.submit(in_time, item).result()
        except BrokenProcessPool:
            if time.monotonic() - began > seconds:
                return DecodeError(str(item), f"takes longer than {seconds:g} s to read: its reader never came back")
            return DecodeError(str(item), "decoding it kills the process")


def _in_time(examine: Callable[[str, Item], Answer], root: str, seconds: float, item: Item) -> Answer:
    """Examine an item in a worker. SIGALRM, which has no handler, kills it if a decoder never returns."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return examine(root, item)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@dataclass(frozen=True)
class Journal:
    """The findings for files below `root`: a folder in which each rank appends to its own file, a JSON object a line.

    A line counts only while the file has the size and the modification time that it names.
    """

    folder: Path
    root: str

    def read(self, paths: Collection[str]) -> dict[str, Found]:
        asked, found = set(paths), dict[str, Found]()
        for file in sorted(self.folder.glob("*.jsonl")):
            for line in read_file(file).splitlines():
                try:
                    record = from_json(line)
                except ValueError:  # the process was killed while it wrote this line
                    continue
                path = record["path"]
                if path in asked and record["state"] == self._state(path):
                    error = record.get("error")
                    facts = record.get("facts", {})
                    facts["notes"] = tuple(facts.get("notes", ()))
                    found[path] = FileFacts(**facts) if error is None else DecodeError(path, error)
        return found

    def add(self, rank: int, path: str, found: Found) -> None:
        what = {"error": found.reason} if isinstance(found, DecodeError) else {"facts": asdict(found)}
        record = {"path": path, "state": self._state(path)} | what
        self.folder.mkdir(parents=True, exist_ok=True)
        journal = self.folder / f"{rank:06}.jsonl"
        with naming(journal), open(journal, "ab") as file:
            file.write(b"\n" + json.dumps(record).encode())  # the line before may be incomplete

    def _state(self, path: str) -> list[int] | None:
        """Return a file's size in bytes and its modification time in ns, None without a file."""
        try:
            status = os.stat(os.path.join(self.root, path))
        except (OSError, ValueError):
            return None
        return [status.st_size, status.st_mtime_ns]


@dataclass(frozen=True)
class Listing:
    """The clips to index, with paths relative to `root`.

    classes: their names, label by label, None if a manifest has none. skipped: the number of other files by extension.
    """

    root: Path
    rows: list[ManifestRow]
    classes: tuple[str, ...] | None
    skipped: Counter[str]


def list_videos(source: Path, root: Path | None = None) -> Listing:
    """List the videos of class folders, or the clips of a manifest with all of its columns.

    root: where a manifest's paths start (default: its folder). Raises UserError without a video, and for one that is
    in no class folder.
    """
    is_folder = source.is_dir()
    for name in sorted(os.listdir(source)) if is_folder else ():
        if is_video(name) and (source / name).is_file():
            raise UserError(f"{source / name}: each video must be in the folder of its class; move it into one")
    manifest = read_manifest(source)
    rows = list(read_rows(manifest))
    if not is_folder:
        return Listing(root or source.parent, rows, manifest.classes, Counter())
    rows = [replace(row, path=manifest.stored_path(clip)) for clip, row in enumerate(rows)]
    skipped = Counter[str]()
    folder_table(source, skipped)
    return Listing(source, rows, manifest.classes, skipped)


def sort_clips(
    rows: Iterable[ManifestRow], found: Mapping[str, Found], *, compare: bool
) -> tuple[list[ManifestRow], list[LeftOut]]:
    """Return the clips that can be used, with the facts of their files, and each other clip with why it cannot.

    found: of each path. compare: a file must have the SHA-256 and the number of frames that its row names.
    """
    good, bad = list[ManifestRow](), list[LeftOut]()
    for row in rows:
        try:
            good.append(_with_facts(row, found[row.path], compare=compare))
        except DecodeError as error:
            bad.append((row, error))
    return good, bad


def reasons(left_out: Iterable[LeftOut]) -> list[DecodeError]:
    """Return each bad file once, and each bad span of a file."""
    return list({(error.path, error.span): error for _, error in left_out}.values())


def _with_facts(row: ManifestRow, found: Found, *, compare: bool) -> ManifestRow:
    if isinstance(found, DecodeError):
        raise found
    if compare and row.sha256 not in (None, found.sha256):
        raise DecodeError(row.path, "has changed since it was indexed: its SHA-256 is not the manifest's")
    if compare and row.num_frames not in (None, found.num_frames):
        raise DecodeError(row.path, f"has {counted(found.num_frames, 'frame')}, but the manifest says {row.num_frames}")
    row.span.frames(row.path, found.num_frames)
    if row.boxes is not None:
        row.boxes.check(0, row.path, found.num_frames, found.width, found.height)
    facts = {name: fact for name, fact in asdict(found).items() if name not in ("can_jump", "notes")}
    if not found.can_jump:
        facts["num_frames"] = None  # with it, training would jump
    if {"left", "top"} <= dict(row.others).keys():  # a region's width and height are not those of the frame
        del facts["width"], facts["height"]
    return replace(row, **facts)


def bad_regions(manifest: Manifest, found: Mapping[str, Found]) -> list[DecodeError]:
    """Return an error for each clip whose region is not in its frame."""
    errors = []
    for clip in range(len(manifest.regions)):
        path, region = manifest.path(clip), manifest.region(clip)
        facts = found[path]
        problem = region.problem(facts.width, facts.height) if isinstance(facts, FileFacts) else None
        if problem is not None:
            errors.append(DecodeError(path, f"{problem} ({manifest.place(clip)})", manifest.span(clip), region))
    return errors


def copies(rows: Iterable[ManifestRow]) -> list[tuple[str, str]]:
    """Return the path of each file with the same bytes as an earlier one, and the path of that one."""
    digests = {row.path: row.sha256 for row in rows}  # each file once
    first = {digest: path for path, digest in reversed(digests.items())}
    return [(path, first[digest]) for path, digest in digests.items() if first[digest] != path]
