"""Check what works on this machine, and say how to fix what does not.

Packages are tried by short programs in processes of their own: if torch cannot be imported or MPI ends its process,
that is a finding, and the other checks still run.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from summit_train.core import processes
from summit_train.core.comm import World, choose_backend
from summit_train.core.comm.launch import Launch, node_name
from summit_train.core.errors import RunFailed, UserError, describe
from summit_train.core.files import cache_folder, naming, read_file, take_lock
from summit_train.core.text import counted

Status = Literal["ok", "warn", "fail"]
Finding = tuple[Status, str, str]  # the last three fields of a Check

GIB = 1024**3
ANSWER_S = 120.0  # for one check
SET_UP = "run `make setup`, or install the wheel again"
BUILD = "run `summit-train build-horovod`"
NOT_INSTALLED = "not installed; ranks are joined by torch.distributed (torchrun)"
# Matches an MPI's own library among those of a process, and none of its C++ and Fortran libraries.
MPI_LIBRARY = r"/libmpi(?!\w*(cxx|fort|mpifh|usempi))\w*\.so"


@dataclass(frozen=True)
class Check:
    """One finding: its subject, whether it works, what was found, and how to fix it ("" when it works)."""

    name: str
    status: Status
    found: str
    fix: str = ""


def examine(run_dir: Path, *, alone: bool = True) -> Iterator[Check]:
    """Yield each check when done, after those it depends on. run_dir: for runs. alone: no launcher started us."""
    yield Check("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield check("torch")
    yield check_ranks(os.environ)
    for name in ("horovod", "mpi4py"):
        yield Check(name, "ok", NOT_INSTALLED) if _is_left_out(name) else check(name)
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


class Probe(NamedTuple):
    """A program in Python that prints facts as JSON, what they mean, and how to fix a program that fails."""

    program: str
    judge: Callable[[processes.Facts], Finding] = lambda facts: (facts["status"], facts["found"], facts["fix"])
    fix: str = SET_UP


def check(name: str, launcher: Sequence[str] = (), more: Mapping[str, str] | None = None) -> Check:
    """Run PROBES[name], under a launcher if one is given, and judge its facts. more: the ranks' further environment."""
    environment = processes.mpi_environment({**os.environ, **(more or {})}) if launcher else None
    try:
        program = [sys.executable, "-c", f"import json\n{PROBES[name].program}"]
        facts = processes.answer([*launcher, *program], ANSWER_S, environment)
    except RunFailed as error:
        return Check(name, "fail", str(error), PROBES[name].fix)
    return Check(name, *PROBES[name].judge(facts))


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
    """Return whether a package that Horovod needs may be missing: Horovod is missing too, and is not asked for."""
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
    mpirun = processes.find_mpirun()
    if mpirun is None:
        return Check(_RANKS, "fail", "not tried: no mpirun", BUILD)
    return check(_RANKS, processes.mpirun_command(mpirun, 2))


def check_torch_allreduce() -> Check:
    """Start two ranks with torchrun, which sum 1 and 2 on the CPU. A failure is a warning where Horovod joins ranks."""
    done = check(_TORCH_RANKS, processes.torchrun_command(2), {"SUMMIT_TRAIN_COMM": "torch"})
    needed = os.environ.get("SUMMIT_TRAIN_COMM") == "torch" or _is_left_out("horovod")
    return replace(done, status="warn") if done.status == "fail" and not needed else done


def check_launch(world: World, launch: Launch) -> tuple[Check, list[dict[str, Any]]]:
    """Sum over the ranks of this launch; return what was found and, on rank 0, each rank's node, cores and GPUs."""
    import torch

    total = world.sum(torch.tensor([world.rank + 1.0]), "doctor").item()
    cores, gpus = len(os.sched_getaffinity(0)), torch.cuda.device_count()
    ranks = world.gather({"node": node_name(os.environ, world.host), "cores": cores, "GPUs": gpus}) or []
    size, nodes = counted(world.size, "rank"), counted(len({rank["node"] for rank in ranks}), "node")
    found = f"{size} on {nodes} by {launch.launcher}, {world.backend}: the sum is {total:g}"
    right = world.size * (world.size + 1) / 2
    fix = "" if total == right else f"the sum must be {right:g}: the launcher and the ranks need the same MPI"
    return Check("launch", "fail" if fix else "ok", found, fix), ranks


def check_cpus() -> Check:
    """Check the CPUs that this process may use: at least one for each rank (one rank a GPU, else two ranks)."""
    cpus, ranks = available_cpus(), max(len(listed_gpus()), 2)
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


def listed_gpus() -> list[str]:
    """Return the driver's own list of GPUs, a line each; empty without a driver."""
    return [line for line in processes.output(["nvidia-smi", "--list-gpus"]).splitlines() if line.startswith("GPU ")]


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


def _judge_horovod(facts: processes.Facts) -> Finding:
    parts = ", ".join(name for name in ("mpi", "nccl") if facts[name]).upper() or "neither MPI nor NCCL"
    found = f"{facts['version']}, built with {parts} for torch {facts['built_for']}"
    if facts["built_for"] != facts["torch"]:
        return "fail", found, f"torch {facts['torch']} is installed: {BUILD}"
    if not facts["mpi"]:
        return "fail", found, BUILD
    if facts["gpus"] and not facts["nccl"]:
        return "warn", found, f"gradients go through the host: install the CUDA toolkit and NCCL, {BUILD}"
    return "ok", found, ""


def _judge_mpi4py(facts: processes.Facts) -> Finding:
    library = facts["library"].split(",")[0].strip().rstrip("\0")
    found = f"{facts['version']} on {library}" + (f" at {facts['own'][0]}" if facts["own"] else "")
    if len(facts["both"]) <= 1:
        return "ok", found, ""
    found += f"; Horovod uses another MPI: {', '.join(facts['both'])}"
    return "fail", found, f"load one MPI and {BUILD}"


def _judge_gpus(facts: processes.Facts) -> Finding:
    devices = facts["devices"]
    if not devices and not (listed := listed_gpus()):
        return "ok", "none; training runs on the CPU", ""
    if not devices:
        fix = f"update the driver to one for CUDA {facts['cuda']}; see CUDA_VISIBLE_DEVICES"
        if facts["cuda"] is None:
            fix = "this torch is built for the CPU: install one for CUDA (make setup TORCH=...)"
        return "warn", f"{listed[0].split(' (UUID')[0]}, which torch does not see", fix
    names = [f"{device['name']} ({device['memory'] / GIB:.0f} GiB)" for device in devices]
    nccl = ".".join(map(str, facts["nccl"])) if facts["nccl"] else "none"
    each = "; ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    found = f"{each}; CUDA {facts['cuda']}, NCCL {nccl}"
    # A device runs binaries (sm) of its major version, and older intermediate code (compute).
    archs = re.findall(r"\b(sm|compute)_(\d+)(\d)[af]?\b", " ".join(facts["archs"]))
    for device in devices:
        own = tuple(device["capability"])
        if not any((int(a), int(b)) <= own and (kind == "compute" or int(a) == own[0]) for kind, a, b in archs):
            no_code = f"this torch has no code for {device['name']} ({', '.join(facts['archs'])})"
            return "fail", found, f"{no_code}: install one that has (TORCH=)"
    return "ok", found, ""


def _judge_allreduce(facts: processes.Facts) -> Finding:
    by = facts.pop("by")
    right = {"size": 2, "total": 3.0, "gathered": [0, 1]}
    if facts == right:
        return "ok", f"the sum and the gather of {by} are right", ""
    fix = f"mpirun, Horovod and mpi4py are of different MPIs: {BUILD}" if "mpi4py" in by else SET_UP
    return "fail", f"the ranks answered {facts}, not {right}", fix


_RANKS, _TORCH_RANKS = "allreduce, 2 ranks", "allreduce, 2 ranks by torch"
PROBES = {
    "torch": Probe(
        """
import torch
from summit_train.core.machine import TESTED_TORCH, untested
from summit_train.core.text import counted
cuda, onednn = torch.version.cuda, torch.backends.mkldnn.is_available()
found = [torch.__version__, f"CUDA {cuda}" if cuda else "CPU only", torch.backends.cpu.get_cpu_capability(),
    "with oneDNN" if onednn else "without oneDNN", counted(torch.get_num_threads(), "thread")]
fix = untested(torch.__version__)
if fix:
    fix += f", maybe installed for another package: if a check below fails, pip install 'torch=={TESTED_TORCH[1]}.*'"
print(json.dumps(dict(status="warn" if fix else "ok", found=", ".join(found), fix=fix)))
"""
    ),
    # Horovod's build leaves the version of its torch in metadata.json.
    "horovod": Probe(
        """
import pathlib, torch, horovod, horovod.torch as hvd
build = pathlib.Path(horovod.__file__).with_name("metadata.json")
built_for = json.loads(build.read_text()).get("pytorch", "unknown") if build.is_file() else "unknown"
print(json.dumps(dict(version=horovod.__version__, mpi=bool(hvd.mpi_built()), nccl=bool(hvd.nccl_built()),
    gpus=torch.cuda.device_count(), torch=torch.__version__, built_for=built_for)))
""",
        _judge_horovod,
        f"{BUILD}; one process alone trains without Horovod",
    ),
    "kernels": Probe(
        """
from summit_train.models.fast import execution
kernels = execution()
finding = ("ok", f"compiled for {kernels}", "")
if kernels.startswith("none"):
    fix = "install g++; the next command compiles them"
    if "cannot be loaded" in kernels:
        fix = "remove that file; if its file system is mounted noexec, set XDG_CACHE_HOME to a folder on another one"
    finding = ("warn", f"{kernels}; steps on CPUs take longer", fix)
print(json.dumps(dict(zip(("status", "found", "fix"), finding))))
"""
    ),
    # The libraries that a process has mapped show which MPI each package uses.
    "mpi4py": Probe(
        f"""
import re, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
def libraries():
    paths = {{line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps")}}
    return sorted(path for path in paths if re.search({MPI_LIBRARY!r}, path))
own = libraries()
try:
    import horovod.torch
except ImportError:
    pass
print(json.dumps(dict(version=mpi4py.__version__, library=MPI.Get_library_version(), own=own, both=libraries())))
""",
        _judge_mpi4py,
        BUILD,
    ),
    # Data sets have videos of these codecs. The motion set is written by the first encoder that is there.
    "video": Probe(
        """
import av
def there(mode, *names):
    found = []
    for name in names:
        try:
            av.Codec(name, mode)
            found.append(name)
        except ValueError:
            pass
    return found
wanted = ("h264", "mpeg4", "vp9", "hevc")
decoders, encoders = there("r", *wanted), there("w", "libx264", "mpeg4")
libavcodec = ".".join(map(str, av.library_versions["libavcodec"]))
missing = [name for name in wanted if name not in decoders] + ([] if encoders else ["an encoder for the motion set"])
print(json.dumps(dict(status="warn" if missing else "ok",
    found=f"PyAV {av.__version__}, libavcodec {libavcodec}, decodes {', '.join(decoders) or 'nothing'}, "
        f"encodes {', '.join(encoders) or 'nothing'}",
    fix=f"missing: {', '.join(missing)}; pip install --force-reinstall av" if missing else "")))
"""
    ),
    # An extra: without it, or with a package that breaks, all else works.
    "export": Probe(
        """
import importlib
found, bad, options = [], [], ""
for name in ("onnx", "onnxruntime", "onnxscript"):
    try:
        found.append(f"{name} {importlib.import_module(name).__version__}")
    except Exception as error:
        found.append(f"no {name} ({' '.join(str(error).split())})")
        bad.append(name)
        if not isinstance(error, ModuleNotFoundError):
            options = "--force-reinstall "
print(json.dumps(dict(status="warn" if bad else "ok", found=", ".join(found),
    fix=f"to export trained networks: pip install {options}{' '.join(bad)}" if bad else "")))
"""
    ),
    "gpus": Probe(
        """
import torch
devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
nccl = torch.cuda.nccl.version() if devices and torch.distributed.is_nccl_available() else None
print(json.dumps(dict(cuda=torch.version.cuda, archs=torch.cuda.get_arch_list(), nccl=nccl,
    devices=[dict(name=d.name, memory=d.total_memory, capability=[d.major, d.minor]) for d in devices])))
""",
        _judge_gpus,
    ),
    _RANKS: Probe(
        """
from mpi4py import MPI
import torch, horovod.torch as hvd
hvd.init()
world = MPI.COMM_WORLD
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum, name="doctor").item()
gathered = world.gather(hvd.rank(), root=0)
if world.rank == 0:
    print(json.dumps(dict(by="Horovod and mpi4py", size=hvd.size(), total=total, gathered=gathered)))
hvd.shutdown()
""",
        _judge_allreduce,
        f"fix what fails above; else {BUILD}",
    ),
    _TORCH_RANKS: Probe(
        """
import torch
from summit_train.core.comm import open_world
world = open_world()
total = world.sum(torch.tensor([world.rank + 1.0]), "doctor").item()
gathered = world.gather(world.rank)
if world.rank == 0:
    print(json.dumps(dict(by=world.backend, size=world.size, total=total, gathered=gathered)), flush=True)
world.close()
""",
        _judge_allreduce,
        "set GLOO_SOCKET_IFNAME to an interface of this host",
    ),
}
