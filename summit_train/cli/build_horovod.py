"""`summit-train build-horovod`: Horovod, which no longer builds as it was released, for this Python environment."""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from pathlib import Path

from summit_train.core.errors import UserError
from summit_train.core.files import check_output
from summit_train.core.result import Result
from summit_train.spec.source import shipped

_HELP = """\
needs: a C++20 compiler (g++ 11 or newer), make, Python's C headers, and torch in this environment. mpicxx and mpirun
  are taken from PATH if both are there; else Open MPI comes from PyPI into the environment. For several GPUs: a torch
  for CUDA, the CUDA toolkit that it was built with, and NCCL's header.
takes: three to five minutes on two cores, half a minute with a cached wheel for this torch, MPI, NCCL and compiler.
writes: the wheels to CACHE/wheels, the output of all steps to CACHE/build-horovod.log, where CACHE is
  ${XDG_CACHE_HOME:-~/.cache}/summit_train.
reads: CXX; CUDA_HOME, NCCL_HOME, NCCL=no (build without it); XDG_CACHE_HOME; PIP_INDEX_URL, PIP_PROXY and pip's others.
checks: an allreduce over two ranks of mpirun. Run this again after you install or load another torch or MPI.
exit status: 0 done, 1 a step failed, 2 you have to install something first.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _HELP


def run(args: argparse.Namespace) -> Result:
    """Become the script that builds, which then gets the signals and gives the exit status."""
    if sys.prefix == sys.base_prefix and Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists():  # PEP 668
        raise UserError(f"the environment must be yours, got the system's {sys.prefix}; make one by `python -m venv`")
    check_output("the environment", sys.prefix, f"{sysconfig.get_path('purelib')}/build-horovod")
    os.execvp("bash", ["bash", str(shipped("jobs") / "build_horovod.sh"), sys.executable])
