"""The C++ kernels for CPUs, called with tensors: channels last, in fp32, fp64 or bf16.

They are compiled when first needed, by one of several processes, kept in the user's cache, and loaded from there.
Set-up compiles them, so that jobs need no compiler. Nodes of one cluster may differ, so there is one library for each
level of x86-64 (System V ABI, section 3.1.1); a processor takes the best available one that it supports. On other
architectures there is one for each kind of processor.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from summit_train.core import machine
from summit_train.core.comm.launch import this_launch
from summit_train.core.errors import RunFailed
from summit_train.core.files import cache_folder, locked
from summit_train.core.result import tell

SOURCE = Path(__file__).with_name("native") / "kernels.cpp"
_FLAGS = ("-std=c++20", "-O3", "-fopenmp", "-fPIC", "-shared")
_COMPILERS = ("c++", "g++", "clang++")
_PATIENCE_S = 120
_SECONDS_BETWEEN_LOOKS = 0.5
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems without locks, Lustre's perhaps
# Best first, with the flags of /proc/cpuinfo that a level has beyond what every x86-64 has.
_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
}
_X86 = (*_LEVELS, "x86-64")
_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}


class Kernels(NamedTuple):
    """A library that is loaded, and the kind of processor that it was compiled for."""

    library: ctypes.CDLL
    target: str


@cache
def loaded() -> Kernels | RunFailed:
    """Return the library, compiled if none is kept, or why there is none."""
    fitting = targets()
    target = next((target for target in fitting if library_file(target).is_file()), fitting[0])
    try:
        path = compiled(target)
        try:
            # After torch, whose OpenMP it then shares: a second one would have threads of its own.
            return Kernels(ctypes.CDLL(str(path)), target)
        except OSError as error:
            raise RunFailed(f"{path} cannot be loaded: {error}") from error
    except RunFailed as error:
        if this_launch().rank == 0:  # `train` compares the others with it
            tell(f"C++ kernels: none: {error}; PyTorch's operators are used, and steps on CPUs take longer")
        return error


def targets() -> list[str]:
    """List the compiler targets that this processor supports, the best first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return [platform.machine()]
    known = machine.instruction_sets()
    fits = [level for i, level in enumerate(_LEVELS) if all(known >= flags for flags in list(_LEVELS.values())[i:])]
    return [*fits, "x86-64"]


def library_file(target: str) -> Path:
    """Where the library for a target is kept: a name that changes with all that it is made from."""
    words = " ".join([*_FLAGS, *platform.libc_ver(), *([] if target in _X86 else [machine.processor_digest()])])
    key = hashlib.sha256(SOURCE.read_bytes() + b"\0" + words.encode()).hexdigest()[:16]
    return cache_folder() / "kernels" / f"{key}-{target}.so"


def compiled(target: str) -> Path:
    """The library for a target, compiled if it is not there; whole or not at all, and by one process at a time.

    The compiler is CXX or the first on PATH. Raises RunFailed with what it said, also to those that waited meanwhile.
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
    lock = path.with_suffix(".lock")  # holds what the last compiler said if it failed
    began = time.monotonic()
    has_waited = False
    has_locks = True
    while not path.is_file():
        try:
            if has_waited and (said := lock.read_text(encoding="utf-8")):
                raise RunFailed(said)
            for folder in (path.parent.parent, path.parent):  # whatever the umask: code is run from here
                folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            lock.touch(mode=0o644)
            with locked(lock, wait=False) if has_locks else nullcontext():
                if not path.is_file():
                    _compile(command, path, lock)
        except BlockingIOError:
            if time.monotonic() - began > 2 * _PATIENCE_S:
                raise RunFailed(f"another process has held {lock} for {2 * _PATIENCE_S} s") from None
            has_waited = True
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        except OSError as error:
            if not has_locks or error.errno not in _NO_LOCKS:
                raise RunFailed(f"{path.parent} cannot be written: {error.strerror}") from error
            has_locks = False
    return path


def _compile(command: Sequence[str], path: Path, lock: Path) -> None:
    os.truncate(lock, 0)  # opening and closing it would release it
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder, path.name)
            words = [*command, str(made)]
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_PATIENCE_S,
            )
            if done.returncode == 0:
                made.chmod(0o755)
                made.replace(path)
                tell(f"C++ kernels: compiled to {path} in {time.monotonic() - began:.0f} s")
                return
        errors = (line for line in done.stderr.splitlines() if "error" in line)
        why = f"{command[0]} cannot compile {SOURCE.name}: {next(errors, f'exit status {done.returncode}')}"
    except subprocess.TimeoutExpired:
        why = f"{command[0]} took longer than {_PATIENCE_S} s"
    except OSError as error:
        why = f"{command[0]} cannot be run in {path.parent}: {error.strerror}"
    lock.write_text(why, encoding="utf-8")  # last, as it releases the lock
    raise RunFailed(why)


def compile_for_cluster() -> None:
    """Compile for this machine, and for the level below, for older nodes. Raises RunFailed."""
    for target in targets()[:2]:
        compiled(target)


def take(x: torch.Tensor) -> bool:
    """True if the kernels are loaded and take the device and the number format of `x`."""
    return x.device.type == "cpu" and x.dtype in _NAMES and isinstance(loaded(), Kernels)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """Return `x` (N, C, H, W) or (N, C, T, H, W) with its channels last in memory; a copy only where they are not."""
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def call(name: str, dtype: torch.dtype, tensors: Sequence[torch.Tensor | None], *arguments: object) -> None:
    """Call the kernel `name` of kernels.cpp, for activations of type `dtype`. Python's lock is free meanwhile."""
    found = loaded()
    if not isinstance(found, Kernels):
        raise found
    addresses = (ctypes.c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))
    getattr(found.library, f"{_NAMES[dtype]}_{name}")(addresses, *arguments)


def integers(*numbers: int) -> ctypes.Array[ctypes.c_int64]:
    """Return numbers as C++ sees a structure of int64_t."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


class Group(NamedTuple):
    """Channels [begin, end) of a shift; those of frame t come from frame t + step."""

    begin: int
    end: int
    step: int


def shift(
    x: torch.Tensor,
    num_frames: int,
    groups: Sequence[Group],
    ends: torch.Tensor | None = None,
    *,
    restore: bool = False,
) -> None:
    """Shift `groups` of the channels of frames `x` (N*T, C, H, W) in place; what opens becomes zero.

    ends (N, H, W, channels that move) receives what drops out of the clips. With `restore` this undoes the shift of
    `groups`, to the bit: what opens comes from `ends`.
    """
    frames, channels, height, width = x.shape
    sign = -1 if restore else 1
    # Clips and Group of kernels.cpp.
    clips = integers(frames // num_frames, num_frames, height * width, channels, torch.get_num_threads())
    flat = integers(*(number for begin, end, step in groups for number in (begin, end, sign * step)))
    call("shift", x.dtype, [x, ends], clips, flat, ctypes.c_int64(len(groups)), ctypes.c_int(restore))
