"""What the files of a data set really hold: which there are, and which of them are whole after a full decode.

Many processes decode. A file that ends one does not end the survey; an interrupted survey continues by a journal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from summit_train.core.errors import UserError
from summit_train.core.files import naming, read_file
from summit_train.core.text import counted, from_json
from summit_train.core.workers import Reading, ReadLimit, Workers
from summit_train.data.manifest import Manifest, ManifestRow
from summit_train.data.manifest.reading import read_rows
from summit_train.data.manifest.tables import is_video
from summit_train.data.video.films import Films, is_film
from summit_train.data.video.pictures import holds_pictures, probe_folder
from summit_train.data.video.source import NO_HURRY, DecodeError, VideoInfo, load_video
from summit_train.data.video.stream import probe

_AHEAD = 16  # answers of each worker that may wait for that of a long video
_JOURNAL_FORMAT = 1  # another number where the facts, or how they are found, are others
_FILMS = Films()  # those of this process: it notes once that indexes cannot be kept

Finding = VideoInfo | DecodeError
LeftOut = tuple[ManifestRow | None, DecodeError]  # None: of a clip that has no row
Item = TypeVar("Item")
Answer = TypeVar("Answer")


def examine(root: str, path: str) -> Finding:
    """Decode one video or folder of pictures in full. The error names the path as it is given."""
    full = os.path.join(root, path)
    try:
        if holds_pictures(full):
            info = probe_folder(full)
        else:
            video = load_video(full, None)
            info = probe(video)
            if info.can_jump and is_film(os.path.getsize(full), info.num_frames):
                _FILMS.load(full, None, info.num_frames, NO_HURRY)  # keeps the index for training
    except DecodeError as error:
        within = f"{os.path.relpath(error.path, full)} " if error.path.startswith(f"{full}{os.sep}") else ""
        return DecodeError(path, f"{within}{error.reason}")
    except OSError as error:
        return DecodeError(path, error.strerror or str(error))
    fps, duration = (value and round(value, 6) for value in (info.fps, info.duration))
    return replace(info, fps=fps, duration=duration)


def spread(
    examine: Callable[[Item], Answer],
    items: Iterable[Item],
    workers: int,
    *,
    seconds: float = NO_HURRY.seconds,
    name: Callable[[Item], str] = str,
    modules: Sequence[str] = (),
    ahead: int = _AHEAD,
) -> Iterator[Answer | DecodeError]:
    """Examine all items in order, by `workers` processes, or by this one for 0; a DecodeError is an answer.

    A file that crashes its process, or blocks it for far more than `seconds`, is an error like any other bad file; with
    0 workers it crashes or blocks this process. name: of an item, in that error. modules, ahead: see Workers.
    """
    make = partial(_examined, examine, name)
    limit = ReadLimit(DecodeError, seconds)
    answers: Workers[Answer | DecodeError] = Workers(
        make, enumerate(items), workers, modules=[__name__, *modules], limit=limit, ahead=ahead
    )
    with answers:
        yield from answers


def _examined(
    examine: Callable[[Item], Answer], name: Callable[[Item], str], numbered: tuple[int, Item], reading: Reading
) -> Answer | DecodeError:
    number, item = numbered
    try:
        with reading(number, name(item)):
            return examine(item)
    except DecodeError as error:
        return error


@dataclass(frozen=True)
class Journal:
    """The findings for files below `root`: a folder in which each rank appends to its own file, a JSON object a line.

    A line counts only while the file has the size and the modification time that it names, and in this format.
    """

    folder: Path
    root: str

    def read(self, paths: Collection[str]) -> dict[str, Finding]:
        wanted = set(paths)
        findings = dict[str, Finding]()
        for file in sorted(self.folder.glob("*.jsonl")):
            for line in read_file(file).splitlines():
                try:
                    record = from_json(line)
                except ValueError:  # the process was killed while it wrote this line
                    continue
                if not isinstance(record, dict) or record.get("format") != _JOURNAL_FORMAT:
                    continue
                path = record["path"]
                if path in wanted and record["state"] == self._state(path):
                    error = record.get("error")
                    facts = record.get("facts", {})
                    facts["notes"] = tuple(facts.get("notes", ()))
                    findings[path] = VideoInfo(**facts) if error is None else DecodeError(path, error)
        return findings

    def add(self, rank: int, path: str, finding: Finding) -> None:
        what = {"error": finding.reason} if isinstance(finding, DecodeError) else {"facts": asdict(finding)}
        record = {"format": _JOURNAL_FORMAT, "path": path, "state": self._state(path)} | what
        self.folder.mkdir(parents=True, exist_ok=True)
        journal = self.folder / f"{rank:06}.jsonl"
        with naming(journal), open(journal, "ab") as file:
            file.write(b"\n" + json.dumps(record).encode())  # the line before may be incomplete

    def _state(self, path: str) -> list[int] | None:
        """Return a file's size in bytes and its modification time in ns, None without a file.

        Of a folder, those of all that it holds: the total size and the newest time.
        """
        full = os.path.join(self.root, path)
        try:
            files = [os.stat(full)]
            if os.path.isdir(full):
                files += [entry.stat() for entry in os.scandir(full)]
        except (OSError, ValueError):
            return None
        return [sum(status.st_size for status in files), max(status.st_mtime_ns for status in files)]


@dataclass(frozen=True)
class Listing:
    """The clips of `manifest`, with all of its columns and paths relative to `root`."""

    manifest: Manifest
    root: Path
    rows: list[ManifestRow]


def list_videos(source: Path, root: Path | None = None, region: str | None = None) -> Listing:
    """List the videos of class folders, or the clips of a manifest with all of its columns.

    root: where a manifest's paths start (default: its folder). region: data.region. Raises UserError without a video,
    and for one that is in no class folder.
    """
    is_folder = source.is_dir()
    for name in sorted(os.listdir(source)) if is_folder else ():
        if is_video(name) and (source / name).is_file():
            raise UserError(f"{source / name}: each video must be in the folder of its class; move it into one")
    manifest, rows = read_rows(source, region)
    if not is_folder:
        return Listing(manifest, root or source.parent, rows)
    rows = [replace(row, path=manifest.clip(clip).path) for clip, row in enumerate(rows)]
    return Listing(manifest, source, rows)


def index_clips(
    rows: Iterable[ManifestRow], findings: Mapping[str, Finding]
) -> tuple[list[ManifestRow], list[LeftOut]]:
    """Return the clips that can be used, with the facts of their files, and each other clip with why it cannot.

    findings: of each path.
    """

    def indexed(clip: int, row: ManifestRow, facts: VideoInfo) -> ManifestRow:
        _check_parts(row, facts)
        known = {name: fact for name, fact in asdict(facts).items() if name not in ("can_jump", "notes")}
        if not facts.can_jump:
            known["num_frames"] = None  # with it, training would jump
        if {"left", "top"} <= dict(row.others).keys():  # a region's width and height are not those of the frame
            del known["width"], known["height"]
        return replace(row, **known)

    return _usable(rows, findings, indexed)


def scan_clips(listing: Listing, findings: Mapping[str, Finding]) -> tuple[list[ManifestRow], list[LeftOut]]:
    """Return the clips that can be used, as they are listed, and each other clip with why it cannot.

    findings: of each path. A file must have the SHA-256 and the number of frames that its row names, and its region.
    """

    def unchanged(clip: int, row: ManifestRow, facts: VideoInfo) -> ManifestRow:
        if row.sha256 not in (None, facts.sha256):
            raise DecodeError(row.path, "has changed since it was indexed: its SHA-256 is not the manifest's")
        if row.num_frames not in (None, facts.num_frames):
            frames = counted(facts.num_frames, "frame")
            raise DecodeError(row.path, f"has {frames}, but the manifest says {row.num_frames}")
        _check_parts(row, facts)
        listed = listing.manifest.clip(clip)
        if (problem := listed.region.problem(facts.width, facts.height)) is not None:
            reason = f"{problem} ({listing.manifest.place(clip)})"
            raise DecodeError(row.path, reason, listed.span, listed.region)
        return row

    return _usable(listing.rows, findings, unchanged)


def _usable(
    rows: Iterable[ManifestRow],
    findings: Mapping[str, Finding],
    checked: Callable[[int, ManifestRow, VideoInfo], ManifestRow],
) -> tuple[list[ManifestRow], list[LeftOut]]:
    good = list[ManifestRow]()
    bad = list[LeftOut]()
    for clip, row in enumerate(rows):
        facts = findings[row.path]
        try:
            if isinstance(facts, DecodeError):
                raise facts
            good.append(checked(clip, row, facts))
        except DecodeError as error:
            bad.append((row, error))
    return good, bad


def reasons(left_out: Iterable[LeftOut]) -> list[DecodeError]:
    """Return each bad file once, and each bad span and region of a file."""
    return list({(error.path, error.span, error.region): error for _, error in left_out}.values())


def _check_parts(row: ManifestRow, facts: VideoInfo) -> None:
    """Raise DecodeError where a file lacks its row's span or boxes."""
    row.span.frames(row.path, facts.num_frames)
    if row.boxes is not None:
        row.boxes.check(0, row.path, facts.num_frames, facts.width, facts.height)


def copies(rows: Iterable[ManifestRow]) -> list[tuple[str, str]]:
    """Return the path of each file with the same bytes as an earlier one, and the path of that one."""
    digests = {row.path: row.sha256 for row in rows}  # each file once
    first = {digest: path for path, digest in reversed(digests.items())}
    return [(path, first[digest]) for path, digest in digests.items() if first[digest] != path]
