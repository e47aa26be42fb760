"""Ranks over the two nodes of a real Slurm, started by srun and by mpirun, and what is left of them in the end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.slurm import Slurm, SlurmError, running_slurm

WORLD = """
import os
from summit_train.core.comm.launch import find_launch
from summit_train.core.comm import open_world
launch = find_launch(os.environ)
world = open_world(launch)
mine = (world.rank, world.local_rank, world.local_size, launch.launcher, os.environ["SLURMD_NODENAME"])
for words in world.gather(mine) or ():
    print(*words, flush=True)
world.close()
"""


@pytest.mark.parametrize(
    ("launcher", "name", "backend"),
    [
        ("srun --mpi=pmix", "srun", "horovod"),
        # srun's ranks find each other by the job's number. This machine does not know its nodes' names.
        ("export MASTER_ADDR=127.0.0.1\nsrun", "srun", "torch"),
        ("mpirun --bind-to none", "mpirun (Open MPI)", "horovod"),
    ],
)
def test_ranks_on_two_nodes_are_local_rank_0_of_1_on_both(
    slurm: Slurm, tmp_path: Path, launcher: str, name: str, backend: str
) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    job = slurm.submit(
        f"#!/bin/bash\nexport SUMMIT_TRAIN_COMM={backend}\n{launcher} '{sys.executable}' '{tmp_path}/world.py'\n",
        "--nodes=2",
        "--ntasks-per-node=1",
    )
    slurm.wait(job, "COMPLETED")
    assert slurm.output(job).splitlines() == [f"0 0 1 {name} n1", f"1 0 1 {name} n2"]


def test_a_failed_job_is_told_with_its_output(slurm: Slurm) -> None:
    job = slurm.submit("#!/bin/bash\necho something of note\nexit 3\n")
    with pytest.raises(SlurmError, match=r"FAILED \(NonZeroExitCode, exit 3:0\), not COMPLETED:\nsomething of note"):
        slurm.wait(job, "COMPLETED")


def test_a_stopped_cluster_leaves_no_process(slurm: Slurm, tmp_path: Path) -> None:
    """Stopped in the middle of a job whose script and step ignore what asks them to end."""
    script = "#!/bin/bash\ntrap '' TERM\nsrun -N2 bash -c 'trap \"\" TERM; echo here; while :; do sleep 1; done'\n"
    with running_slurm(tmp_path) as second:
        job = second.submit(script, "--nodes=2")
        second.wait_until(lambda: second.state(job) == "RUNNING" and second.output(job).count("here") == 2, "the steps")
        assert len(second.processes()) >= 8
    assert second.processes() == []
    assert slurm.run("sinfo", "-h", "-o", "%D").strip() == "2"
