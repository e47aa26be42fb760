"""What doctor tries in a process of its own: `python -m summit_train.cluster.probe NAME` prints a Check as JSON.

Each probe imports what it tries: a package that cannot be imported, or an MPI that ends its process, is a finding of
that process, and the other checks still run.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from summit_train.core.processes import output

Status = Literal["ok", "warn", "fail"]

GIB = 1024**3
SET_UP = "run `make setup`, or install the wheel again"
BUILD = "run `summit-train build-horovod`"
# Matches an MPI's own library among those of a process, and none of its C++ and Fortran libraries.
MPI_LIBRARY = r"/libmpi(?!\w*(cxx|fort|mpifh|usempi))\w*\.so"
CODECS = ("h264", "mpeg4", "vp9", "hevc")  # of the videos in data sets


@dataclass(frozen=True)
class Check:
    """One finding: its subject, whether it works, what was found, and how to fix it ("" when it works)."""

    name: str
    status: Status
    found: str
    fix: str = ""


def probe_torch() -> Check:
    import torch

    from summit_train.core.machine import TESTED_TORCH, untested
    from summit_train.core.text import counted

    cuda = torch.version.cuda
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    parts = [
        torch.__version__,
        f"CUDA {cuda}" if cuda else "CPU only",
        torch.backends.cpu.get_cpu_capability(),
        "with oneDNN" if has_onednn else "without oneDNN",
        counted(torch.get_num_threads(), "thread"),
    ]
    fix = untested(torch.__version__)
    if not fix:
        return Check("torch", "ok", ", ".join(parts))
    fix += f", maybe installed for another package: if a check below fails, pip install 'torch=={TESTED_TORCH[1]}.*'"
    return Check("torch", "warn", ", ".join(parts), fix)


def probe_horovod() -> Check:
    import horovod
    import horovod.torch as hvd
    import torch

    # Horovod's build leaves the version of its torch there.
    build = Path(horovod.__file__).with_name("metadata.json")
    built_for = json.loads(build.read_text()).get("pytorch", "unknown") if build.is_file() else "unknown"
    return judge_horovod(
        version=horovod.__version__,
        mpi=bool(hvd.mpi_built()),
        nccl=bool(hvd.nccl_built()),
        gpus=torch.cuda.device_count(),
        torch=torch.__version__,
        built_for=built_for,
    )


def judge_horovod(*, version: str, mpi: bool, nccl: bool, gpus: int, torch: str, built_for: str) -> Check:
    parts = ", ".join(name for name, is_there in (("MPI", mpi), ("NCCL", nccl)) if is_there) or "neither MPI nor NCCL"
    found = f"{version}, built with {parts} for torch {built_for}"
    if built_for != torch:
        return Check("horovod", "fail", found, f"torch {torch} is installed: {BUILD}")
    if not mpi:
        return Check("horovod", "fail", found, BUILD)
    if gpus and not nccl:
        fix = f"gradients go through the host: install the CUDA toolkit and NCCL, {BUILD}"
        return Check("horovod", "warn", found, fix)
    return Check("horovod", "ok", found)


def probe_mpi4py() -> Check:
    """Compare the MPI libraries that mpi4py maps into the process with those that Horovod adds."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    def libraries() -> list[str]:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        paths = {line.split(maxsplit=5)[-1].strip() for line in lines}
        return sorted(path for path in paths if re.search(MPI_LIBRARY, path))

    own = libraries()
    with suppress(ImportError):
        import horovod.torch  # noqa: F401
    both = libraries()
    library = MPI.Get_library_version().split(",")[0].strip().rstrip("\0")
    found = f"{mpi4py.__version__} on {library}" + (f" at {own[0]}" if own else "")
    if len(both) <= 1:
        return Check("mpi4py", "ok", found)
    found += f"; Horovod uses another MPI: {', '.join(both)}"
    return Check("mpi4py", "fail", found, f"load one MPI and {BUILD}")


def probe_kernels() -> Check:
    from summit_train.models.fast import execution

    kernels = execution()
    if not kernels.startswith("none"):
        return Check("kernels", "ok", f"compiled for {kernels}")
    fix = "install g++; the next command compiles them"
    if "cannot be loaded" in kernels:
        fix = "remove that file; if its file system is mounted noexec, set XDG_CACHE_HOME to a folder on another one"
    return Check("kernels", "warn", f"{kernels}; steps on CPUs take longer", fix)


def probe_video() -> Check:
    import av

    def there(mode: Literal["r", "w"], *names: str) -> list[str]:
        found = []
        for name in names:
            try:
                av.Codec(name, mode)
            except ValueError:
                continue
            found.append(name)
        return found

    decoders = there("r", *CODECS)
    encoders = there("w", "libx264", "mpeg4")  # the motion set is written by the first that is there
    missing = [name for name in CODECS if name not in decoders]
    if not encoders:
        missing.append("an encoder for the motion set")
    libavcodec = ".".join(map(str, av.library_versions["libavcodec"]))
    found = f"PyAV {av.__version__}, libavcodec {libavcodec}, decodes {', '.join(decoders) or 'nothing'}, "
    found += f"encodes {', '.join(encoders) or 'nothing'}"
    if not missing:
        return Check("video", "ok", found)
    return Check("video", "warn", found, f"missing: {', '.join(missing)}; pip install --force-reinstall av")


def probe_export() -> Check:
    """Try the packages of `export`, an extra: without them, or with one that breaks, all else works."""
    found = list[str]()
    bad = list[str]()
    options = ""
    for name in ("onnx", "onnxruntime", "onnxscript"):
        try:
            found.append(f"{name} {importlib.import_module(name).__version__}")
        except (ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError) as error:
            found.append(f"no {name} ({' '.join(str(error).split())})")
            bad.append(name)
            if not isinstance(error, ModuleNotFoundError):
                options = "--force-reinstall "
    fix = f"to export trained networks: pip install {options}{' '.join(bad)}" if bad else ""
    return Check("export", "warn" if bad else "ok", ", ".join(found), fix)


def probe_gpus() -> Check:
    import torch

    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    has_nccl = bool(devices) and torch.distributed.is_nccl_available()
    return judge_gpus(
        devices=[{"name": d.name, "memory": d.total_memory, "capability": (d.major, d.minor)} for d in devices],
        archs=torch.cuda.get_arch_list(),
        cuda=torch.version.cuda,
        nccl=torch.cuda.nccl.version() if has_nccl else None,  # type: ignore[no-untyped-call]
    )


def judge_gpus(
    *, devices: Sequence[Mapping[str, Any]], archs: Sequence[str], cuda: str | None, nccl: Sequence[int] | None
) -> Check:
    listed = [] if devices else listed_gpus()
    if not devices and not listed:
        return Check("gpus", "ok", "none; training runs on the CPU")
    if not devices:
        fix = f"update the driver to one for CUDA {cuda}; see CUDA_VISIBLE_DEVICES"
        if cuda is None:
            fix = "this torch is built for the CPU: install one for CUDA (make setup TORCH=...)"
        return Check("gpus", "warn", f"{listed[0].split(' (UUID')[0]}, which torch does not see", fix)
    names = [f"{device['name']} ({device['memory'] / GIB:.0f} GiB)" for device in devices]
    each = "; ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    found = f"{each}; CUDA {cuda}, NCCL {'.'.join(map(str, nccl)) if nccl else 'none'}"
    # A device runs binaries (sm) of its major version, and older intermediate code (compute).
    known = re.findall(r"\b(sm|compute)_(\d+)(\d)[af]?\b", " ".join(archs))
    for device in devices:
        own = tuple(device["capability"])
        if not any((int(a), int(b)) <= own and (kind == "compute" or int(a) == own[0]) for kind, a, b in known):
            no_code = f"this torch has no code for {device['name']} ({', '.join(archs)})"
            return Check("gpus", "fail", found, f"{no_code}: install one that has (TORCH=)")
    return Check("gpus", "ok", found)


def listed_gpus() -> list[str]:
    """Return the driver's own list of GPUs, a line each; empty without a driver."""
    return [line for line in output(["nvidia-smi", "--list-gpus"]).splitlines() if line.startswith("GPU ")]


def probe_ranks() -> Check | None:
    """Sum 1 and 2 over two ranks, which SUMMIT_TRAIN_COMM joins, and gather. None on the second rank."""
    import torch

    from summit_train.core.comm import open_world

    world = open_world()
    total = world.sum(torch.tensor([world.rank + 1.0]), "doctor").item()
    gathered = world.gather(world.rank)
    world.close()
    if gathered is None:
        return None
    by_mpi = os.environ.get("SUMMIT_TRAIN_COMM") == "horovod"
    by = "Horovod and mpi4py" if by_mpi else world.backend
    answered = {"size": world.size, "total": total, "gathered": gathered}
    right = {"size": 2, "total": 3.0, "gathered": [0, 1]}
    if answered == right:
        return Check("ranks", "ok", f"the sum and the gather of {by} are right")
    fix = f"mpirun, Horovod and mpi4py are of different MPIs: {BUILD}" if by_mpi else SET_UP
    return Check("ranks", "fail", f"the ranks answered {answered}, not {right}", fix)


PROBES: dict[str, Callable[[], Check | None]] = {
    "torch": probe_torch,
    "horovod": probe_horovod,
    "mpi4py": probe_mpi4py,
    "kernels": probe_kernels,
    "video": probe_video,
    "export": probe_export,
    "gpus": probe_gpus,
    "ranks": probe_ranks,
}


def main(name: str) -> None:
    check = PROBES[name]()
    if check is not None:
        print(json.dumps(asdict(check)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
