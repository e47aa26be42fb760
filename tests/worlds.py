"""Helpers of tests that start the program: alone, or as ranks under mpirun."""

from __future__ import annotations

import csv
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from summit_train.__main__ import main
from summit_train.core.comm import BACKENDS as BACKENDS
from summit_train.core.comm import messages
from summit_train.core.processes import ROOT_ALLOWED, find_mpirun
from summit_train.data.batches.loader import MicroBatch
from summit_train.training.averaging import AveragingStep
from summit_train.training.step import TrainStep
from summit_train.training.timer import StepTimer
from summit_train.training.vote import NO_REQUESTS, Requests, StepResult

ROOT = Path(__file__).resolve().parents[1]


# Ends what hangs, and nothing else: many times what any of it takes on a busy machine.
PATIENCE_S = 600.0

Said = tuple[int, str, str]
Say = Callable[..., Said]


needs_ranks = pytest.mark.skipif(
    find_mpirun() is None or importlib.util.find_spec("horovod") is None,
    reason="needs mpirun and Horovod; `make setup` installs both",
)


def until(condition: Callable[[], bool]) -> bool:
    """Wait for something that other processes do."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def workers_of(pid: int) -> list[int]:
    """The worker processes of a process, which its fork server has forked."""
    return [worker for child in children(pid) if _is_fork_server(child) for worker in children(child)]


def _is_fork_server(pid: int) -> bool:
    try:
        return b"fork_server.serve" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended meanwhile
        return False


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    texts = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(child) for text in texts for child in text.split()]


def environment(**more: str) -> dict[str, str]:
    """This process's environment without any launcher's traces, one thread a rank where it does not say."""
    launchers = (
        "OMPI_",
        "PMI",
        "SLURM_",
        "JSM_",
        "PBS_",
        "PALS_",
        "FLUX_",
        "MV2_",
        "MASTER_",
        "TORCHELASTIC_",
        "RANK",
        "WORLD_SIZE",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return {"OMP_NUM_THREADS": "1"} | kept | {"PYTHONPATH": str(ROOT)} | more


def main_said(capsys: pytest.CaptureFixture[str], *words: object) -> Said:
    """Run `summit-train ...` in this process: (exit status, stdout, stderr)."""
    capsys.readouterr()
    try:
        status = main([str(word) for word in words])
    except SystemExit as leaving:  # argparse
        assert isinstance(leaving.code, int)
        status = leaving.code
    return status, *capsys.readouterr()


def refused(said: Said) -> str:
    """The one line in which a command refused what it was given, without the program's name."""
    status, out, err = said
    line = err.removeprefix("summit-train: ").removesuffix("\n")
    assert (status, out, err) == (2, "", f"summit-train: {line}\n") and "\n" not in line, said
    return line


def stdout_of(said: Said) -> str:
    """Standard output of a command that must end with status 0."""
    status, out, _ = said
    assert status == 0, said
    return out


def json_of(said: Said) -> Any:
    return json.loads(stdout_of(said))


def start(
    ranks: int,
    *words: str,
    env: Mapping[str, str] | None = None,
    errors: int = subprocess.STDOUT,
    output: int | IO[str] = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Start `python ...` in a process group of its own, on `ranks` ranks under mpirun; 0: without a launcher.

    output, errors: where its stdout and stderr go.
    """
    python, more = [sys.executable, *words], dict(env or {})
    if ranks:
        python = [find_mpirun() or "mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *python]
        more |= ROOT_ALLOWED if os.geteuid() == 0 else {}
    return subprocess.Popen(
        python,
        env=environment(**more),
        cwd=ROOT,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        start_new_session=True,
    )


def run(ranks: int, *words: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run `python ...` on `ranks` ranks to its end: (exit status, output)."""
    process = start(ranks, *words, env=env)
    try:
        output, _ = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{' '.join(words)} on {ranks} ranks did not end within {PATIENCE_S:g} s:\n{output}")
    return process.returncode, output


def command(ranks: int, *words: str, comm: str = "torch") -> tuple[int, str]:
    """Run `summit-train ...` on `ranks` ranks to its end: (exit status, output). See `joined`."""
    return joined(ranks, partial(main, words), comm)


def joined(ranks: int, work: Callable[[], int], comm: str, *, grace_s: float = 60) -> tuple[int, str]:
    """Do `work` on forked ranks: over Horovod under mpirun, over torch as torchrun joins them; 0: in one child."""
    if comm == "horovod":
        return under_mpirun(ranks, work, {"SUMMIT_TRAIN_COMM": comm})
    return forked(ranks, work, grace_s=grace_s)


def train(ranks: int, spec: Path | str, *words: str, comm: str = "torch") -> str:
    """Run `summit-train train SPEC ...`, which must exit 0, without its report; the output. See `joined`."""
    status, output = joined(ranks, partial(main_without_reports, ["train", str(spec), *words]), comm)
    assert status == 0, output
    return output


def train_each(ranks: int, specs: Sequence[Path], comm: str = "torch") -> None:
    """Train one spec after the other, without their reports; over Horovod the same ranks train all."""
    if comm == "torch":
        for spec in specs:
            train(ranks, spec)
        return
    work = lambda: max(main_without_reports(["train", str(spec)]) for spec in specs)  # noqa: E731
    status, output = joined(ranks, work, comm)
    assert status == 0, output


def main_without_reports(words: Sequence[str]) -> int:
    """Run `summit-train ...` in this process, which draws no report from here on."""
    page = ModuleType("summit_train.report.page")
    page.write_report = lambda runs, path: path  # type: ignore[attr-defined]
    sys.modules[page.__name__] = page
    return main(words)


def take_step(
    step: TrainStep | AveragingStep,
    micro_batches: Iterable[MicroBatch],
    lr: float,
    requests: Requests = NO_REQUESTS,
    timer: StepTimer | None = None,
) -> StepResult:
    """Make one update, as the training loop does."""
    step.begin(lr, timer)
    for batch in micro_batches:
        step.accumulate(batch)
    return step.update(requests)


def signal_at(update: int, number: int = signal.SIGTERM) -> None:
    """Have this process get a signal once, as it begins update number `update` of a run, from 1."""
    honest = TrainStep.begin
    is_sent = False

    def begin(self: TrainStep, lr: float, timer: StepTimer | None = None) -> None:
        nonlocal is_sent
        if timer is not None and timer.number == update and not is_sent:
            is_sent = True
            os.kill(os.getpid(), number)
        honest(self, lr, timer)

    TrainStep.begin = begin  # type: ignore[method-assign]


def train_signalled(spec: Path | str, number: int, step: int, *words: str) -> tuple[int, str]:
    """Run `summit-train train SPEC ...` alone, which gets a signal as it begins update `step`, counted from 1."""

    def work() -> int:
        signal_at(step, number)
        return main_without_reports(["train", str(spec), *words])

    return forked(0, work)


def forked(ranks: int, work: Callable[[], int], *, grace_s: float = 60) -> tuple[int, str]:
    """Do `work` on forked ranks, which need not import torch again, joined as torchrun joins them; 0: in one child.

    The exit status is that of the first rank that failed; the others then have `grace_s` to end by themselves.
    """
    _import_what_training_needs()
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if ranks else None
    status = 0
    # No rank begins before all are forked: the store's thread, which answers them, takes locks that a fork would copy.
    gate, opener = os.pipe()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        children = set()
        for rank in range(max(ranks, 1)):
            child = os.fork()
            if child == 0:
                os.close(opener)
                os.read(gate, 1)  # until every process has closed the other end
                # What torchrun tells a rank of one node, whose store this process keeps.
                launcher = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
                joined = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"} if store else {}
                _work_and_leave([output.fileno()] * 2, work, environment(**(launcher | joined if store else {})))
            children.add(child)
        os.close(opener)
        os.close(gate)
        deadline = time.monotonic() + PATIENCE_S
        while children:
            for child in list(children):
                ended, how = os.waitpid(child, os.WNOHANG)
                if ended:
                    children.remove(child)
                    if how and not status:
                        status = os.waitstatus_to_exitcode(how)
                        deadline = min(deadline, time.monotonic() + grace_s)
            if time.monotonic() > deadline:
                for child in children:
                    os.killpg(child, signal.SIGKILL)
                    status = status or -signal.SIGKILL
            time.sleep(0.005)
        output.seek(0)
        return status, output.read()


def _import_what_training_needs() -> None:
    """Import before a fork what takes longer than so few steps: every training run does."""
    for module in (
        "summit_train.cli.pipeline",
        "torch._dynamo",
        "torch.distributed.nn.functional",
        "torch.utils.tensorboard",
    ):
        importlib.import_module(module)


# What mpirun starts in a rank's place: hands its environment and streams to the test, which forks the rank; passes
# signals on to the rank, and ends as it ends. Killed, it takes the rank with it.
_PLACE = """
import json, os, signal, socket, sys
door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
door.connect(sys.argv[1])
socket.send_fds(door, [json.dumps(dict(os.environ)).encode()], [1, 2])
rank = int(door.recv(99))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: os.kill(rank, number))
status = int(door.recv(99))
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


def under_mpirun(ranks: int, work: Callable[[], int], env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Do `work` on forked ranks in the places of processes that mpirun starts: (its exit status, its output)."""

    def work_and_finalize() -> int:
        try:
            return work()
        finally:
            if "mpi4py.MPI" in sys.modules:
                sys.modules["mpi4py.MPI"].Finalize()  # as at the end of Python, which a forked process does not reach

    _import_what_training_needs()
    places: dict[int, socket.socket] = {}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as output,
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door,
    ):
        door.bind(f"{folder}/door")
        door.listen(ranks)
        door.setblocking(False)
        mpirun = start(ranks, "-ISc", _PLACE, f"{folder}/door", env=env, output=output)
        deadline = time.monotonic() + PATIENCE_S
        while mpirun.poll() is None or places:
            with suppress(BlockingIOError, ConnectionError):  # mpirun may end a process at any moment
                place, _ = door.accept()
                environ, streams, _, _ = socket.recv_fds(place, 1 << 20, 2)
                if environ:
                    if (rank := os.fork()) == 0:
                        _work_and_leave(streams, work_and_finalize, json.loads(environ))
                    places[rank] = place
                    for stream in streams:
                        os.close(stream)
                    place.send(str(rank).encode())
            for rank, place in list(places.items()):
                if mpirun.returncode is not None or select.select([place], [], [], 0)[0]:  # its place has ended
                    os.kill(rank, signal.SIGKILL)
                ended, how = os.waitpid(rank, os.WNOHANG)
                if ended:
                    with suppress(ConnectionError):
                        place.send(str(os.waitstatus_to_exitcode(how)).encode())
                    places.pop(rank).close()
            if time.monotonic() > deadline:
                os.killpg(mpirun.pid, signal.SIGKILL)
            time.sleep(0.005)
        output.seek(0)
        return mpirun.returncode, output.read()


def _work_and_leave(outputs: Sequence[int], work: Callable[[], int], environ: Mapping[str, str]) -> None:
    """Work as a program that was started by hand, with these for stdout and stderr; never return."""
    status = 1
    try:
        os.setsid()
        gc.freeze()  # else its collections go through all that the test's process has imported
        torch.set_num_threads(1)  # OpenMP's other threads are not copied by a fork
        for stream, output in enumerate(outputs, 1):
            os.dup2(output, stream)
        sys.stdin, sys.stdout, sys.stderr = open(os.devnull), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(ROOT)
        status = work()
    except SystemExit as leaving:  # argparse
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def received(value: object) -> Any:
    """Return what another rank gets of a value."""
    sent: list[np.ndarray[Any, Any]] = []
    messages.send(value, lambda piece: sent.append(piece.copy()))
    left = iter(sent)

    def receive_bytes(piece: np.ndarray[Any, Any]) -> None:
        piece[:] = next(left)

    got = messages.receive(receive_bytes)
    assert not list(left)
    return got


def succeed(ranks: int, *words: str, comm: str = "torch") -> str:
    """Run `summit-train ...`, which must exit 0; its output. See `command`."""
    status, output = command(ranks, *words, comm=comm)
    assert status == 0, output
    return output


def csv_rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def lines(text: str) -> Sequence[str]:
    """The lines of a text that are not empty."""
    return [line for line in text.splitlines() if line.strip()]


def bench_script(name: str) -> ModuleType:
    """The script NAME.py of bench/ or papers/, which are no packages, as a module; scripts import their neighbours."""
    folder = next(folder for folder in ("bench", "papers") if (ROOT / folder / f"{name}.py").exists())
    if str(ROOT / folder) not in sys.path:
        sys.path.append(str(ROOT / folder))
    return importlib.import_module(name)
