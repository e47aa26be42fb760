"""Freed memory is kept for the next step."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tests.worlds import ROOT

PROGRAM = """
import resource, sys
from summit_train.training.memory import keep_freed_memory
import torch
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):  # until the heap has found its size
    torch.ones(16 << 20)
before = faults()
for _ in range(10):
    torch.ones(16 << 20)
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
def test_a_block_of_64_mib_is_not_taken_anew_from_the_system() -> None:
    """Counted in page faults: ten blocks of 64 MiB are 10 x 16,384 pages of 4 KiB (fewer where pages are huge)."""
    counted = {
        way: int(
            subprocess.run(
                [sys.executable, "-c", PROGRAM, way], cwd=ROOT, check=True, capture_output=True, text=True
            ).stdout
        )
        for way in ("keep", "as it is")
    }
    assert counted["keep"] < 100
    assert counted["as it is"] > 300
