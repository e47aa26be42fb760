"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """A binary file that takes the place of `path`, flushed to the disk, when the block ends.

    An error in the block leaves `path` as it was. The folder is made where it is missing. Raises OSError where the
    disk does not take it.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The process number: two commands that write one file then do not write into each other's.
    temporary = target.with_name(f".{target.name[:200]}.{os.getpid()}.writing")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write a text file; what stands for a byte in a file's name that is no UTF-8 becomes that byte again."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", "surrogateescape"))


def write_json(path: str | Path, value: Any) -> None:
    """Write one JSON object."""
    write_text(path, json.dumps(value, indent=1) + "\n")
