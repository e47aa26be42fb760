"""The processor as its system names it, memory that malloc keeps, and the warning of a PyTorch that was not tested."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from summit_train import __version__
from summit_train.core import machine
from summit_train.core.machine import TESTED_TORCH, instruction_sets, processor_digest, processor_name, untested
from tests.conftest import WriteSpec
from tests.worlds import ROOT, Say, train

X86 = "processor\t: 0\ncpu family\t: 6\nmodel name\t: A B 1\nflags\t\t: sse2 avx2\ncpu MHz\t\t: 1\nmodel name\t: C\n"
POWER = "processor\t: 0\ncpu\t\t: POWER9, altivec supported\nclock\t\t: 2300MHz\n"


@pytest.mark.parametrize(
    ("text", "name", "flags"),
    [(X86, "A B 1", {"sse2", "avx2"}), (POWER, "POWER9, altivec supported", set())],
    ids=["x86", "power"],
)
def test_name_and_flags(monkeypatch: pytest.MonkeyPatch, text: str, name: str, flags: set[str]) -> None:
    def digest(found: str, setting: str = "a") -> str:
        monkeypatch.setattr(Path, "read_text", lambda path, **_: found)
        return processor_digest(setting)

    monkeypatch.setattr(Path, "is_file", lambda path: True)
    before = digest(text)
    assert (processor_name(), instruction_sets()) == (name, flags)
    assert digest(text.replace("2300", "2400").replace("MHz\t\t: 1", "MHz: 2")) == before != digest(text, "b")
    assert digest(text.replace("avx2", "").replace("9", "10")) != before


GIB = 1 << 30


def _group(folder: Path, limit: str, used: int, cached: int, *, first: bool = False) -> None:
    """A control group; first: of version 1."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
    for name, number in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{number}\n")
    (folder / "memory.stat").write_text(
        f"file 5\n{'total_' * first}inactive_file {cached // 2}\n"
        f"{'total_' * first}active_file {cached - cached // 2}\nanon 7\n"
    )


def test_free_memory_is_what_the_tightest_group_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, mounted = tmp_path / "cgroup", tmp_path / "mounted"
    free = partial(machine._free_in_groups, process, mounted)
    assert free() == []  # no control groups
    process.write_text("0::/slurm/job_1/step_0\n")
    _group(mounted / "slurm/job_1", str(8 * GIB), 3 * GIB, GIB)
    _group(mounted / "slurm/job_1/step_0", "max", 2 * GIB, 0)
    assert free() == [6 * GIB]
    process.write_text("7:cpu,cpuacct:/slurm/job_1\n4:memory:/host/only\n0::/\n")  # as a container sees the host's
    _group(mounted / "memory", str(5 * GIB), 3 * GIB, 0, first=True)
    assert free() == [2 * GIB]
    monkeypatch.setattr(machine, "_free_in_groups", free)
    monkeypatch.setattr(machine, "_proc_value", lambda *_: "3145728 kB")
    assert machine.free_memory() == 2 * GIB
    monkeypatch.setattr(machine, "_proc_value", lambda *_: "1048576 kB")
    assert machine.free_memory() == GIB
    monkeypatch.setattr(machine, "_proc_value", lambda *_: "")
    process.unlink()
    assert machine.free_memory() == float("inf")


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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
def test_blocks_of_freed_memory_are_kept() -> None:
    """Ten blocks of 64 MiB are 10 x 16,384 pages of 4 KiB (fewer where pages are huge); readers give those back."""
    assert faults("keep_freed_memory", 16 << 20) < 100 < 300 < faults("as it is", 16 << 20)
    assert faults("keep_freed_frames", 2 << 20) < 100 < 300 < faults("keep_freed_frames", 16 << 20)


_HOARD = """
import numpy as np
from summit_train.core.machine import bound_memory
bound_memory()
np.ones(1 << 28, np.uint8)
try:
    np.ones(1 << 33, np.uint8)
except MemoryError:
    print("refused")
"""


def test_a_bounded_process_is_refused_gigabytes_and_lives_on() -> None:
    done = subprocess.run([sys.executable, "-c", _HOARD], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of a user whose PyTorch was not tested."""
    monkeypatch.setattr(machine, "TESTED_TORCH", ("1.0", "1.1"))
    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def test_minor_versions_are_compared_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TESTED_TORCH", ("2.7", "2.15"))
    assert [untested(version) for version in ("2.7.0", "2.9.1+cu126", "2.15.3")] == [""] * 3
    for version in ("2.6.9", "2.16.0a0+git1", "3.0"):
        text = f"torch {version} was not tested with summit_train {__version__} (tested: 2.7 to 2.15)"
        assert untested(version) == text


def test_what_was_tested_is_in_the_page_and_reaches_down_to_the_requirement() -> None:
    page = (ROOT / "docs/install.md").read_text()
    table = page.partition("\n## What was tested\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\|.*torch (\d+\.\d+)\.\d", table, re.M)
    assert len(rows) >= 3 and (rows[0], rows[-1]) == TESTED_TORCH
    assert f"outside {TESTED_TORCH[0]} to {TESTED_TORCH[1]}" in table
    assert f"    torch >={TESTED_TORCH[0]}\n" in (ROOT / "setup.cfg").read_text()
    assert untested(torch.__version__) == ""


def test_evaluation_warns_once_and_beside_its_json(trained_run: Path, tmp_path: Path, cache: Path, say: Say) -> None:
    words = ["eval", trained_run / "spec.yaml", "--checkpoints", trained_run / "checkpoints/step_00000020.pt", "--json"]
    warning = f"warning: torch {torch.__version__} was not tested with summit_train {__version__} (tested: 1.0 to 1.1)"
    for known in (False, True):
        status, out, err = say(*words, f"run_dir={tmp_path}")
        assert status == 0 and json.loads(out)["checkpoints"]
        assert err == ("" if known else f"{warning}; `summit-train doctor` checks it\n")


def test_one_rank_of_a_training_warns_and_a_plan_does_not(write_spec: WriteSpec, cache: Path, say: Say) -> None:
    spec = write_spec(schedule={"epochs": 1})
    assert "was not tested" not in say("plan", spec)[2]
    cache.write_text("a file, so that each process that asks would warn")
    assert train(2, spec).count("was not tested") == 1


def test_each_environment_warns(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warns(version: str = "2.0") -> bool:
        machine.warn_untested(version)
        return capsys.readouterr().err.count("\n") == 1

    assert warns() and not warns() and warns("2.1") and not warns("2.1")
    monkeypatch.setattr(sys, "prefix", "/another")
    assert warns() and not warns()
    cache.rename(cache.with_name("former"))
    cache.write_text("a file, so that no marker can be kept")
    assert warns() and warns()
