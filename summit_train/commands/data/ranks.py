"""The ranks that a data command was started with: alone, or under mpirun, srun or jsrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from summit_train.cluster.launcher import find_launch
from summit_train.errors import UserError

if TYPE_CHECKING:
    from summit_train.comm import World


@contextmanager
def joined_ranks() -> Iterator[World]:
    """The world of this command's ranks for the block; an error on one of them ends all."""
    from summit_train.comm import open_world  # here, as most commands are none for ranks and need no torch

    launch = find_launch(os.environ)
    world = open_world(1 if launch is None else launch.size)
    try:
        yield world
    except BaseException as error:
        if world.size > 1:
            print(f"rank {world.rank} on {world.host}: {error}", file=sys.stderr, flush=True)
            world.abort(2 if isinstance(error, (UserError, ValueError)) else 1)
        raise
    world.close()
