"""What a process that reads clips for another one begins with."""

from __future__ import annotations

import multiprocessing
import os
import threading

from summit_train.data.limits import bound_memory
from summit_train.memory import keep_freed_frames


def prepare_reader(worker: int = 0) -> None:
    """Bound this process's memory, keep what clips free of it, and end it when the main process dies.

    Else it would wait for work for ever: the DataLoader's own watch looks at the parent, which is the fork server, and
    that one lives as long as a worker does. worker: its number, which the DataLoader gives and nobody needs.
    """
    bound_memory()
    keep_freed_frames()
    main = multiprocessing.parent_process()
    assert main is not None

    def watch() -> None:
        main.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
