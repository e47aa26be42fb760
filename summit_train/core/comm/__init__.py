"""Open the world of ranks: Horovod or torch.distributed for tensors, MPI or gloo for messages, or one rank alone.

These are the only importers of horovod, mpi4py and torch.distributed. Each is imported when a world that needs it is
opened, never before: a process alone needs none, and on some login nodes merely importing MPI ends the process.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

from summit_train.core.comm.horovod_world import HorovodWorld
from summit_train.core.comm.launch import Launch, this_launch
from summit_train.core.comm.torch_world import TorchWorld
from summit_train.core.comm.world import World
from summit_train.core.errors import UserError

__all__ = ["BACKENDS", "World", "choose_backend", "open_world"]

BACKENDS = ("horovod", "torch")


def choose_backend(launch: Launch, environ: Mapping[str, str]) -> str:
    """Return "horovod" or "torch", whichever SUMMIT_TRAIN_COMM names.

    Not set, or "auto": Horovod where it and mpi4py are installed and MPI started the processes; else torch.
    Raises UserError where what is named is not there.
    """
    wish = environ.get("SUMMIT_TRAIN_COMM", "auto")
    if wish not in ("auto", *BACKENDS):
        raise UserError(f"SUMMIT_TRAIN_COMM must be horovod, torch or auto, got {wish!r}")
    missing = [name for name in ("horovod", "mpi4py") if importlib.util.find_spec(name) is None]
    if wish == "auto":
        return "torch" if missing or not launch.by_mpi else "horovod"
    if wish == "horovod" and missing:
        lacks = f"SUMMIT_TRAIN_COMM=horovod needs {' and '.join(missing)}, not installed here"
        raise UserError(f"{lacks}; run `summit-train build-horovod`, or use SUMMIT_TRAIN_COMM=torch")
    if wish == "horovod" and not launch.by_mpi:
        found = f"{launch.launcher} started {launch.size} processes without MPI, which Horovod needs"
        raise UserError(f"{found}; use mpirun, srun --mpi=pmix or jsrun, or SUMMIT_TRAIN_COMM=torch")
    return wish


def open_world(launch: Launch | None = None) -> World:
    """Open the world of a launch; None: this process's. A process started by hand is a world of its own.

    Raises UserError if nothing joins several processes: N that each train a model of their own would look like a run.
    """
    launch = launch or this_launch()
    if launch.size == 1:
        return World()
    if choose_backend(launch, os.environ) == "torch":
        return TorchWorld(launch)
    started = f"{launch.size} processes were started"
    right = "see `summit-train doctor`, or use SUMMIT_TRAIN_COMM=torch"
    try:
        world = HorovodWorld()
    except (ImportError, RuntimeError) as error:
        raise UserError(f"{started}, but Horovod does not start: {error}; {right}") from error
    if world.size != launch.size:
        why = f"Horovod joined {world.size}: the launcher and Horovod belong to different MPIs"
        raise UserError(f"{started}, but {why}; {right}")
    return world
