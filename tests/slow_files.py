"""Processes that count, and delay, their calls for files below some folders: `slow_files.c`, compiled and preloaded."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

_SOURCE = Path(__file__).with_name("slow_files.c")


class SlowFiles:
    """What a process needs in its environment, and how many calls all that have it have made so far."""

    def __init__(self, scratch: Path, folders: Iterable[str], delay_us: int = 0) -> None:
        library, self._count = scratch / "slow_files.so", scratch / "calls"
        subprocess.run(
            [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", _SOURCE, "-o", library, "-ldl"], check=True
        )
        self._count.write_bytes(bytes(8))
        self.environ = {
            "LD_PRELOAD": str(library),
            "SLOW_FOLDERS": ":".join(folders),
            "SLOW_COUNT": str(self._count),
            "SLOW_US": str(delay_us),
        }

    @property
    def calls(self) -> int:
        return int.from_bytes(self._count.read_bytes(), "little")
