"""PBS Pro and OpenPBS: qsub and qselect."""

from __future__ import annotations

import getpass
from pathlib import Path

from summit_train.cluster.schedulers.scheduler import Scheduler, ask


class Pbs(Scheduler):
    """Its launchers: mpiexec of HPE's PALS, mpiexec of MPICH and Intel MPI (Hydra), mpirun of Open MPI.

    Its arrays are not used: no job may depend on one of an array's, which a run that is warned needs to go on.
    """

    launchers = ("pals", "mpiexec", "mpirun")
    can_spare = launchers
    command = "qsub"
    has_arrays = False
    mail = "-m ae"
    own_output = "*.o[0-9]*"
    answer = r"^(\d+(?:\.[\w.-]+)?)$"

    def words(self, script: Path, launcher: str, after: str | None = None) -> list[str]:
        return ["qsub", *(["-W", f"depend=afterany:{after}"] if after else []), script.name]

    def states(self) -> dict[str, str]:
        # qselect names what has not finished, by its whole id, which qstat cuts off.
        own = ["qselect", "-T", "-u", getpass.getuser()]
        return dict.fromkeys(ask(own).split(), "queued") | dict.fromkeys(ask([*own, "-s", "RE"]).split(), "running")
