"""This machine: no queue. A job runs at once, in the foreground."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from summit_train.cluster.schedulers.scheduler import Scheduler


class Local(Scheduler):
    launchers = ("ranks", "mpirun")  # ranks: `train --ranks`
    command = None
    has_arrays = False

    def words(self, script: Path, launcher: str, after: str | None = None) -> list[str]:
        return ["bash", script.name]

    def submit(self, script: Path, launcher: str, after: str | None) -> NoReturn:
        """Replace this process with the job, so that signals reach the script."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvp("bash", ["bash", str(script)])

    def states(self) -> dict[str, str]:
        return {}
