"""Check what works on this machine, and say how to fix what does not.

Packages are tried by `cluster.probe` in processes of their own: if torch cannot be imported or MPI ends its process,
that is a finding, and the other checks still run.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from summit_train.cluster.probe import BUILD, GIB, SET_UP, Check, listed_gpus
from summit_train.core import processes
from summit_train.core.comm import World, choose_backend
from summit_train.core.comm.launch import Launch, node_name
from summit_train.core.errors import RunFailed, UserError, describe
from summit_train.core.files import cache_folder, naming, read_file, take_lock
from summit_train.core.text import counted

ANSWER_S = 120.0  # for one check
NOT_INSTALLED = "not installed; ranks are joined by torch.distributed (torchrun)"


def examine(run_dir: Path, *, alone: bool = True) -> Iterator[Check]:
    """Yield each check when done, after those it depends on. run_dir: for runs. alone: no launcher started us."""
    yield Check("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield check("torch")
    yield check_ranks(os.environ)
    for name, fix in (("horovod", f"{BUILD}; one process alone trains without Horovod"), ("mpi4py", BUILD)):
        yield Check(name, "ok", NOT_INSTALLED) if _is_left_out(name) else check(name, fix)
    yield check_mpi()
    for name in ("kernels", "video", "export", "gpus"):
        yield check(name)
    yield check_cpus()
    yield check_shared_memory()
    yield check_disk("disk for runs", run_dir)
    # Set-up keeps the wheels there that it built.
    try:
        yield check_disk("disk for the cache", cache_folder())
    except OSError as error:
        yield Check("disk for the cache", "fail", describe(error))
    if not alone:
        return
    if not _is_left_out("horovod"):
        yield check_allreduce()
    yield check_torch_allreduce()


def try_start(spec: Path) -> None:
    """Read the spec, and write a mebibyte to the temporary folder that launchers use. Raises OSError."""
    read_file(spec)
    # Python takes another folder where this one is full, as it does where it is missing; a launcher fails.
    folder = os.environ.get("TMPDIR", "/tmp")
    folder = folder if os.path.isdir(folder) else tempfile.gettempdir()
    with naming(folder), tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 20))
        file.flush()


def check(name: str, fix: str = SET_UP, launcher: Sequence[str] = (), comm: str = "auto") -> Check:
    """Run a probe in a process of its own. fix: of one that fails. launcher: starts it as ranks, which `comm` joins."""
    environment = processes.mpi_environment({**os.environ, "SUMMIT_TRAIN_COMM": comm}) if launcher else None
    program = [sys.executable, "-m", "summit_train.cluster.probe", name]
    try:
        return Check(**processes.answer([*launcher, *program], ANSWER_S, environment))
    except RunFailed as error:
        return Check(name, "fail", str(error), fix)


def check_ranks(environ: Mapping[str, str]) -> Check:
    """Name the back end that would join the ranks of a run in this environment, and why."""
    try:
        backend = choose_backend(Launch("mpirun", 0, 2, by_mpi=True), environ)
    except UserError as error:
        found, _, fix = str(error).partition("; ")
        return Check("ranks", "fail", found, fix or "unset SUMMIT_TRAIN_COMM")
    if environ.get("SUMMIT_TRAIN_COMM", "auto") != "auto":
        return Check("ranks", "ok", f"{backend}, by SUMMIT_TRAIN_COMM")
    if backend == "torch":
        return Check("ranks", "ok", "torch: Horovod or mpi4py is not installed")
    return Check("ranks", "ok", "horovod under mpirun, srun --mpi=pmix or jsrun; torch under torchrun or plain srun")


def _is_left_out(package: str) -> bool:
    """True if a package that Horovod needs may be missing: Horovod is missing too, and is not required."""
    needed = os.environ.get("SUMMIT_TRAIN_COMM") == "horovod" or importlib.util.find_spec("horovod") is not None
    return not needed and importlib.util.find_spec(package) is None


def check_mpi() -> Check:
    """Check the mpirun that multi-rank commands use: its path, its version, and whether this user may start ranks."""
    mpirun = processes.find_mpirun()
    if mpirun is None and _is_left_out("horovod"):
        return Check("mpi", "ok", NOT_INSTALLED)
    if mpirun is None:
        return Check("mpi", "fail", "no mpirun", f"load your cluster's MPI module, or {BUILD}")
    found = f"{processes.output([mpirun, '--version']).partition(chr(10))[0]} at {mpirun}"
    if processes.refuses_root(os.environ):
        return Check("mpi", "warn", found, f"{processes.ROOT_NEEDS}: export both, or use another user")
    return Check("mpi", "ok", found)


def check_allreduce() -> Check:
    """Start two ranks with mpirun, which sum 1 and 2 through Horovod and gather through mpi4py."""
    name = "allreduce, 2 ranks"
    mpirun = processes.find_mpirun()
    if mpirun is None:
        return Check(name, "fail", "not tried: no mpirun", BUILD)
    fix = f"fix what fails above; else {BUILD}"
    return replace(check("ranks", fix, processes.mpirun_command(mpirun, 2), "horovod"), name=name)


def check_torch_allreduce() -> Check:
    """Start two ranks with torchrun, which sum 1 and 2 on the CPU. A failure is a warning where Horovod joins ranks."""
    fix = "set GLOO_SOCKET_IFNAME to an interface of this host"
    done = check("ranks", fix, processes.torchrun_command(2), "torch")
    needed = os.environ.get("SUMMIT_TRAIN_COMM") == "torch" or _is_left_out("horovod")
    status = "warn" if done.status == "fail" and not needed else done.status
    return replace(done, name="allreduce, 2 ranks by torch", status=status)


def check_launch(world: World, launch: Launch) -> tuple[Check, list[dict[str, Any]]]:
    """Sum over the ranks of this launch; return what was found and, on rank 0, each rank's node, cores and GPUs."""
    import torch

    total = world.sum(torch.tensor([world.rank + 1.0]), "doctor").item()
    cores = len(os.sched_getaffinity(0))
    gpus = torch.cuda.device_count()
    ranks = world.gather({"node": node_name(os.environ, world.host), "cores": cores, "GPUs": gpus}) or []
    size = counted(world.size, "rank")
    nodes = counted(len({rank["node"] for rank in ranks}), "node")
    found = f"{size} on {nodes} by {launch.launcher}, {world.backend}: the sum is {total:g}"
    right = world.size * (world.size + 1) / 2
    fix = "" if total == right else f"the sum must be {right:g}: the launcher and the ranks need the same MPI"
    return Check("launch", "fail" if fix else "ok", found, fix), ranks


def check_cpus() -> Check:
    """Check the CPUs that this process may use: at least one for each rank (one rank a GPU, else two ranks)."""
    cpus = available_cpus()
    ranks = max(len(listed_gpus()), 2)
    found = f"{cpus:g} for this process: {cpus / ranks:g} a rank with {counted(ranks, 'rank')}"
    if cpus >= ranks:
        return Check("cpus", "ok", found)
    fix = "ranks will share a CPU (mpirun --oversubscribe): ask the scheduler for more, or run fewer ranks"
    return Check("cpus", "warn", found, fix)


def available_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Count CPUs by affinity, limited by a container's quota (cgroup v2's cpu.max, v1's cfs quota)."""
    files = [cgroup / name for name in ("cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")]
    quota = " ".join(path.read_text() for path in files if path.is_file()).split()
    cpus = float(len(os.sched_getaffinity(0)))
    if len(quota) >= 2 and quota[0].isdigit():
        cpus = min(cpus, int(quota[0]) / int(quota[1]))
    return cpus


def check_shared_memory() -> Check:
    """Check the room in shared memory, which the ranks of a host exchange data through."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check("shared memory", "warn", f"no {folder}", "mount a tmpfs there")
    free = shutil.disk_usage(folder).free / GIB
    fix = "give the container more (docker run --shm-size=8g)" if free < 1 else ""
    return Check("shared memory", "warn" if fix else "ok", f"{free:.1f} GiB free in {folder}", fix)


def check_disk(name: str, folder: Path) -> Check:
    """Check the free space where `folder` is or will be made, and that it can be written."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free / GIB
    found = f"{free:.1f} GiB free at {folder}"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check(name, "fail", f"{found}; {there} cannot be written", "choose another place or change its owner")
    try:
        with tempfile.NamedTemporaryFile(dir=there) as file:
            take_lock(file)
    except (OSError, UserError) as error:
        problem, _, fix = str(error).partition("; ")
        return Check(name, "fail", problem, fix)
    if free < 1:
        return Check(name, "fail", found, "free some space: a ResNet-50 checkpoint takes 0.2 GiB")
    return Check(name, "warn" if free < 5 else "ok", found, "little for a long run" if free < 5 else "")


def check_disks(world: World, folder: str) -> list[Check]:
    """Check the free space of a folder on the nodes of this launch; return, on rank 0, each node that has a finding."""
    disk = check_disk("node-local disk", Path(folder))
    disks = dict(world.gather((node_name(os.environ, world.host), asdict(disk))) or [])
    checks = {node: Check(**values) for node, values in disks.items()}
    wrong = [replace(each, found=f"{node}: {each.found}") for node, each in checks.items() if each.status != "ok"]
    return wrong or [disk]
