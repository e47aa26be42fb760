"""One run at a time in a run folder."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from summit_train.core.bad_nodes import FAILURE
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import naming, take_lock

_MOST_WAITED_S = 100


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
        # A server frees the lock of a lost node after some time, NFS after 90 s: a restart in the job waits for it.
        may_wait, began = FAILURE in os.environ, time.monotonic()
        while True:
            try:
                take_lock(file, wait=False)
                break
            except OSError as error:
                if may_wait and time.monotonic() - began < _MOST_WAITED_S:
                    time.sleep(1)
                    continue
                file.seek(0)
                holder = file.read().strip() or "unknown"
                file.close()
                wrong = f"{self._path.parent}: another run is using this directory ({holder})"
                what = f"{wrong}; wait for it, or give this one another name (name=...)"
                raise (RunFailed if may_wait else UserError)(what) from error
        file.truncate(0)
        with naming(self._path):
            os.write(file.fileno(), f"{os.uname().nodename}, process {os.getpid()}\n".encode())
        return file
