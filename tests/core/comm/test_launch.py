"""What each launcher's environment says of a process, and each scheduler's of its job."""

from __future__ import annotations

from pathlib import Path

import pytest

from summit_train.core.comm.launch import Launch, find_launch, first_host, job_address
from summit_train.core.errors import UserError

LAUNCH = Launch("srun", 1, 4)
# As set by each launcher for rank 3 of 8, with variables around them that decide nothing.
ENVIRONMENTS = {
    # Within `srun --pty bash`, whose step has one process.
    "--ranks": {"SUMMIT_TRAIN_RANK": "3", "SUMMIT_TRAIN_RANKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "mpirun (Open MPI)": {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "PMIX_RANK": "3"},
    "jsrun": {"JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "8", "LSB_JOBID": "1", "PMIX_RANK": "3"},
    "mpirun (MVAPICH2)": {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "8", "MV2_COMM_WORLD_LOCAL_RANK": "1"},
    "flux run": {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_ID": "f1"},
    # MPICH 5.0.2's mpiexec; that of PALS has PALS_RANKID and the like beside them.
    "mpirun (Hydra)": {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "PALS_RANKID": "3"},
    "srun": {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "1"},
    "torchrun": {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "host"},
}


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_every_launcher_is_known(launcher: str) -> None:
    found = _found(ENVIRONMENTS[launcher])
    assert (found.launcher, found.rank, found.size) == (launcher, 3, 8)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PATH": "/bin", "HOME": "/root"},
        # A batch script, and the shell of salloc: an allocation of many tasks, one process.
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        {"LSB_JOBID": "1", "LSB_DJOB_NUMPROC": "42"},
        {"OMPI_COMM_WORLD_SIZE": "8"},
        {"RANK": "0"},
    ],
    ids=str,
)
def test_a_process_started_by_hand_has_no_launch(environ: dict[str, str]) -> None:
    assert find_launch(environ) is None


def test_a_launcher_within_a_job_of_another_is_the_one_that_counts() -> None:
    # mpirun within `srun --pty bash`: srun started one shell, mpirun eight processes.
    shell = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}
    for launcher in ("mpirun (Open MPI)", "mpirun (Hydra)"):
        assert find_launch(shell | ENVIRONMENTS[launcher]) == Launch(launcher, 3, 8, by_mpi=True)
    assert find_launch(shell) == Launch("srun", 0, 1)


@pytest.mark.parametrize("broken", ["", "three", "3.0"])
def test_a_broken_environment_is_named(broken: str) -> None:
    with pytest.raises(UserError, match=f"of srun is broken: must be numbers, got SLURM_PROCID={broken!r}, "):
        find_launch(ENVIRONMENTS["srun"] | {"SLURM_PROCID": broken})


def test_mpi_can_join_processes_of_its_own_launchers_and_of_those_with_pmi() -> None:
    knows = {launcher for launcher, environ in ENVIRONMENTS.items() if _found(environ).by_mpi}
    assert knows == set(ENVIRONMENTS) - {"--ranks", "srun", "flux run", "torchrun"}
    for launcher in ("srun", "flux run"):
        assert _found(ENVIRONMENTS[launcher] | {"PMIX_RANK": "3"}).by_mpi
    assert not _found(ENVIRONMENTS["torchrun"] | {"PMIX_RANK": "3"}).by_mpi


def test_torchrun_counts_where_another_launcher_started_it_once_a_node() -> None:
    node = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "TORCHELASTIC_RUN_ID": "none"}
    assert _found(node | ENVIRONMENTS["torchrun"]) == Launch("torchrun", 3, 8)


@pytest.mark.parametrize(
    ("environ", "host"),
    [
        ({}, None),
        ({"SLURM_JOB_NODELIST": "n1"}, "n1"),
        ({"SLURM_JOB_NODELIST": "login9,n1"}, "login9"),
        ({"SLURM_JOB_NODELIST": "nid[003-007,9],other"}, "nid003"),
        ({"SLURM_JOB_NODELIST": "nid[12]-ib,other"}, "nid12-ib"),
        ({"SLURM_JOB_NODELIST": "nid[1-4]", "SLURM_STEP_NODELIST": "nid[3-4]"}, "nid1"),
        ({"LSB_MCPU_HOSTS": "a01n02 42 a01n03 42"}, "a01n02"),
        ({"LSB_MCPU_HOSTS": "batch2 1 a01n02 42"}, "a01n02"),
        ({"LSB_MCPU_HOSTS": "batch2 1"}, "batch2"),
        ({"PBS_NODEFILE": "/nowhere/at/all"}, None),
        ({"PBS_NODEFILE": "nodes"}, "x1c0"),
    ],
    ids=str,
)
def test_the_first_host_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], host: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nodes").write_text("x1c0\nx1c0\nx2c0\n")
    assert first_host(environ) == host


def test_every_step_of_a_job_has_a_port_of_its_own() -> None:
    environ = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "n1"}
    host, port = job_address(environ, LAUNCH)
    assert host == "n1" and (host, port) == job_address(dict(environ), LAUNCH)
    ports = {job_address(environ | {"SLURM_STEP_ID": str(step)}, LAUNCH)[1] for step in range(20)}
    assert len(ports) == 20 and all(10_000 <= port < 30_000 for port in ports)
    assert job_address(environ | {"MASTER_ADDR": "n9"}, LAUNCH) == ("n9", port)


def test_only_sruns_own_ranks_are_in_its_step() -> None:
    """Ranks that mpirun's daemons started see the daemons' step on all nodes but the first."""
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    daemon = environ | {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n2"}
    by_mpirun = Launch("mpirun (Open MPI)", 1, 4)
    assert job_address(daemon, by_mpirun) == job_address(environ, by_mpirun)
    assert job_address(daemon, LAUNCH)[0] == "n2" and job_address(daemon, LAUNCH) != job_address(environ, LAUNCH)


def _found(environ: dict[str, str]) -> Launch:
    launch = find_launch(environ)
    assert launch is not None
    return launch
