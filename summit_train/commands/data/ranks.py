"""The ranks that a data command was started with: alone, or under mpirun, srun or jsrun."""

from __future__ import annotations

from contextlib import AbstractContextManager

from summit_train.comm import World
from summit_train.commands.ranks import session, this_launch


def joined_ranks() -> AbstractContextManager[World]:
    """Return the world of this command's ranks as a context; an error on one of them ends all."""
    return session(this_launch())
