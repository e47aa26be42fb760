"""Run short programs in processes of their own, and start ranks on this host."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from summit_train.core.errors import RunFailed, UserError

Facts = dict[str, Any]

NOTES = "OPAL_OUTPUT_STDERR_FD"  # the descriptor to which Open MPI, mpirun included, writes its own messages
ROOT_ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # by Open MPI's mpirun
ROOT_NEEDS = f"as root, Open MPI's mpirun needs {' '.join(f'{name}={value}' for name, value in ROOT_ALLOWED.items())}"


def answer(command: Sequence[str], timeout: float, environment: Mapping[str, str] | None) -> Facts:
    """Return the JSON object that a command prints last. timeout: seconds. Raises RunFailed with its last words."""
    try:
        done = subprocess.run(
            command,
            stdin=DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(f"no answer within {timeout:g} s") from None
    except OSError as error:
        raise RunFailed(f"{command[0]} cannot be started: {error.strerror}") from None
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not answers:
        raise RunFailed(_last_words(done.stderr) or f"exit status {done.returncode}")
    facts: Facts = json.loads(answers[-1])
    return facts


def _last_words(stderr: str) -> str:
    """Return the line that says most in what a failed program wrote: the exception's, else the last one."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip(" -=*\n")]
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in lines if not line.startswith("torch.distributed.elastic")]
    exceptions = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt|Failed)\b", line)]
    ours = [line for line in lines if line.startswith("summit-train")]  # mpirun speaks after our program has
    return (exceptions or ours or lines or [""])[-1]


def output(command: Sequence[str]) -> str:
    """Return the output of a command, "" if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout or done.stderr


def seconds_alive() -> float:
    """Return the seconds since this process was started, by Linux."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc(5): starttime


def find_mpirun() -> str | None:
    """Return the environment's own mpirun (from PyPI), for which Horovod is built, else PATH's."""
    own = Path(sys.executable).parent / "mpirun"
    return str(own) if own.is_file() else shutil.which("mpirun")


def mpirun_command(mpirun: str, ranks: int, hosts: Sequence[str] = ()) -> list[str]:
    """Return the command line of mpirun for ranks on this host or on `hosts`, equally many on each.

    They may have fewer cores. Raises UserError where another MPI than Open MPI would have to reach hosts.
    """
    is_open_mpi = "Open MPI" in output([mpirun, "--version"])
    if hosts and not is_open_mpi:
        raise UserError(f"--hosts must be used with Open MPI, but {mpirun} is another MPI's; start the ranks with it")
    options = ["--oversubscribe", "--bind-to", "none", "-x", f"{NOTES}=2"] if is_open_mpi else []
    places = ["--host", ",".join(f"{host}:{ranks // len(hosts)}" for host in hosts)] if hosts else []
    return [mpirun, "-np", str(ranks), *places, *options]


def torchrun_command(ranks: int) -> list[str]:
    """Return the command line of torchrun for `ranks` ranks on this host, to be followed by a program's."""
    # torchrun's own choice of address is the host's name, which need not have one: in a container, say.
    options = ["--standalone", "--local-addr=localhost", f"--nproc-per-node={ranks}", "--no-python"]
    return [sys.executable, "-m", "torch.distributed.run", *options]


def refuses_root(environment: Mapping[str, str]) -> bool:
    """True if Open MPI's mpirun would refuse to start ranks in this environment because the user is root."""
    if os.geteuid() != 0 or all(environment.get(name) == value for name, value in ROOT_ALLOWED.items()):
        return False
    mpirun = find_mpirun()
    return mpirun is not None and "Open MPI" in output([mpirun, "--version"])


def mpi_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a small multi-rank program: one thread a rank, root allowed."""
    return {**environment, "OMP_NUM_THREADS": "1", **(ROOT_ALLOWED if os.geteuid() == 0 else {})}
