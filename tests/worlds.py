"""Helpers of tests that start the program: alone, or as ranks under mpirun."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from summit_train.__main__ import main
from summit_train.core.comm import BACKENDS as BACKENDS
from summit_train.core.processes import ROOT_ALLOWED, find_mpirun
from summit_train.training.step import TrainStep

ROOT = Path(__file__).resolve().parents[1]


# Ends what hangs, and nothing else: many times what any of it takes on a busy machine.
PATIENCE_S = 600.0

Said = tuple[int, str, str]
Say = Callable[..., Said]


needs_ranks = pytest.mark.skipif(
    find_mpirun() is None or importlib.util.find_spec("horovod") is None,
    reason="needs mpirun and Horovod; `make setup` installs both",
)


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


def start(
    ranks: int,
    *words: str,
    env: Mapping[str, str] | None = None,
    last: Sequence[str] = (),
    errors: int = subprocess.STDOUT,
) -> subprocess.Popen[str]:
    """Start `python ...` in a process group of its own, on `ranks` ranks under mpirun; 0: without a launcher.

    last: what one more rank, the last one, is started with instead. errors: where its stderr goes.
    """
    python, more = [sys.executable, *words], dict(env or {})
    if ranks:
        python = [find_mpirun() or "mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *python]
        python += [":", "-np", "1", sys.executable, *last] if last else []
        more |= ROOT_ALLOWED if os.geteuid() == 0 else {}
    return subprocess.Popen(
        python,
        env=environment(**more),
        cwd=ROOT,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )


def run(ranks: int, *words: str, env: Mapping[str, str] | None = None, last: Sequence[str] = ()) -> tuple[int, str]:
    """Run `python ...` on `ranks` ranks to its end: (exit status, output)."""
    process = start(ranks, *words, env=env, last=last)
    try:
        output, _ = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{' '.join(words)} on {ranks} ranks did not end within {PATIENCE_S:g} s:\n{output}")
    return process.returncode, output


def command(ranks: int, *words: str, comm: str = "torch") -> tuple[int, str]:
    """Run `summit-train ...` on `ranks` ranks to its end: over Horovod under mpirun, over torch in forked processes.

    0: without a launcher. (Exit status, output.)
    """
    if comm == "horovod":
        return run(ranks, "-m", "summit_train", *words, env={"SUMMIT_TRAIN_COMM": comm})
    return forked(ranks, partial(main, words))


# Without the reports, which take longer to draw than so few steps to train. One process a rank for all, as importing
# torch takes longer still.
_TRAIN = """
import json, sys
from tests.worlds import main_without_reports
sys.exit(max(main_without_reports(["train", *words]) for words in json.loads(sys.argv[1])))
"""


def train(ranks: int, spec: Path | str, *words: str, comm: str = "torch") -> str:
    """Run `summit-train train SPEC ...`, which must exit 0, without its report; the output. See `command`."""
    return _trained(ranks, [[str(spec), *words]], comm)


def train_each(ranks: int, specs: Iterable[Path], comm: str = "torch") -> None:
    """Train one spec after the other, without their reports."""
    _trained(ranks, [[str(spec)] for spec in specs], comm)


def _trained(ranks: int, runs: Sequence[Sequence[str]], comm: str) -> str:
    if comm == "horovod":
        # As many threads as a forked rank has: the last bits of a sum depend on it.
        env = {"SUMMIT_TRAIN_COMM": comm, "OMP_NUM_THREADS": "1"}
        status, output = run(ranks, "-c", _TRAIN, json.dumps(runs), env=env)
        assert status == 0, output
        return output
    outputs = []
    for words in runs:
        status, output = forked(ranks, partial(main_without_reports, ["train", *words]))
        assert status == 0, output
        outputs.append(output)
    return "".join(outputs)


def main_without_reports(words: Sequence[str]) -> int:
    """Run `summit-train ...` in this process, which draws no report from here on."""
    page = ModuleType("summit_train.report.page")
    page.write_report = lambda runs, path: path  # type: ignore[attr-defined]
    sys.modules[page.__name__] = page
    return main(words)


def train_signalled(spec: Path | str, number: int, step: int, *words: str, kind: type = TrainStep) -> tuple[int, str]:
    """Run `summit-train train SPEC ...` alone, which gets a signal as it begins update `step`, counted from 1."""
    honest = kind.__call__

    def call(self: Any, batches: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        if batches[0].step + 1 == step:
            os.kill(os.getpid(), number)
        return honest(self, batches, *arguments, **options)

    def work() -> int:
        kind.__call__ = call  # type: ignore[assignment]
        return main_without_reports(["train", str(spec), *words])

    return forked(0, work)


def forked(ranks: int, work: Callable[[], int], *, grace_s: float = 60) -> tuple[int, str]:
    """Do `work` on forked ranks, which need not import torch again, joined as torchrun joins them; 0: in one child.

    The exit status is that of the first rank that failed; the others then have `grace_s` to end by themselves.
    """
    for module in ("summit_train.cli.pipeline", "torch._dynamo", "torch.distributed.nn.functional"):
        importlib.import_module(module)  # what every training run imports
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
                _work_and_leave(output.fileno(), work, launcher | joined if store else {})
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


def _work_and_leave(output: int, work: Callable[[], int], launcher: Mapping[str, str]) -> None:
    """Work as a program that was started by hand, with one stream for all output; never return."""
    status = 1
    try:
        os.setsid()
        torch.set_num_threads(1)  # OpenMP's other threads are not copied by a fork
        forkserver._forkserver.__init__()  # type: ignore[attr-defined]  # the parent's is no child of this process
        for stream in (1, 2):
            os.dup2(output, stream)
        sys.stdin, sys.stdout, sys.stderr = open(os.devnull), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        fresh = environment(**launcher)
        os.environ.clear()
        os.environ.update(fresh)
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


def succeed(ranks: int, *words: str, comm: str = "torch") -> str:
    """Run `summit-train ...`, which must exit 0; its output. See `command`."""
    status, output = command(ranks, *words, comm=comm)
    assert status == 0, output
    return output


def lines(text: str) -> Sequence[str]:
    """The lines of a text that are not empty."""
    return [line for line in text.splitlines() if line.strip()]


def bench_script(name: str) -> ModuleType:
    """The script NAME.py of bench/ or papers/, which are no packages, as a module that other scripts can import."""
    path = next(path for folder in ("bench", "papers") if (path := ROOT / folder / f"{name}.py").exists())
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module
