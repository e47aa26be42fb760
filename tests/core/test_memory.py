"""Freed memory is kept for the next step."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tests.worlds import ROOT

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")

PROGRAM = """
import resource, sys
import numpy as np
from summit_train.core import memory
if sys.argv[1] != "as it is":
    assert getattr(memory, sys.argv[1])()
size = int(sys.argv[2])
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):  # until the heap has found its size
    np.ones(size, np.float32)
before = faults()
for _ in range(10):
    np.ones(size, np.float32)
print(faults() - before)
"""


def faults(way: str, floats: int) -> int:
    """Page faults of taking a block of floats ten times, after `way` was called."""
    command = [sys.executable, "-c", PROGRAM, way, str(floats)]
    return int(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def test_a_block_of_64_mib_is_taken_from_the_system_once() -> None:
    """Counted in page faults: ten blocks of 64 MiB are 10 x 16,384 pages of 4 KiB (fewer where pages are huge)."""
    assert faults("keep_freed_memory", 16 << 20) < 100
    assert faults("as it is", 16 << 20) > 300


def test_readers_keep_the_frames_of_a_clip_and_give_large_blocks_back() -> None:
    assert faults("keep_freed_frames", 2 << 20) < 100
    assert faults("keep_freed_frames", 16 << 20) > 300
