"""What a job script and its ranks tell each other about nodes, in the folder RUN/job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from summit_train.core.files import naming

# By these a job tells its ranks to check the nodes before the first step, and to name the nodes of slow ranks as bad.
CHECK_NODES = "SUMMIT_TRAIN_CHECK_NODES"
EXCLUDE_SLOW = "SUMMIT_TRAIN_EXCLUDE_SLOW"
# The file in which a rank that fails leaves the reason: RUN/job/failure.BEGIN.RESTART, another for each start, so that
# the ranks of an earlier one do not speak for this one. BEGIN: when the script began, in seconds since 1970.
FAILURE = "SUMMIT_TRAIN_FAILURE"


class Spares(NamedTuple):
    """The nodes that a restart could replace by others, and those that it could do without: min_nodes must be left."""

    replaceable: int = 0
    losable: int = 0


def spares(run_path: Path) -> Spares:
    """Return what the script has written before this start; none without a script, or with one that never moves."""
    with suppress(OSError, ValueError, TypeError):
        return Spares(*map(int, (run_path / "job" / "spares").read_text("utf-8").split()))
    return Spares()


def script_began() -> str | None:
    """Return what all starts of the ranks by one script have in common; None without a script that restarts them."""
    file = os.environ.get(FAILURE)
    return None if file is None else Path(file).name.partition(".")[2].rpartition(".")[0] or None


def bad_nodes(run_path: Path) -> list[str]:
    """Return the hosts that RUN/job/bad_nodes names, as the job script reads it; none if there is no such file.

    A line names those in its first word, with commas between them and before a colon, such as `node4: ECC`; # begins a
    comment.
    """
    return _hosts(_text(run_path / "job" / "bad_nodes"))


def name_bad_nodes(run_path: Path, reasons: Mapping[str, str]) -> list[str]:
    """Add to RUN/job/bad_nodes the hosts that it does not name yet, each with a reason of one line; return them.

    The next start of the ranks leaves them out. Outside a job, RUN/job does not exist and nothing is written.
    """
    path = run_path / "job" / "bad_nodes"
    if not path.parent.is_dir():
        return []
    text = _text(path)
    known = _hosts(text)
    new = [host for host in reasons if host not in known]
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write("" if text.endswith("\n") or not (text and new) else "\n")
        file.writelines(f"{host} {reasons[host]}\n" for host in new)
    return new


def _text(path: Path) -> str:
    # It may be written by hand, on Windows with a byte-order mark.
    return path.read_text("utf-8-sig", errors="replace") if path.exists() else ""


def _hosts(text: str) -> list[str]:
    words = [line.split()[0] for line in text.splitlines() if line.strip()]
    names = [name for word in words if not word.startswith("#") for name in re.split("[,;]", word)]
    return [name.partition(":")[0] if name.count(":") == 1 else name for name in names if name]
