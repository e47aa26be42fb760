"""Find the launcher of this process in its environment, before MPI is initialised."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from summit_train.core.errors import UserError

# (launcher, variable with the rank, variable with the number of processes). SLURM_NTASKS is set in a batch script too,
# where only one process runs; SLURM_STEP_NUM_TASKS is set by srun alone.
_LAUNCHERS = (
    ("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("mpirun (MVAPICH2)", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("mpirun (Hydra)", "PMI_RANK", "PMI_SIZE"),  # PALS' mpiexec too
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("torchrun", "RANK", "WORLD_SIZE"),
)
_BY_PMI = ("srun", "flux run")  # they tell MPI of their processes where they are asked to


@dataclass(frozen=True)
class Launch:
    """The launcher of this process, with the process's rank and the number of processes.

    by_mpi: MPI can join the processes.
    """

    launcher: str
    rank: int
    size: int
    by_mpi: bool = False


def find_launch(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch that `environ` describes, or None for a process started by hand.

    Raises UserError when a launcher's variables are not numbers.
    """
    # torchrun itself may be started once a node by any of the others.
    launchers = _LAUNCHERS[-1:] if "TORCHELASTIC_RUN_ID" in environ else _LAUNCHERS
    for launcher, rank_name, size_name in launchers:
        if rank_name in environ and size_name in environ:
            try:
                rank, size = int(environ[rank_name]), int(environ[size_name])
            except ValueError as error:
                names = f"{rank_name}={environ[rank_name]!r}, {size_name}={environ[size_name]!r}"
                raise UserError(f"the environment of {launcher} is broken: must be numbers, got {names}") from error
            has_pmi = any(name.startswith(("PMIX_", "PMI_", "I_MPI_PMI")) for name in environ)
            by_mpi = launcher != "torchrun" and (launcher not in _BY_PMI or has_pmi)
            return Launch(launcher, rank, size, by_mpi)
    return None


def this_launch() -> Launch:
    """Return how this process was started; a process started by hand is rank 0 of 1."""
    return find_launch(os.environ) or Launch("hand", 0, 1)
