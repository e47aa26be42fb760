"""The C++ kernels as a library: compiled when first needed, kept in the user's cache, loaded from there.

Set-up compiles them, so that jobs need no compiler. Nodes of one cluster may differ, so there is one library for each
level of x86-64 (System V ABI, section 3.1.1); a processor takes the best available one that it supports. On other
architectures there is one for each kind of processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from summit_train.core import machine
from summit_train.core.errors import RunFailed

SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = ("-std=c++20", "-O3", "-fopenmp", "-fPIC", "-shared")
_COMPILERS = ("c++", "g++", "clang++")
_PATIENCE_S = 120
# Best first, with the flags of /proc/cpuinfo that a level has beyond what every x86-64 has.
_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
}
_X86 = (*_LEVELS, "x86-64")


@dataclass(frozen=True)
class Kernels:
    """A library that is loaded, and the kind of processor that it was compiled for."""

    library: ctypes.CDLL
    target: str


@cache
def kernels() -> Kernels | RunFailed:
    """The library, or why there is none; asked once a process."""
    fitting = targets()
    for target in fitting:
        path = library_file(target)
        if path.is_file():
            return _loaded(path, target)
    try:
        return _loaded(compiled(fitting[0]), fitting[0])
    except RunFailed as error:
        return error


def targets() -> list[str]:
    """Return what to compile for, the best that this processor supports first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return [platform.machine()]
    known = machine.instruction_sets()
    fits = [level for i, level in enumerate(_LEVELS) if all(known >= flags for flags in list(_LEVELS.values())[i:])]
    return [*fits, "x86-64"]


def library_file(target: str) -> Path:
    """Where the library for a target is kept: a name that changes with all that it is made from."""
    words = " ".join([*_FLAGS, *platform.libc_ver(), *([] if target in _X86 else [machine.processor_digest()])])
    key = hashlib.sha256(SOURCE.read_bytes() + b"\0" + words.encode()).hexdigest()[:16]
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache_home / "summit_train" / "kernels" / f"{key}-{target}.so"


def compiled(target: str) -> Path:
    """The library for a target, compiled if it is not there; whole or not at all.

    The compiler is CXX or the first on PATH. Raises RunFailed with what it said.
    """
    path = library_file(target)
    if path.is_file():
        return path
    names = [os.environ["CXX"]] if os.environ.get("CXX") else _COMPILERS
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise RunFailed(f"no compiler on PATH among {', '.join(names)}")
    processor_option = "-mcpu" if target.startswith("ppc") else "-march"
    command = [compiler, *_FLAGS, f"{processor_option}={target if target in _X86 else 'native'}", str(SOURCE), "-o"]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder, path.name)
            _run([*command, str(made)])
            made.replace(path)
    except OSError as error:
        raise RunFailed(f"{path.parent} cannot be written: {error.strerror}") from error
    return path


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"{command[0]} took longer than {_PATIENCE_S} s") from error
    if done.returncode != 0:
        said = next((line for line in done.stderr.splitlines() if "error" in line), f"exit status {done.returncode}")
        raise RunFailed(f"{command[0]} cannot compile {SOURCE.name}: {said}")


def _loaded(path: Path, target: str) -> Kernels:
    try:
        # After torch, whose OpenMP it then shares: a second one would have threads of its own.
        return Kernels(ctypes.CDLL(str(path)), target)
    except OSError as error:
        raise RunFailed(f"{path} cannot be loaded: {error}; remove it to compile it again") from error


def compile_for_cluster() -> None:
    """Compile for this machine, and for the level below, for older nodes. Raises RunFailed."""
    for target in targets()[:2]:
        compiled(target)
