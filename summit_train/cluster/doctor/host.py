"""Check what this host has room for: CPUs, shared memory, disks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from summit_train.cluster.doctor.finding import Check
from summit_train.core.processes import output

GIB = 1024**3


def listed_gpus() -> list[str]:
    """Return the driver's own list of GPUs, a line each; empty without a driver."""
    return [line for line in output(["nvidia-smi", "--list-gpus"]).splitlines() if line.startswith("GPU ")]


def check_cpus() -> Check:
    """Check the CPUs that this process may use, and each rank's share (one rank a GPU, else two ranks)."""
    cpus, ranks = available_cpus(), max(len(listed_gpus()), 2)
    found = f"{cpus:g} for this process: {cpus / ranks:g} a rank with {ranks} ranks"
    if cpus >= ranks:
        return Check("cpus", "ok", found)
    mend = "ranks will share a CPU (mpirun --oversubscribe): ask the scheduler for more, or run fewer ranks"
    return Check("cpus", "warn", found, mend)


def available_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Count CPUs by affinity, limited by a container's quota (cgroup v2's cpu.max, v1's cfs quota)."""

    def words(*names: str) -> list[str]:
        return [word for name in names if (cgroup / name).is_file() for word in (cgroup / name).read_text().split()]

    cpus = float(len(os.sched_getaffinity(0)))
    quota = words("cpu.max") or words("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
    if len(quota) == 2 and quota[0].isdigit():
        cpus = min(cpus, int(quota[0]) / int(quota[1]))
    return cpus


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    """Check the room in shared memory, which loader workers and the ranks of a host exchange data through."""
    if not folder.is_dir():
        return Check("shared memory", "warn", f"no {folder}", "run with data.workers=0")
    free = shutil.disk_usage(folder).free / GIB
    mend = "give the container more (docker run --shm-size=8g)" if free < 1 else ""
    return Check("shared memory", "warn" if mend else "ok", f"{free:.1f} GiB free in {folder}", mend)


def check_disk(name: str, folder: Path) -> Check:
    """Check the free space where `folder` is or will be made, and that it can be written."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free / GIB
    found = f"{free:.1f} GiB free at {folder}"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check(name, "fail", f"{found}; {there} cannot be written", "choose another place or change its owner")
    if free < 1:
        return Check(name, "fail", found, "free some space: a ResNet-50 checkpoint takes 0.2 GiB")
    return Check(name, "warn" if free < 5 else "ok", found, "little for a long run" if free < 5 else "")
