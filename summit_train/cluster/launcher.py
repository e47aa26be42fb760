"""Find the launcher of this process in its environment, before MPI is initialised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from summit_train.errors import UserError

# (launcher, variable with the rank, variable with the number of processes). SLURM_NTASKS is set in a batch script too,
# where only one process runs; SLURM_STEP_NUM_TASKS is set by srun alone.
_LAUNCHERS = (
    ("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("mpirun (MVAPICH2)", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("mpirun (Hydra)", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("torchrun", "RANK", "WORLD_SIZE"),
)


@dataclass(frozen=True)
class Launch:
    """The launcher of this process, with the process's rank and the number of processes.

    interactive: a person watches stdout's terminal. A launcher's pseudo-terminal counts only with TTY_COMPATIBLE=1,
    the variable that rich reads.
    """

    launcher: str
    rank: int
    size: int
    interactive: bool = False


def find_launch(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch that `environ` describes, or None for a process started by hand.

    Raises UserError when a launcher's variables are there but are no numbers.
    """
    for launcher, rank_name, size_name in _LAUNCHERS:
        if rank_name in environ and size_name in environ:
            try:
                rank, size = int(environ[rank_name]), int(environ[size_name])
                return Launch(launcher, rank, size, environ.get("TTY_COMPATIBLE") == "1")
            except ValueError as error:
                names = f"{rank_name}={environ[rank_name]!r}, {size_name}={environ[size_name]!r}"
                raise UserError(f"the environment of {launcher} is broken: {names}; numbers are wanted") from error
    return None


def check_joined(launch: Launch, environ: Mapping[str, str]) -> None:
    """Raise UserError if the launcher started several processes that MPI does not know of.

    MPI would take each for a separate world, or end it with an error message of its own.
    """
    if launch.size == 1 or launch.launcher not in ("torchrun", "srun"):
        return
    if launch.launcher == "torchrun":
        found = f"torchrun started {launch.size} processes (RANK and WORLD_SIZE are set), and MPI does not know of them"
        raise UserError(f"{found}; use mpirun, srun --mpi=pmix or jsrun, or unset both")
    if not any(name.startswith(("PMIX_", "PMI_", "I_MPI_PMI")) for name in environ):
        found = f"srun started {launch.size} processes (SLURM_STEP_NUM_TASKS), and MPI does not know of them"
        raise UserError(f"{found}: there is no PMIX_RANK; use srun --mpi=pmix, or mpirun within the job")
