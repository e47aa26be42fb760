"""RUN/job/bad_nodes: the nodes that the next start of a job's ranks leaves out, a line each: the name, then why."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from summit_train.core.errors import UserError
from summit_train.core.files import naming

# By these a job tells its ranks to check the nodes before the first step, and to name the nodes of slow ranks as bad.
# The value is the number of nodes that the job has to spare: more are not named.
CHECK_NODES, EXCLUDE_SLOW = "SUMMIT_TRAIN_CHECK_NODES", "SUMMIT_TRAIN_EXCLUDE_SLOW"


def spare_nodes(variable: str) -> int | None:
    """Return the value of one of these variables; None where it is not set. Raises UserError where it is no number."""
    value = os.environ.get(variable)
    if value is not None and not value.isdecimal():
        raise UserError(f"{variable} must be the number of spare nodes, got {value!r}; try 0")
    return None if value is None else int(value)


def bad_nodes(run_path: Path) -> list[str]:
    """Return the nodes that the file names; none outside a job."""
    path = run_path / "job" / "bad_nodes"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [words[0] for line in lines if (words := line.split()) and not words[0].startswith("#")]


def name_bad_nodes(run_path: Path, reasons: Mapping[str, str]) -> list[str]:
    """Add the hosts that the file does not name yet, each with its reason of one line; return them.

    Outside a job there is no folder RUN/job, and nothing is written.
    """
    path = run_path / "job" / "bad_nodes"
    if not path.parent.is_dir():
        return []
    with naming(path):
        known = bad_nodes(run_path)
        new = [host for host in reasons if host not in known]
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{host} {reasons[host]}\n" for host in new)
    return new
