"""The batch systems, each one file here, its templates in jobs/ and its line in SCHEDULERS."""

from summit_train.cluster.schedulers.flux import Flux
from summit_train.cluster.schedulers.local import Local
from summit_train.cluster.schedulers.lsf import Lsf
from summit_train.cluster.schedulers.pbs import Pbs
from summit_train.cluster.schedulers.scheduler import Scheduler
from summit_train.cluster.schedulers.slurm import Slurm

__all__ = ["SCHEDULERS", "Scheduler"]

SCHEDULERS: dict[str, Scheduler] = {"slurm": Slurm(), "lsf": Lsf(), "pbs": Pbs(), "flux": Flux(), "local": Local()}
