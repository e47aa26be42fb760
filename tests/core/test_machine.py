"""The processor as its system names it; freed memory is kept for the next step."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from summit_train.core.machine import instruction_sets, processor_digest, processor_name
from tests.worlds import ROOT

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")

X86 = "processor\t: 0\ncpu family\t: 6\nmodel name\t: A B 1\nflags\t\t: sse2 avx2\ncpu MHz\t\t: 1\nmodel name\t: C\n"
POWER = "processor\t: 0\ncpu\t\t: POWER9, altivec supported\nclock\t\t: 2300MHz\n"


@pytest.mark.parametrize(
    ("text", "name", "flags"),
    [(X86, "A B 1", {"sse2", "avx2"}), (POWER, "POWER9, altivec supported", set())],
    ids=["x86", "power"],
)
def test_name_and_flags(monkeypatch: pytest.MonkeyPatch, text: str, name: str, flags: set[str]) -> None:
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert (processor_name(), instruction_sets()) == (name, flags)
    before = processor_digest("a")
    monkeypatch.setattr(Path, "read_text", lambda path: text.replace("2300", "2400").replace("MHz\t\t: 1", "MHz: 2"))
    assert processor_digest("a") == before != processor_digest("b")
    monkeypatch.setattr(Path, "read_text", lambda path: text.replace("avx2", "").replace("9", "10"))
    assert processor_digest("a") != before


PROGRAM = """
import resource, sys
import numpy as np
from summit_train.core import machine
if sys.argv[1] != "as it is":
    assert getattr(machine, sys.argv[1])()
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


@glibc
def test_a_block_of_64_mib_is_taken_from_the_system_once() -> None:
    """Counted in page faults: ten blocks of 64 MiB are 10 x 16,384 pages of 4 KiB (fewer where pages are huge)."""
    assert faults("keep_freed_memory", 16 << 20) < 100
    assert faults("as it is", 16 << 20) > 300


@glibc
def test_readers_keep_the_frames_of_a_clip_and_give_large_blocks_back() -> None:
    assert faults("keep_freed_frames", 2 << 20) < 100
    assert faults("keep_freed_frames", 16 << 20) > 300
