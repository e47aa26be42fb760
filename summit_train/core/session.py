"""Open the ranks that a command was started with, and print why one fails."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from summit_train.core.comm import World, open_world
from summit_train.core.comm.launch import Launch, this_launch
from summit_train.core.errors import AgreedError, UserError, describe, exit_status, is_bug
from summit_train.core.files import write_json
from summit_train.core.result import tell, warn
from summit_train.core.run_folder import FAILURE, name_bad_nodes, spares

_SECONDS_FOR_RANK_0 = 3.0
_SECONDS_BETWEEN_FIRST_AND_LAST = 3.0
_SECONDS_TO_WRITE = 5.0


def check_single(command: str) -> None:
    """Raise UserError where a launcher started several ranks of a command that has work for one."""
    if this_launch().size > 1:
        right = "start it without mpirun, srun, jsrun or torchrun"
        raise UserError(f"{command} is one process and shares no work among ranks; {right}")


@contextmanager
def session(launch: Launch) -> Iterator[World]:
    """Open the world for the block. The first rank that fails says why, and ends all of them.

    All ranks raise an AgreedError together, so they leave in order.
    """
    world = open_world(launch)
    if world.rank == 0:
        for warning in world.warnings:
            warn(warning)
    try:
        yield world
    except AgreedError:
        world.close()
        raise
    except BaseException as error:
        if world.size > 1:
            report_failure(error, launch)
            world.abort(exit_status(error))
        raise
    world.close()


def report_failure(error: BaseException, launch: Launch) -> None:
    """Print why this rank fails, once for all ranks that fail alike.

    Rank 0 prints at once, and its end makes the launcher end the others. A rank that is still there some seconds later
    has met something that rank 0 has not, such as a file that its node lacks. Of several such ranks the lowest prints.
    """
    if launch.rank > 0:
        if isinstance(error, AgreedError):
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Training takes it for a request to stop.
        time.sleep(_SECONDS_FOR_RANK_0 + _SECONDS_BETWEEN_FIRST_AND_LAST * launch.rank / launch.size)
    text = describe(error)
    is_common = launch.rank == 0 and isinstance(error, UserError | AgreedError)
    is_named = launch.size > 1 and not is_common and not text.startswith("rank ")
    name = f"summit-train, rank {launch.rank} on {socket.gethostname()}:" if is_named else "summit-train:"
    reason = f"{name}\n{text}" if is_bug(error) else f"{name} {text}"
    tell(*reason.split("\n"))
    leave_reason(reason, exit_status(error))


def leave_reason(text: str, status: int, node: str | None = None) -> None:
    """Leave the reason for an exit status that is not 0 with torchrun and the job script, if they started this rank.

    torchrun prints it last. Where the status is 1 the script does not wait for ever for a launcher that waits for a
    silent node, and leaves out `node`, if this rank is the first to fail and the job can lose a node. Where a shared
    file system that hangs is the reason, this returns after some seconds all the same.
    """
    writing = threading.Thread(target=_write_reason, args=(text, status, node), daemon=True)
    writing.start()
    writing.join(_SECONDS_TO_WRITE)


def _write_reason(text: str, status: int, node: str | None) -> None:
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": text.rstrip(), "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):  # the disk may be why this rank fails
            write_json(Path(file), {"message": message})
    if status == 1 and (file := os.environ.get(FAILURE)):
        with suppress(OSError, UserError), open(file, "x", encoding="utf-8", errors="replace") as written:
            written.write(f"{text.rstrip()}\n")
            run_path = Path(file).parent.parent
            if node is not None and spares(run_path).losable > 0:
                name_bad_nodes(run_path, {node: text})
