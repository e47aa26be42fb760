"""Start the ranks of a command and act for them: pass signals on, and end with their exit status.

mpirun starts them where Horovod joins them, and on other hosts. Otherwise each is a process of this one, and
torch.distributed joins them at a port that this process keeps for them.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from summit_train.core.comm import choose_backend
from summit_train.core.comm.launch import LISTENER, PORTS, RANK, RANKS, SECRET, Launch, this_launch
from summit_train.core.comm.torch_world import check_open_files
from summit_train.core.errors import UserError
from summit_train.core.machine import PR_SET_PDEATHSIG, num_cpus
from summit_train.core.processes import NOTES, ROOT_ALLOWED, find_mpirun, mpirun_command, refuses_root
from summit_train.core.text import counted
from summit_train.core.watch import STOP_SIGNALS

PASSED_ON = (*STOP_SIGNALS, signal.SIGINT)
_INTERRUPTED = 130
_STOPPED = 85
_SECONDS_TO_END = 3.0  # from SIGTERM to SIGKILL
_SECONDS_TO_LISTEN = 7.0  # from a request to the end of ranks that cannot hear it yet
_SECONDS_BETWEEN_LOOKS = 0.05
_ONE_HOST = {"OMPI_MCA_btl": "^tcp"}  # ranks that share memory need no ports
# What ranks of other hosts need of this environment. Open MPI sends its own variables.
_FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHON", "OMP_", "MASTER_", "SUMMIT_TRAIN_", "NCCL_", "GLOO_", "HOROVOD_")
# In what mpirun writes where a rank has failed, which says why itself.
_SAID_BY_A_RANK = r"Process name: \[|exited with non-zero status|MPI_ABORT"

Command = tuple[Sequence[str], Mapping[str, str]]  # words and environment
Process = subprocess.Popen[bytes]


def run_ranks(words: Sequence[str], ranks: int, hosts: Sequence[str], say: Callable[[str], None]) -> int:
    """Run `summit-train WORDS` on ranks of this host, or of `hosts`, equally many on each; return the exit status.

    It is that of the first rank that did not return 0; 128 + N for a rank that signal N ended; 130 after a second
    SIGINT. say: prints how the ranks are started. Raises UserError if they cannot be.
    """
    launch = this_launch()
    mpirun = find_mpirun()
    if launch.size > 1:
        found = f"{launch.launcher} started {counted(launch.size, 'rank')}"
        raise UserError(f"--ranks must be used without a launcher, but {found}; leave out one")
    if ranks < 1 or ranks % max(1, len(hosts)):
        form = f"a multiple of the {len(hosts)} hosts" if hosts else "1 or more"
        raise UserError(f"--ranks must be {form}, got {ranks}")
    if not all(hosts):
        raise UserError(f"--hosts must be names separated by commas, got {','.join(hosts)!r}")
    threads = max(1, num_cpus() * max(1, len(hosts)) // ranks)
    environ = {"OMP_NUM_THREADS": str(threads), SECRET: secrets.token_hex(), **os.environ}
    backend = choose_backend(Launch("--ranks", 0, ranks, by_mpi=mpirun is not None), environ)
    program = [sys.executable, "-m", "summit_train", *words]
    how = f"joined by {backend}"
    if hosts:
        environ = {"MASTER_ADDR": hosts[0], **environ}  # for torch.distributed
        if find_spec("mpi4py") is None:  # by which the ranks would agree on a port
            environ = {"MASTER_PORT": str(PORTS[os.getpid() % len(PORTS)]), **environ}
        how = f"on {', '.join(hosts)}, {how}"
        if mpirun is None:
            raise UserError("--hosts needs Open MPI's mpirun on PATH; or run torchrun on each host")
    if mpirun is not None and (hosts or backend == "horovod"):
        root = ROOT_ALLOWED if refuses_root(environ) else {}
        settings = f" (with {' '.join(map('='.join, root.items()))}, as you are root)" if root else ""
        say(f"{counted(ranks, 'rank')} {how}, started by mpirun{settings}")
        forwarded = [word for name in environ if name.startswith(_FORWARDED) for word in ("-x", name)]
        launcher = [*mpirun_command(mpirun, ranks, hosts), *(forwarded if hosts else [])]
        environ |= root
        if hosts:  # why one cannot be reached is worth reading
            return attend([([*launcher, *program], environ)], say)
        # Not to stderr: mpirun's banners would come after the message of a rank that fails.
        with os.fdopen(os.memfd_create("mpirun"), encoding="utf-8", errors="replace") as notes:
            environ = _ONE_HOST | environ | {NOTES: str(notes.fileno())}
            return attend([([*launcher, *program], environ)], say, notes=notes)
    check_open_files(2 * ranks)
    say(f"{counted(ranks, 'rank')} {how}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # gloo's own choice is the interface of the host's name, which need not be one of this machine.
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
        environ = {"GLOO_SOCKET_IFNAME": "lo"} | environ | meeting
        each = [environ | {RANK: str(rank), RANKS: str(ranks)} for rank in range(ranks)]
        each[0] |= {LISTENER: str(listener.fileno())}
        # A rank that starts keeps a request to stop until it has a handler. mpirun must not: it needs its signals.
        return attend([(program, of_rank) for of_rank in each], say, blocked=STOP_SIGNALS)


def attend(
    commands: Sequence[Command],
    say: Callable[[str], None],
    blocked: Sequence[int] = (),
    notes: TextIO | None = None,
) -> int:
    """Run commands to their end in place of this process; return the exit status, as `run_ranks` does.

    The first one that fails ends the others. blocked: signals that the commands keep until they unblock them. notes:
    what mpirun, the only command, writes to the descriptor NOTES.
    """
    libc = ctypes.CDLL(None)

    def begin() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGUSR2)  # if this process is killed, the ranks save and stop
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)

    received: list[int] = []
    former = {number: signal.signal(number, lambda number, _: received.append(number)) for number in PASSED_ON}
    processes: list[Process] = []
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)  # a request that came while this command started
    try:
        for words, environ in commands:
            files = [int(environ[LISTENER])] if LISTENER in environ else []
            if notes:
                files.append(notes.fileno())
            processes.append(
                subprocess.Popen(
                    words,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # the terminal's SIGINT comes to this process alone
                    preexec_fn=begin,
                    pass_fds=files,
                )
            )
        return _exit_status(processes, received, say, notes)
    finally:
        _signal(processes, signal.SIGKILL)
        for number, handler in former.items():
            signal.signal(number, handler)


def _exit_status(
    processes: Sequence[Process], received: Sequence[int], say: Callable[[str], None], notes: TextIO | None
) -> int:
    status = 0
    num_seen = 0
    kill_at = math.inf
    listen_by = math.inf
    while True:
        codes = [process.poll() for process in processes]
        interrupted = received.count(signal.SIGINT) > 1
        if kill_at == math.inf and (interrupted or any(codes)):
            status = _INTERRUPTED if interrupted else _failure(codes, say, notes)
            _signal(processes, signal.SIGTERM)
            kill_at = time.monotonic() + _SECONDS_TO_END
        elif len(received) > num_seen:
            if num_seen == 0:
                say("the ranks are asked to save a checkpoint and stop; a second SIGINT (Ctrl-C) ends them at once")
                listen_by = time.monotonic() + _SECONDS_TO_LISTEN
            num_seen = len(received)
            _signal(processes, signal.SIGUSR2)
        elif kill_at == math.inf and time.monotonic() > listen_by and any(map(_is_deaf, processes)):
            say("the ranks have not begun, so there is nothing to save; they are ended")
            status = _STOPPED
            kill_at = time.monotonic()
        if None not in codes:
            return status
        if time.monotonic() > kill_at:
            _signal(processes, signal.SIGKILL)
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _failure(codes: Sequence[int | None], say: Callable[[str], None], notes: TextIO | None) -> int:
    """Return the exit status of the first command that failed; print why, unless a rank has printed it."""
    rank, code = next((rank, code) for rank, code in enumerate(codes) if code)
    status = code if code > 0 else 128 - code
    text = ""
    if notes:
        notes.seek(0)
        text = notes.read().strip()
    if status - 128 in signal.valid_signals():
        who = f"rank {rank}" if len(codes) > 1 else "a rank"
        if named := re.search(r"process rank (\d+) with PID \d+ on node \S+ exited on signal", text):
            who = f"rank {named[1]}"
        say(f"{who} was ended by {signal.Signals(status - 128).name}")
    elif text and not re.search(_SAID_BY_A_RANK, text):
        say(text)
    return status


def _is_deaf(process: Process) -> bool:
    """True if a process blocks a pending SIGUSR2, as ranks do while they import and meet."""
    if process.poll() is not None:
        return False
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
    )
    return bool(int(status["ShdPnd"], 16) >> (signal.SIGUSR2 - 1) & 1)


def _signal(processes: Sequence[Process], number: signal.Signals) -> None:
    """Signal those that run; SIGKILL reaches their loader workers too."""
    for process in processes:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)
