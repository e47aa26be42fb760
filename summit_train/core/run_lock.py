"""One run at a time in a run folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from summit_train.core.bad_nodes import FAILURE
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import is_locked, naming, take_lock

_MOST_WAITED_S = 100


def wait_for_lock(run_path: Path, tick: Callable[[], None]) -> None:
    """Wait up to 100 s, in a restart within a job, for the lock of a lost node; call `tick` each second.

    The file system's server frees it after some time, NFS after 90 s.
    """
    until = time.monotonic() + (_MOST_WAITED_S if FAILURE in os.environ else 0)
    while time.monotonic() < until and is_locked(run_path / "lock"):
        tick()
        time.sleep(1)


class RunLock(AbstractContextManager["RunLock"]):
    """Holds a run folder for this process within the block.

    It is a POSIX record lock on the file `lock`, so it ends with the process, however it ends. It belongs to the file,
    not to its name: if `lock` is deleted, another run can take the directory.
    """

    def __init__(self, run_path: Path) -> None:
        run_path.mkdir(parents=True, exist_ok=True)
        self._path = run_path / "lock"
        self._file = self._take()

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def check(self) -> None:
        """Take the directory again where `lock` was deleted. Raises RunFailed if another run has been faster."""
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                return
            wrong = f"{self._path} was deleted or replaced while this run was using the directory"
            other = f"another run has taken it ({self._path.read_text(encoding='utf-8').strip()})"
            raise RunFailed(f"{wrong}, and {other}; this one stops here")
        except FileNotFoundError:
            self._file.close()
        try:
            self._file = self._take()
        except UserError as error:
            raise RunFailed(str(error)) from error

    def _take(self) -> IO[str]:
        file = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115  (closed in __exit__)
        try:
            take_lock(file, wait=False)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            wrong = f"{self._path.parent}: another run is using this directory ({holder})"
            what = f"{wrong}; wait for it, or give this one another name (name=...)"
            raise (RunFailed if FAILURE in os.environ else UserError)(what) from error
        file.truncate(0)
        with naming(self._path):
            os.write(file.fileno(), f"{os.uname().nodename}, process {os.getpid()}\n".encode())
        return file
