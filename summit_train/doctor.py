"""What works on this machine and how to mend what does not.

Every check looks from outside, through package metadata and through short programs in a process of their own: a
torch that cannot be imported or an MPI that ends its process is a finding, not the end of the doctor.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from summit_train.processes import (
    Facts,
    ProbeError,
    find_mpirun,
    first_line,
    mpi_environment,
    mpirun_command,
    output,
    probe,
)

Status = Literal["ok", "warn", "fail"]

SET_UP = "run `make setup`"
GIB = 1024**3
# Videos that data sets are made of come in these; the motion set is written by the first encoder that is there.
DECODERS = ("h264", "mpeg4", "vp9", "hevc")
ENCODERS = ("libx264", "mpeg4")


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, whether it works, what was found, and how to mend it ("" when it works)."""

    name: str
    status: Status
    found: str
    mend: str = ""


def examine(run_dir: Path, timeout: float = 120.0) -> Iterator[Check]:
    """All checks, in the order in which their subjects build on each other; each is yielded when it is done.

    run_dir: where runs will be written. timeout: seconds for each program that a check starts.
    """
    checks: Sequence[Callable[[], Check]] = (
        check_python,
        lambda: check_torch(timeout),
        lambda: check_horovod(timeout),
        lambda: check_kernels(timeout),
        check_mpi,
        lambda: check_mpi4py(timeout),
        lambda: check_video(timeout),
        lambda: check_gpus(timeout),
        check_cpus,
        check_shared_memory,
        lambda: check_disk("disk for runs", run_dir),
        lambda: check_disk("disk for the cache", cache_folder()),
        lambda: check_allreduce(timeout),
    )
    return (check() for check in checks)


# ------------------------------------------------------------------------------------------------ the software


def check_python() -> Check:
    """The interpreter's version and place."""
    version = ".".join(map(str, sys.version_info[:3]))
    found = f"{version} at {sys.executable}"
    return Check("python", "ok", found)


TORCH_PROGRAM = """
import torch
print(json.dumps(dict(version=torch.__version__, cuda=torch.version.cuda, threads=torch.get_num_threads(),
    simd=torch.backends.cpu.get_cpu_capability(), onednn=torch.backends.mkldnn.is_available())))
"""


def check_torch(timeout: float = 120.0) -> Check:
    """PyTorch's version, what it was built for, and its threads."""
    try:
        facts = probe(TORCH_PROGRAM, timeout)
    except ProbeError as error:
        return Check("torch", "fail", str(error), SET_UP)
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU only"
    onednn = "with oneDNN" if facts["onednn"] else "without oneDNN"
    found = f"{facts['version']}, {build}, {facts['simd']}, {onednn}, {facts['threads']} threads"
    return Check("torch", "ok", found)


HOROVOD_PROGRAM = """
import torch, horovod, horovod.torch as hvd
print(json.dumps(dict(version=horovod.__version__, mpi=bool(hvd.mpi_built()), nccl=bool(hvd.nccl_built()),
    gpus=torch.cuda.device_count(), torch=torch.__version__)))
"""


def check_horovod(timeout: float = 120.0) -> Check:
    """Horovod, and that it was built with MPI, for this torch, and with NCCL where there are GPUs."""
    try:
        facts = probe(HOROVOD_PROGRAM, timeout)
    except ProbeError as error:
        return Check("horovod", "fail", str(error), f"{SET_UP}; one process alone trains without Horovod")
    built_for = _torch_that_horovod_was_built_for()
    parts = [name for name in ("mpi", "nccl") if facts[name]]
    found = f"{facts['version']}, built with {', '.join(parts).upper() or 'neither MPI nor NCCL'} for torch {built_for}"
    if built_for != facts["torch"]:
        mend = f"torch {facts['torch']} is installed: remove .venv/.setup and {SET_UP}, which builds Horovod anew"
        return Check("horovod", "fail", found, mend)
    if not facts["mpi"]:
        return Check("horovod", "fail", found, f"remove .venv and {SET_UP}")
    if facts["gpus"] and not facts["nccl"]:
        mend = "gradients go through the host: install the CUDA toolkit and NCCL, remove .venv/.setup, " + SET_UP
        return Check("horovod", "warn", found, mend)
    return Check("horovod", "ok", found)


def _torch_that_horovod_was_built_for() -> str:
    """From the metadata that Horovod's build leaves in the package; "unknown" where it left none."""
    path = Path(str(importlib.metadata.distribution("horovod").locate_file("horovod/metadata.json")))
    if not path.is_file():
        return "unknown"
    return str(json.loads(path.read_text()).get("pytorch", "unknown"))


def check_kernels(timeout: float = 120.0) -> Check:
    """The C++ kernels for CPUs; without them PyTorch's operators do the same in more passes over memory."""
    try:
        found = str(probe(KERNELS_PROGRAM, timeout)["kernels"])
    except ProbeError as error:
        return Check("kernels", "fail", str(error), SET_UP)
    if found.startswith("none"):
        return Check("kernels", "warn", f"{found}; steps on CPUs take longer", f"install g++ and {SET_UP}")
    return Check("kernels", "ok", f"compiled for {found}")


def check_mpi() -> Check:
    """The mpirun that multi-rank commands use, and its version."""
    mpirun = find_mpirun()
    if mpirun is None:
        return Check("mpi", "fail", "no mpirun", f"load your cluster's MPI module, or {SET_UP}")
    return Check("mpi", "ok", f"{first_line([mpirun, '--version'])} at {mpirun}")


# An MPI's own library among those of a process; its C++ and Fortran libraries stand beside it.
MPI_LIBRARY = r"/libmpi(?!\w*(cxx|fort|mpifh|usempi))\w*\.so"
# The libraries that a process has mapped tell which MPI each package really uses.
MPI4PY_PROGRAM = """
import re, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
def libraries():
    paths = {line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps")}
    return sorted(path for path in paths if re.search(MPI_LIBRARY, path))
own = libraries()
try:
    import horovod.torch
except ImportError:
    pass
print(json.dumps(dict(version=mpi4py.__version__, library=MPI.Get_library_version(), own=own, both=libraries())))
"""


def check_mpi4py(timeout: float = 120.0) -> Check:
    """mpi4py, and that it uses the same MPI library as Horovod."""
    try:
        facts = probe(f"MPI_LIBRARY = {MPI_LIBRARY!r}\n{MPI4PY_PROGRAM}", timeout)
    except ProbeError as error:
        return Check("mpi4py", "fail", str(error), SET_UP)
    library = facts["library"].split(",")[0].strip().rstrip("\0")
    found = f"{facts['version']} on {library}" + (f" at {facts['own'][0]}" if facts["own"] else "")
    if len(facts["both"]) > 1:
        mend = "remove .venv with that MPI loaded and " + SET_UP
        return Check("mpi4py", "fail", f"{found}; Horovod uses another MPI: {', '.join(facts['both'])}", mend)
    return Check("mpi4py", "ok", found)


VIDEO_PROGRAM = """
import av
def has(name, mode):
    try:
        av.Codec(name, mode)
    except ValueError:
        return False
    return True
print(json.dumps(dict(version=av.__version__, libavcodec=av.library_versions["libavcodec"],
    decoders=[name for name in DECODERS if has(name, "r")], encoders=[name for name in ENCODERS if has(name, "w")])))
"""


def check_video(timeout: float = 120.0) -> Check:
    """PyAV, the decoders that data sets need, and an encoder for the embedded motion set."""
    try:
        facts = probe(f"DECODERS, ENCODERS = {DECODERS}, {ENCODERS}\n{VIDEO_PROGRAM}", timeout)
    except ProbeError as error:
        return Check("video", "fail", str(error), SET_UP)
    libavcodec = ".".join(map(str, facts["libavcodec"]))
    found = (
        f"PyAV {facts['version']}, libavcodec {libavcodec}, decodes {', '.join(facts['decoders'])}, "
        f"encodes {', '.join(facts['encoders']) or 'nothing'}"
    )
    lost = [name for name in DECODERS if name not in facts["decoders"]]
    if lost or not facts["encoders"]:
        lacks = ", ".join(lost) or "an encoder for the motion set"
        return Check("video", "warn", found, f"it lacks {lacks}: pip install --force-reinstall av")
    return Check("video", "ok", found)


# ------------------------------------------------------------------------------------------------- the machine


GPU_PROGRAM = """
import torch
devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
nccl = torch.cuda.nccl.version() if devices and torch.distributed.is_nccl_available() else None
print(json.dumps(dict(cuda=torch.version.cuda, archs=torch.cuda.get_arch_list(), nccl=nccl,
    devices=[dict(name=d.name, memory=d.total_memory, capability=[d.major, d.minor]) for d in devices])))
"""


def check_gpus(timeout: float = 120.0) -> Check:
    """The GPUs that torch sees, that it has code for them, and its NCCL; none at all is fine."""
    try:
        facts = probe(GPU_PROGRAM, timeout)
    except ProbeError as error:
        return Check("gpus", "fail", str(error), SET_UP)
    if facts["devices"]:
        return _judge_gpus(facts)
    listed = first_line(["nvidia-smi", "--list-gpus"])
    if not listed.startswith("GPU "):
        return Check("gpus", "ok", "none; training runs on the CPU")
    found = f"{listed.split(' (UUID')[0]}, which torch does not see"
    mend = f"update the driver to one for CUDA {facts['cuda']}; see CUDA_VISIBLE_DEVICES"
    if facts["cuda"] is None:
        mend = "this torch is built for the CPU: install one for CUDA (make setup TORCH=...)"
    return Check("gpus", "warn", found, mend)


def _judge_gpus(facts: Facts) -> Check:
    devices = facts["devices"]
    names = [f"{device['name']} ({device['memory'] / GIB:.0f} GiB)" for device in devices]
    nccl = ".".join(map(str, facts["nccl"])) if facts["nccl"] else "none"
    counted = "; ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    found = f"{counted}; CUDA {facts['cuda']}, NCCL {nccl}"
    unserved = [d["name"] for d in devices if not _serves(facts["archs"], *d["capability"])]
    if unserved:
        mend = f"this torch has no code for {unserved[0]} ({', '.join(facts['archs'])}): install one that has (TORCH=)"
        return Check("gpus", "fail", found, mend)
    return Check("gpus", "ok", found)


def _serves(archs: Sequence[str], major: int, minor: int) -> bool:
    """Whether binaries for `archs` run on a device: the same major version, or intermediate code that is older."""
    pairs = [match for arch in archs if (match := re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", arch))]
    binaries = [(int(m[2]), int(m[3])) for m in pairs if m[1] == "sm"]
    intermediate = [(int(m[2]), int(m[3])) for m in pairs if m[1] == "compute"]
    return any(have[0] == major and have[1] <= minor for have in binaries) or any(
        have <= (major, minor) for have in intermediate
    )


def check_cpus() -> Check:
    """CPUs that this process may use, and how many that leaves each rank (one rank a GPU, else two ranks)."""
    cpus = available_cpus()
    ranks = max(_count_gpus(), 2)
    found = f"{cpus:g} for this process: {cpus / ranks:g} a rank with {ranks} ranks"
    if cpus < ranks:
        mend = "ranks will share a CPU (mpirun --oversubscribe): ask the scheduler for more, or run fewer ranks"
        return Check("cpus", "warn", found, mend)
    return Check("cpus", "ok", found)


def available_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """CPUs by affinity, cut down by a container's quota (cgroup v2's cpu.max, v1's cfs quota)."""
    cpus = float(len(os.sched_getaffinity(0)))
    quota = _words(cgroup / "cpu.max") or (
        _words(cgroup / "cpu/cpu.cfs_quota_us") + _words(cgroup / "cpu/cpu.cfs_period_us")
    )
    if len(quota) == 2 and quota[0].isdigit():
        cpus = min(cpus, int(quota[0]) / int(quota[1]))
    return cpus


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []


def _count_gpus() -> int:
    return sum(line.startswith("GPU ") for line in output(["nvidia-smi", "--list-gpus"]).splitlines())


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    """Room in shared memory, through which loader workers and the ranks of one host hand over data."""
    if not folder.is_dir():
        return Check("shared memory", "warn", f"no {folder}", "run with data.workers=0")
    free = shutil.disk_usage(folder).free / GIB
    found = f"{free:.1f} GiB free in {folder}"
    if free < 1:
        return Check("shared memory", "warn", found, "give the container more (docker run --shm-size=8g)")
    return Check("shared memory", "ok", found)


def check_disk(name: str, folder: Path) -> Check:
    """Free space where `folder` is or will be made, and that it can be written."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free / GIB
    found = f"{free:.1f} GiB free at {folder}"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check(name, "fail", f"{found}; {there} cannot be written", "choose another place or change its owner")
    if free < 1:
        return Check(name, "fail", found, "free some space: a ResNet-50 checkpoint takes 0.2 GiB")
    return Check(name, "warn" if free < 5 else "ok", found, "little for a long run" if free < 5 else "")


def cache_folder() -> Path:
    """Where set-up keeps the wheels it built: ${XDG_CACHE_HOME:-~/.cache}/summit_train."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "summit_train"


# --------------------------------------------------------------------------------------------------- two ranks


KERNELS_PROGRAM = """
from summit_train.network import cpu_kernels
print(json.dumps({"kernels": cpu_kernels()}))
"""

ALLREDUCE_PROGRAM = """
from mpi4py import MPI
import torch, horovod.torch as hvd
hvd.init()
world = MPI.COMM_WORLD
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum, name="doctor").item()
gathered = world.gather(hvd.rank(), root=0)
if world.rank == 0:
    print(json.dumps(dict(size=hvd.size(), mpi_size=world.size, total=total, gathered=gathered)))
hvd.shutdown()
"""


def check_allreduce(timeout: float = 120.0, ranks: int = 2) -> Check:
    """Start `ranks` ranks with mpirun; they sum up 1..ranks through Horovod and gather through mpi4py."""
    name = f"allreduce, {ranks} ranks"
    mpirun = find_mpirun()
    if mpirun is None:
        return Check(name, "fail", "not tried: no mpirun", SET_UP)
    try:
        facts = probe(ALLREDUCE_PROGRAM, timeout, mpirun_command(mpirun, ranks), mpi_environment(os.environ))
    except ProbeError as error:
        return Check(name, "fail", str(error), f"mend what is wrong above; else remove .venv and {SET_UP}")
    wanted = {"size": ranks, "mpi_size": ranks, "total": ranks * (ranks + 1) / 2, "gathered": list(range(ranks))}
    if facts != wanted:
        mend = "mpirun, Horovod and mpi4py are of different MPIs: remove .venv and " + SET_UP
        return Check(name, "fail", f"the ranks answered {facts}, not {wanted}", mend)
    return Check(name, "ok", "Horovod's sum and mpi4py's gather are right")
