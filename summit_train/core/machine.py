"""This machine: its processor, CPUs and memory, how malloc keeps freed memory, and whether its PyTorch was tested."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

from summit_train import __version__
from summit_train.core.files import cache_folder
from summit_train.core.result import warn

TESTED_TORCH = ("2.7", "2.15")  # the oldest and the newest, by tests/matrix.sh

PR_SET_PDEATHSIG = 1  # prctl(2): a signal for this process when its parent ends
# <malloc.h> of glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
# The memory of a worker process besides what it starts with: several frames of the largest size.
_WORKER_BYTES = 4 << 30


def num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rank_cpus(local_ranks: int) -> int:
    """Return the CPUs of a rank: those that it is bound to, or its share where `local_ranks` share all of the node."""
    return min(num_cpus(), max(1, (os.cpu_count() or 1) // local_ranks))


def free_memory() -> float:
    """Return the bytes that this process may still take, by the machine and its control groups; infinity if unknown."""
    return min([1024 * float(_proc_value("meminfo", "MemAvailable").removesuffix("kB") or "inf"), *_free_in_groups()])


def _free_in_groups(process: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> list[float]:
    """Return the bytes that each control group has left (version 1 and 2), cached files counted as free."""
    found = []
    for line in process.read_text(encoding="utf-8").splitlines() if process.is_file() else []:
        _, kind, path = line.split(":", 2)
        limit, used = ("limit_in_bytes", "usage_in_bytes") if kind else ("max", "current")
        group = mounted / kind / path.lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # it has no memory.*, or the limit is "max"
                left, taken = (int((folder / f"memory.{name}").read_text(encoding="utf-8")) for name in (limit, used))
                sizes = dict(map(str.split, (folder / "memory.stat").read_text(encoding="utf-8").splitlines()))
                files = sum(
                    float(sizes.get(f"{'total_' if kind else ''}{name}_file", 0)) for name in ("active", "inactive")
                )
                found.append(max(0.0, left - taken + files))
    return found


def raise_open_files() -> int | None:
    """Let this process open as many files as it may; return how many, None for no limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return None if hard == resource.RLIM_INFINITY else hard


def processor_name() -> str:
    """Return the model, e.g. "AMD EPYC 9R14"."""
    return _proc_value("cpuinfo", "model name", "cpu") or platform.processor() or platform.machine()


def instruction_sets() -> frozenset[str]:
    """Return the processor's instruction sets; none where the system does not list them."""
    return frozenset(_proc_value("cpuinfo", "flags", "Features").split())


def processor_digest(*settings: str) -> str:
    """Return 12 characters that differ where the model, its instruction sets or `settings` do."""
    words = " ".join([platform.machine(), processor_name(), *sorted(instruction_sets()), *settings])
    return hashlib.sha256(words.encode()).hexdigest()[:12]


def _proc_value(file: str, *keys: str) -> str:
    """Return the value of the first of these keys in /proc/FILE, "" without any."""
    path = Path("/proc", file)
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""


def bound_memory() -> None:
    """Limit what this process may allocate from now on, so that a decoder cannot exhaust the node's memory.

    The limit is on the data (RLIMIT_DATA): libraries reserve many addresses that they never use.
    """
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    limit = pages * resource.getpagesize() + _WORKER_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def keep_freed_memory() -> bool:
    """Let malloc keep large blocks and the heap's end, for processes that train on a CPU; return False without glibc.

    By default malloc returns blocks of 32 MiB and more to the system, which zeroes every page of the next activation:
    copying 51 MB took three times as long. Trimming the heap cost up to 0.3 s a step where two networks of four clips
    took turns. The peak memory of a run does not change.
    """
    return _mallopt({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1})


def keep_freed_frames() -> bool:
    """Let malloc keep 128 MiB of freed blocks, none larger than 32 MiB; return False without glibc.

    For processes that read clips. The frames of a clip are a few MB. A clip from packed JPEGs takes a fifth less time.
    """
    return _mallopt({_M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 128 << 20})


def _mallopt(options: dict[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all(mallopt(option, value) for option, value in options.items())


def untested(torch_version: str) -> str:
    """Return a warning of a PyTorch that is older or newer than those that were tested, "" for any other."""
    first, last, this = ([int(n) for n in re.findall(r"\d+", text)[:2]] for text in (*TESTED_TORCH, torch_version))
    if first <= this <= last:
        return ""
    return f"torch {torch_version} was not tested with summit_train {__version__} (tested: {' to '.join(TESTED_TORCH)})"


def warn_untested(torch_version: str) -> None:
    """Warn of a PyTorch that was not tested, the first time that it runs in this environment."""
    text = untested(torch_version)
    if not text:
        return
    with suppress(OSError):  # each run warns where nothing can be kept
        marker = cache_folder() / "warned" / hashlib.sha256(os.fsencode(f"{sys.prefix}\0{text}")).hexdigest()[:16]
        if marker.exists():
            return
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    warn(f"{text}; `summit-train doctor` checks it")
