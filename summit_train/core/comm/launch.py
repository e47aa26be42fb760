"""Read from the environment that launchers and schedulers set: this process's rank, and the host of rank 0.

Read before MPI is initialised. Local ranks are counted from the names of the nodes, which no launcher gets wrong.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from summit_train.core.errors import UserError

HYDRA = "mpirun (Hydra)"  # of MPICH and Intel MPI; PALS' mpiexec looks the same
RANK = "SUMMIT_TRAIN_RANK"
RANKS = "SUMMIT_TRAIN_RANKS"  # by `--ranks`
LISTENER = "SUMMIT_TRAIN_LISTENER"  # by `--ranks` for rank 0: the descriptor of the socket on which the ranks meet
SECRET = "SUMMIT_TRAIN_SECRET"  # of the job: what a rank must know for the others to believe it

# (launcher, variable with the rank, variable with the number of processes). SLURM_NTASKS is set in a batch script too,
# where only one process runs; SLURM_STEP_NUM_TASKS is set by srun alone.
_LAUNCHERS = (
    ("--ranks", RANK, RANKS),
    ("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("mpirun (MVAPICH2)", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    (HYDRA, "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("torchrun", "RANK", "WORLD_SIZE"),
)
_JOBS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "FLUX_JOB_ID")
PORTS = range(10_000, 30_000)  # below those that Linux hands out
_WITHOUT_MPI = ("--ranks", "torchrun")
_BY_PMI = ("srun", "flux run")  # they set up MPI only if an option asks for it


@dataclass(frozen=True)
class Launch:
    """The launcher of this process, and its rank and the number of processes. by_mpi: MPI can join the processes."""

    launcher: str
    rank: int
    size: int
    by_mpi: bool = False


def find_launch(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch that `environ` describes, None for one by hand. Raises UserError for a wrong variable."""
    # torchrun itself may be started once a node by any of the others.
    launchers = _LAUNCHERS[-1:] if "TORCHELASTIC_RUN_ID" in environ else _LAUNCHERS
    for launcher, rank_name, size_name in launchers:
        if rank_name in environ and size_name in environ:
            try:
                rank = int(environ[rank_name])
                size = int(environ[size_name])
            except ValueError as error:
                names = f"{rank_name}={environ[rank_name]!r}, {size_name}={environ[size_name]!r}"
                raise UserError(f"the environment of {launcher} is broken: must be numbers, got {names}") from error
            has_pmi = any(name.startswith(("PMIX_", "PMI_", "I_MPI_PMI")) for name in environ)
            by_mpi = launcher not in _WITHOUT_MPI and (launcher not in _BY_PMI or has_pmi)
            return Launch(launcher, rank, size, by_mpi)
    return None


def this_launch() -> Launch:
    """Return the launcher, rank and size of this process; a process started by hand is rank 0 of 1."""
    return find_launch(os.environ) or Launch("hand", 0, 1)


def job_address(environ: Mapping[str, str], launch: Launch) -> tuple[str, int]:
    """Return MASTER_ADDR or the job's first host, and a port that its number gives. Raises UserError outside a job."""
    in_step = launch.launcher == "srun"  # mpirun starts its own daemons by srun, whose step is not the ranks'
    address = environ.get("MASTER_ADDR") or first_host(environ, in_step=in_step)
    job = next((environ[name] for name in _JOBS if name in environ), None)
    if address is None or job is None:
        started = f"{launch.size} processes were started by {launch.launcher}, and nothing says where rank 0 is"
        raise UserError(f"{started}: set MASTER_ADDR and MASTER_PORT, start them with torchrun, or install mpi4py")
    # Two steps of one Slurm job do not meet each other.
    step = f"{job}.{environ.get('SLURM_STEP_ID', '') if in_step else ''}"
    return address, PORTS[zlib.crc32(step.encode()) % len(PORTS)]


def first_host(environ: Mapping[str, str], *, in_step: bool = False) -> str | None:
    """Return the first host that the scheduler lists for this process's job, or its step; None where it lists none."""
    step = environ.get("SLURM_STEP_NODELIST") if in_step else None
    if hosts := step or environ.get("SLURM_JOB_NODELIST"):
        # node[003-007,9],other: Slurm's ranges keep their zeros.
        match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", hosts)
        return "".join(part or "" for part in match.groups()) if match else None
    if hosts := environ.get("LSB_MCPU_HOSTS"):
        # host cores host cores ...; where a job's script runs on a node of its own, that one is named first.
        names = hosts.split()[::2]
        return names[1] if len(names) > 1 and names[0].startswith(("batch", "login")) else names[0]
    if (file := environ.get("PBS_NODEFILE")) and Path(file).is_file():
        lines = Path(file).read_text(encoding="utf-8").split()
        return lines[0] if lines else None
    return None


def node_name(environ: Mapping[str, str], host: str) -> str:
    """Return the scheduler's name of this node; several nodes of a test's Slurm are one host."""
    return environ.get("SLURMD_NODENAME", host)
