"""What works on this machine and how to mend what does not.

Every check looks from outside, through package metadata and through short programs in a process of their own: a torch
that cannot be imported or an MPI that ends its process is a finding, and the other checks still run.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from summit_train.cluster.doctor.finding import SET_UP, Check, Finding
from summit_train.cluster.doctor.host import GIB, check_cpus, check_disk, check_shared_memory, listed_gpus
from summit_train.core.comm import WorldError, choose_backend
from summit_train.core.comm.launch import Launch
from summit_train.core.processes import (
    ROOT_NEEDS,
    Facts,
    ProbeError,
    find_mpirun,
    first_line,
    mpi_environment,
    mpirun_command,
    probe,
    refuses_root,
    torchrun_command,
)

NOT_INSTALLED = "not installed; ranks are joined by torch.distributed (torchrun)"
# Data sets have videos of these codecs. The motion set is written by the first encoder that is there.
DECODERS = ("h264", "mpeg4", "vp9", "hevc")
ENCODERS = ("libx264", "mpeg4")
# Matches an MPI's own library among those of a process, and none of its C++ and Fortran libraries.
MPI_LIBRARY = r"/libmpi(?!\w*(cxx|fort|mpifh|usempi))\w*\.so"


def examine(run_dir: Path, timeout: float = 120.0) -> Iterator[Check]:
    """Yield all checks as they are done; a check comes after those that it builds on.

    run_dir: where runs will be written. timeout: seconds for each program that a check starts.
    """
    yield Check("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield check("torch", timeout)
    yield check_ranks()
    for name in ("horovod", "mpi4py"):
        yield Check(name, "ok", NOT_INSTALLED) if _is_left_out(name) else check(name, timeout)
    yield check_mpi()
    for name in ("kernels", "video", "export", "gpus"):
        yield check(name, timeout)
    yield check_cpus()
    yield check_shared_memory()
    yield check_disk("disk for runs", run_dir)
    # Set-up keeps the wheels there that it built.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "summit_train"
    yield check_disk("disk for the cache", cache)
    if not _is_left_out("horovod"):
        yield check_allreduce(timeout)
    yield check_torch_allreduce(timeout)


def check(
    name: str, timeout: float = 120.0, launcher: Sequence[str] = (), more: Mapping[str, str] | None = None
) -> Check:
    """Run PROBES[name], behind the words of a launcher if there are any, and judge its facts.

    timeout: in seconds. more: variables for the ranks.
    """
    program, judge, mend = PROBES[name]
    try:
        facts = probe(program, timeout, launcher, mpi_environment({**os.environ, **(more or {})}) if launcher else None)
    except ProbeError as error:
        return Check(name, "fail", str(error), mend)
    return Check(name, *judge(facts))


def _backend() -> str:
    """Return what would join ranks that MPI knows of. Raises WorldError where SUMMIT_TRAIN_COMM cannot be had."""
    return choose_backend(Launch("mpirun", 0, 2, by_mpi=True), os.environ)


def check_ranks() -> Check:
    """Name what would join the ranks of a run, and why."""
    wish = os.environ.get("SUMMIT_TRAIN_COMM", "auto")
    try:
        backend = _backend()
    except WorldError as error:
        found, _, mend = str(error).partition("; ")
        return Check("ranks", "fail", found, mend or "unset SUMMIT_TRAIN_COMM")
    if wish != "auto":
        return Check("ranks", "ok", f"{backend}, by SUMMIT_TRAIN_COMM")
    if backend == "torch":
        return Check("ranks", "ok", "torch: Horovod or mpi4py is not installed")
    return Check("ranks", "ok", "horovod under mpirun, srun --mpi=pmix or jsrun; torch under torchrun or plain srun")


def _is_left_out(package: str) -> bool:
    """Return whether a package of Horovod's is missing on purpose: Horovod is too, and nobody asks for it."""
    wanted = os.environ.get("SUMMIT_TRAIN_COMM") == "horovod" or importlib.util.find_spec("horovod") is not None
    return not wanted and importlib.util.find_spec(package) is None


def check_mpi() -> Check:
    """Check the mpirun that multi-rank commands use: its path, its version, and whether this user may start ranks."""
    mpirun = find_mpirun()
    if mpirun is None and _is_left_out("horovod"):
        return Check("mpi", "ok", NOT_INSTALLED)
    if mpirun is None:
        return Check("mpi", "fail", "no mpirun", f"load your cluster's MPI module, or {SET_UP}")
    found = f"{first_line([mpirun, '--version'])} at {mpirun}"
    if refuses_root(os.environ):
        return Check("mpi", "warn", found, f"{ROOT_NEEDS}: export both, or use another user")
    return Check("mpi", "ok", found)


_TORCH = """
import torch
print(json.dumps(dict(version=torch.__version__, cuda=torch.version.cuda, threads=torch.get_num_threads(),
    simd=torch.backends.cpu.get_cpu_capability(), onednn=torch.backends.mkldnn.is_available())))
"""


def _judge_torch(facts: Facts) -> Finding:
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU only"
    onednn = "with oneDNN" if facts["onednn"] else "without oneDNN"
    return "ok", f"{facts['version']}, {build}, {facts['simd']}, {onednn}, {facts['threads']} threads", ""


_HOROVOD = """
import torch, horovod, horovod.torch as hvd
print(json.dumps(dict(version=horovod.__version__, mpi=bool(hvd.mpi_built()), nccl=bool(hvd.nccl_built()),
    gpus=torch.cuda.device_count(), torch=torch.__version__)))
"""


def _judge_horovod(facts: Facts) -> Finding:
    """Want Horovod built with MPI, for this torch, and with NCCL where there are GPUs."""
    built_for = _torch_that_horovod_was_built_for()
    parts = ", ".join(name for name in ("mpi", "nccl") if facts[name]).upper() or "neither MPI nor NCCL"
    found = f"{facts['version']}, built with {parts} for torch {built_for}"
    if built_for != facts["torch"]:
        anew = f"remove .venv/.setup and {SET_UP}, which builds Horovod anew"
        return "fail", found, f"torch {facts['torch']} is installed: {anew}"
    if not facts["mpi"]:
        return "fail", found, f"remove .venv and {SET_UP}"
    if facts["gpus"] and not facts["nccl"]:
        through_host = "gradients go through the host: install the CUDA toolkit and NCCL"
        return "warn", found, f"{through_host}, remove .venv/.setup, {SET_UP}"
    return "ok", found, ""


def _torch_that_horovod_was_built_for() -> str:
    """Read the metadata that Horovod's build leaves in the package; "unknown" where it left none."""
    path = Path(str(importlib.metadata.distribution("horovod").locate_file("horovod/metadata.json")))
    return str(json.loads(path.read_text()).get("pytorch", "unknown")) if path.is_file() else "unknown"


_KERNELS = """
from summit_train.models.network import cpu_kernels
print(json.dumps({"kernels": cpu_kernels()}))
"""


def _judge_kernels(facts: Facts) -> Finding:
    if facts["kernels"].startswith("none"):
        return "warn", f"{facts['kernels']}; steps on CPUs take longer", f"install g++ and {SET_UP}"
    return "ok", f"compiled for {facts['kernels']}", ""


# The libraries that a process has mapped show which MPI each package uses.
_MPI4PY = f"""
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
"""


def _judge_mpi4py(facts: Facts) -> Finding:
    """Want one MPI library for mpi4py and Horovod."""
    library = facts["library"].split(",")[0].strip().rstrip("\0")
    found = f"{facts['version']} on {library}" + (f" at {facts['own'][0]}" if facts["own"] else "")
    if len(facts["both"]) <= 1:
        return "ok", found, ""
    found += f"; Horovod uses another MPI: {', '.join(facts['both'])}"
    return "fail", found, f"remove .venv with that MPI loaded and {SET_UP}"


_VIDEO = f"""
import av
def has(name, mode):
    try:
        av.Codec(name, mode)
    except ValueError:
        return False
    return True
print(json.dumps(dict(version=av.__version__, libavcodec=av.library_versions["libavcodec"],
    decoders=[name for name in {DECODERS} if has(name, "r")],
    encoders=[name for name in {ENCODERS} if has(name, "w")])))
"""


def _judge_video(facts: Facts) -> Finding:
    """Want PyAV with the decoders that data sets need, and an encoder for the embedded motion set."""
    libavcodec = ".".join(map(str, facts["libavcodec"]))
    found = (
        f"PyAV {facts['version']}, libavcodec {libavcodec}, decodes {', '.join(facts['decoders'])}, "
        f"encodes {', '.join(facts['encoders']) or 'nothing'}"
    )
    lost = [name for name in DECODERS if name not in facts["decoders"]]
    if lost or not facts["encoders"]:
        lacks = ", ".join(lost) or "an encoder for the motion set"
        return "warn", found, f"it lacks {lacks}: pip install --force-reinstall av"
    return "ok", found, ""


_EXPORT = """
import importlib
versions = {}
for name in ("onnx", "onnxruntime", "onnxscript"):
    try:
        versions[name] = importlib.import_module(name).__version__
    except ImportError:
        versions[name] = None
print(json.dumps(versions))
"""


def _judge_export(facts: Facts) -> Finding:
    """Want what `summit-train export` needs; nothing else needs it."""
    found = ", ".join(f"{name} {version}" for name, version in facts.items() if version)
    missing = [name for name, version in facts.items() if not version]
    if missing:
        return "warn", f"no {', '.join(missing)}", f"to export trained networks: pip install {' '.join(facts)}"
    return "ok", found, ""


_GPUS = """
import torch
devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
nccl = torch.cuda.nccl.version() if devices and torch.distributed.is_nccl_available() else None
print(json.dumps(dict(cuda=torch.version.cuda, archs=torch.cuda.get_arch_list(), nccl=nccl,
    devices=[dict(name=d.name, memory=d.total_memory, capability=[d.major, d.minor]) for d in devices])))
"""


def _judge_gpus(facts: Facts) -> Finding:
    """Want code for every GPU that torch sees, and torch to see every GPU. No GPU at all is fine."""
    devices = facts["devices"]
    if not devices and not (listed := listed_gpus()):
        return "ok", "none; training runs on the CPU", ""
    if not devices:
        mend = f"update the driver to one for CUDA {facts['cuda']}; see CUDA_VISIBLE_DEVICES"
        if facts["cuda"] is None:
            mend = "this torch is built for the CPU: install one for CUDA (make setup TORCH=...)"
        return "warn", f"{listed[0].split(' (UUID')[0]}, which torch does not see", mend
    names = [f"{device['name']} ({device['memory'] / GIB:.0f} GiB)" for device in devices]
    nccl = ".".join(map(str, facts["nccl"])) if facts["nccl"] else "none"
    counted = "; ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    found = f"{counted}; CUDA {facts['cuda']}, NCCL {nccl}"
    unserved = [device["name"] for device in devices if not _serves(facts["archs"], tuple(device["capability"]))]
    if unserved:
        no_code = f"this torch has no code for {unserved[0]} ({', '.join(facts['archs'])})"
        return "fail", found, f"{no_code}: install one that has (TORCH=)"
    return "ok", found, ""


def _serves(archs: Sequence[str], capability: tuple[int, ...]) -> bool:
    """Return whether code for `archs` runs on a device: binaries of its major version, or older intermediate code."""
    for kind, major, minor in re.findall(r"\b(sm|compute)_(\d+)(\d)[af]?\b", " ".join(archs)):
        if (int(major), int(minor)) <= capability and (kind == "compute" or int(major) == capability[0]):
            return True
    return False


_RANKS = "allreduce, 2 ranks"
_ALLREDUCE = """
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


def check_allreduce(timeout: float = 120.0) -> Check:
    """Start two ranks with mpirun, which sum 1 and 2 through Horovod and gather through mpi4py."""
    mpirun = find_mpirun()
    if mpirun is None:
        return Check(_RANKS, "fail", "not tried: no mpirun", SET_UP)
    return check(_RANKS, timeout, mpirun_command(mpirun, 2))


def _judge_allreduce(facts: Facts) -> Finding:
    wanted = {"size": 2, "mpi_size": 2, "total": 3.0, "gathered": [0, 1]}
    if facts != wanted:
        mend = f"mpirun, Horovod and mpi4py are of different MPIs: remove .venv and {SET_UP}"
        return "fail", f"the ranks answered {facts}, not {wanted}", mend
    return "ok", "Horovod's sum and mpi4py's gather are right", ""


_TORCH_RANKS = "allreduce, 2 ranks by torch"
_TORCH_ALLREDUCE = """
import torch
from summit_train.core.comm import open_world
world = open_world()
total = world.sum(torch.tensor([world.rank + 1.0]), "doctor").item()
gathered = world.gather(world.rank)
if world.rank == 0:
    print(json.dumps(dict(backend=world.backend, size=world.size, total=total, gathered=gathered)), flush=True)
world.close()
"""


def check_torch_allreduce(timeout: float = 120.0) -> Check:
    """Start two ranks with torchrun, which sum 1 and 2 on the CPU. A failure is a warning where Horovod joins ranks."""
    done = check(_TORCH_RANKS, timeout, torchrun_command(2), {"SUMMIT_TRAIN_COMM": "torch"})
    spared = os.environ.get("SUMMIT_TRAIN_COMM") != "torch" and not _is_left_out("horovod")
    return replace(done, status="warn") if done.status == "fail" and spared else done


def _judge_torch_allreduce(facts: Facts) -> Finding:
    answer = (facts["size"], facts["total"], facts["gathered"])
    if answer != (2, 3.0, [0, 1]):
        return "fail", f"the ranks answered {answer}, not (2, 3.0, [0, 1])", SET_UP
    return "ok", f"the sum and the gather of {facts['backend']} are right", ""


# name -> (Python program, which prints facts as JSON; what they mean; how to mend a program that fails)
PROBES: dict[str, tuple[str, Callable[[Facts], Finding], str]] = {
    "torch": (_TORCH, _judge_torch, SET_UP),
    "horovod": (_HOROVOD, _judge_horovod, f"{SET_UP}; one process alone trains without Horovod"),
    "kernels": (_KERNELS, _judge_kernels, SET_UP),
    "mpi4py": (_MPI4PY, _judge_mpi4py, SET_UP),
    "video": (_VIDEO, _judge_video, SET_UP),
    "export": (_EXPORT, _judge_export, SET_UP),
    "gpus": (_GPUS, _judge_gpus, SET_UP),
    _TORCH_RANKS: (_TORCH_ALLREDUCE, _judge_torch_allreduce, "set GLOO_SOCKET_IFNAME to an interface of this host"),
    _RANKS: (_ALLREDUCE, _judge_allreduce, f"mend what is wrong above; else remove .venv and {SET_UP}"),
}
