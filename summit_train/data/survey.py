"""What files hold, found by decoding them in full, by many processes; none of them can bring the rest down."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import islice

from summit_train.data.decode import probe
from summit_train.data.limits import NO_HURRY
from summit_train.data.pictures import folder_sha256, probe_folder
from summit_train.data.reader import prepare_reader
from summit_train.data.store import file_sha256, load_video
from summit_train.data.video import DecodeError

MISSING = "No such file or directory"

_PATHS_PER_WORKER = 16
# The decoder looks at the clock itself; its process is ended only where it cannot.
_PATIENCE = 1.5


@dataclass(frozen=True)
class Facts:
    """What a video or a folder of pictures holds: see VideoInfo; sha256 in hexadecimal digits."""

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
    """For each path below `root`, in their order: what it holds, or why it cannot be used, under the path as given.

    workers: processes that decode; 0 decodes in this one. A file that brings its process down, or holds it for an
    hour, is named like any other bad one; it does not end the rest.
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
            info, digest = probe_folder(full), folder_sha256(full)
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
    """Examine all paths by `workers` processes, with new ones where a file brought them down or took longer."""
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
    """Examine a path in a process of its own, which may die of it."""
    began = time.monotonic()
    with worker_pool(1) as pool:
        try:
            return pool.submit(_in_time, examine, root, seconds, path).result()
        except BrokenProcessPool:
            if time.monotonic() - began > seconds:
                return DecodeError(path, f"is not read within {seconds:g} s: its reader never came back")
            return DecodeError(path, "decoding it kills the process")


def _in_time(examine: Examine, root: str, seconds: float, path: str) -> Found:
    """Examine a path in a worker, which an alarm ends when a decoder never comes back: nobody handles that signal."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return examine(root, path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def worker_pool(workers: int) -> ProcessPoolExecutor:
    """Processes for work on clips: none outlives this one, and none takes all of the node's memory."""
    # Not fork: a child of a process with threads (MPI's, torch's) can hang.
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=prepare_reader)
