"""Decoding files in full, by many processes, to see what they hold; with a journal, so that it can be continued.

A file that brings its process down does not end the survey. The journal is a folder beside the result with a file for
each rank: one JSON object a line, the path, its file's size and modification time, and the finding. A line counts only
while the file is unchanged.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path

from summit_train.data.video.clips import probe_folder
from summit_train.data.video.decode import probe
from summit_train.data.video.source import NO_HURRY, DecodeError, load_video, worker_pool
from summit_train.files import file_sha256

_PATHS_PER_WORKER = 16
# The decoder checks the time itself; its process is killed only where it cannot.
_PATIENCE = 1.5


@dataclass(frozen=True)
class Facts:
    """What a video or a folder of pictures holds: see VideoInfo. sha256: in hexadecimal digits."""

    num_frames: int
    fps: float | None
    width: int
    height: int
    duration: float | None
    codec: str
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
            info = probe(video)
            digest = file_sha256(full) if video.content is None else hashlib.sha256(video.content).hexdigest()
    except DecodeError as error:
        within = f"{os.path.relpath(error.path, full)} " if error.path.startswith(f"{full}{os.sep}") else ""
        return DecodeError(path, f"{within}{error.reason}")
    except OSError as error:
        return DecodeError(path, error.strerror or str(error))
    fps = info.fps and round(info.fps, 6)
    duration = info.duration and round(info.duration, 6)
    return Facts(info.num_frames, fps, info.width, info.height, duration, info.codec, digest)


def spread(
    examine: Examine, root: str, paths: Iterable[str], workers: int, seconds: float = _PATIENCE * NO_HURRY.seconds
) -> Iterator[Found]:
    """Examine all paths by `workers` processes; replace those that a file crashed or blocked for `seconds`."""
    left = iter(paths)
    while batch := list(islice(left, workers * _PATHS_PER_WORKER)):
        with worker_pool(workers) as pool:
            while batch:
                num_found = 0
                try:
                    for found in pool.map(partial(_in_time, examine, root, seconds), batch):
                        num_found += 1
                        yield found
                except BrokenProcessPool:
                    yield from (_alone(examine, root, seconds, path) for path in batch[num_found:])
                    break
                batch = list(islice(left, workers * _PATHS_PER_WORKER))


def _alone(examine: Examine, root: str, seconds: float, path: str) -> Found:
    """Examine a path in a process of its own, which may crash."""
    began = time.monotonic()
    with worker_pool(1) as pool:
        try:
            return pool.submit(_in_time, examine, root, seconds, path).result()
        except BrokenProcessPool:
            if time.monotonic() - began > seconds:
                return DecodeError(path, f"is not read within {seconds:g} s: its reader never came back")
            return DecodeError(path, "decoding it kills the process")


def _in_time(examine: Examine, root: str, seconds: float, path: str) -> Found:
    """Examine a path in a worker. SIGALRM, which has no handler, kills it where a decoder never returns."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return examine(root, path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class Journal:
    """The findings for files below `root`; all ranks share the folder, and each appends to a file of its own."""

    def __init__(self, folder: Path, root: str) -> None:
        self._folder, self._root = folder, root

    def read(self, paths: Collection[str]) -> dict[str, Found]:
        """Return the known findings for these paths."""
        wanted = set(paths)
        found: dict[str, Found] = {}
        for line in chain.from_iterable(f.read_bytes().splitlines() for f in sorted(self._folder.glob("*.jsonl"))):
            try:
                record = json.loads(line)
            except ValueError:  # the process was killed while it wrote this line
                continue
            path = record["path"]
            if path in wanted and record["state"] == _state(self._root, path):
                found[path] = DecodeError(path, record["error"]) if "error" in record else Facts(**record["facts"])
        return found

    @contextmanager
    def part(self, rank: int) -> Iterator[Callable[[str, Found], None]]:
        """Open the file that this rank appends to; give the function that appends the finding for a path."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / f"{rank:06}.jsonl", "ab") as file:
            if file.tell():
                file.write(b"\n")  # the line before may be incomplete

            def add(path: str, found: Found) -> None:
                what = {"error": found.reason} if isinstance(found, DecodeError) else {"facts": asdict(found)}
                record = {"path": path, "state": _state(self._root, path), **what}
                file.write(json.dumps(record).encode() + b"\n")
                file.flush()

            yield add

    def remove(self) -> None:
        """Delete the journal, when the result is written."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _state(root: str, path: str) -> list[int] | None:
    """Return a file's size in bytes and its modification time in ns, None where there is none."""
    try:
        status = os.stat(os.path.join(root, path))
    except (OSError, ValueError):
        return None
    return [status.st_size, status.st_mtime_ns]
