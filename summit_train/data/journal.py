"""What a long survey has found so far, on the disk: one that is killed goes on where it was.

A folder beside the result, with a file for each rank: one JSON object a line, the path, its file's size and time of
change, and what was found. A line counts only where the file is still as it was; half a line counts nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from summit_train.data.survey import Facts, Found
from summit_train.data.video import DecodeError


class Journal:
    """The findings under `root`; every rank has the same folder and appends to a file of its own."""

    def __init__(self, folder: Path, root: str) -> None:
        self._folder, self._root = folder, root

    def read(self, paths: Collection[str]) -> dict[str, Found]:
        """What is known of these paths already."""
        wanted = set(paths)
        found: dict[str, Found] = {}
        for record in self._records():
            path = record["path"]
            if path in wanted and record["state"] == _state(self._root, path):
                found[path] = DecodeError(path, record["error"]) if "error" in record else Facts(**record["facts"])
        return found

    def _records(self) -> Iterator[dict[str, Any]]:
        for file in sorted(self._folder.glob("*.jsonl")):
            with open(file, "rb") as lines:
                for line in lines:
                    try:
                        yield json.loads(line)
                    except ValueError:  # a line that was being written when the process was killed
                        continue

    def part(self, rank: int) -> Part:
        """The file that this rank appends to."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return Part(self._folder / f"{rank:06}.jsonl", self._root)

    def remove(self) -> None:
        """The result is written: forget how it was found."""
        shutil.rmtree(self._folder, ignore_errors=True)


class Part:
    """One rank's file of a journal; `add` is on the disk's side of this process when it returns."""

    def __init__(self, path: Path, root: str) -> None:
        self._root = root
        self._file = open(path, "ab")  # noqa: SIM115  (closed in __exit__)
        if self._file.tell():
            self._file.write(b"\n")  # the line before may be half a one

    def add(self, path: str, found: Found) -> None:
        """Note what was found at a path."""
        what = {"error": found.reason} if isinstance(found, DecodeError) else {"facts": asdict(found)}
        record = {"path": path, "state": _state(self._root, path), **what}
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()


def _state(root: str, path: str) -> list[int] | None:
    """The size in bytes and the time of change in ns, None where there is nothing."""
    try:
        status = os.stat(os.path.join(root, path))
    except (OSError, ValueError):
        return None
    return [status.st_size, status.st_mtime_ns]
