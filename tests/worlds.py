"""Helpers of tests that start the program: alone, or as ranks under mpirun."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from summit_train.__main__ import main

ROOT = Path(__file__).resolve().parents[1]


Said = tuple[int, str, str]
Say = Callable[..., Said]


def mpirun() -> str | None:
    """The mpirun that belongs to this Python, else the one on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


needs_ranks = pytest.mark.skipif(
    mpirun() is None or importlib.util.find_spec("horovod") is None,
    reason="needs mpirun and Horovod; `make setup` installs both",
)


def environment(**more: str) -> dict[str, str]:
    """This process's environment without any launcher's traces, one thread a rank."""
    launchers = ("OMPI_", "PMI", "SLURM_", "JSM_", "MV2_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more


def program(ranks: int, *words: str, last: Sequence[str] = ()) -> list[str]:
    """The command line of `python ...` on `ranks` ranks; 0: without a launcher.

    last: what one more rank, the last one, is started with instead.
    """
    python = [sys.executable, *words]
    if ranks == 0:
        return python
    launcher = mpirun()
    assert launcher is not None
    more = [":", "-np", "1", sys.executable, *last] if last else []
    return [launcher, "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *python, *more]


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
    ranks: int, *words: str, env: Mapping[str, str] | None = None, last: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start `python ...` on `ranks` ranks in a process group of its own; its output is one stream."""
    more = dict(env or {})
    if ranks and os.geteuid() == 0:
        more |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.Popen(
        program(ranks, *words, last=last),
        env=environment(**more),
        cwd=ROOT,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run(
    ranks: int,
    *words: str,
    timeout: float = 240,
    env: Mapping[str, str] | None = None,
    last: Sequence[str] = (),
) -> tuple[int, str]:
    """Run `python ...` on `ranks` ranks to its end: (exit status, output)."""
    process = start(ranks, *words, env=env, last=last)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        pytest.fail(f"{' '.join(words)} on {ranks} ranks did not end within {timeout:g} s:\n{output}")
    return process.returncode, output


def command(ranks: int, *words: str, timeout: float = 240) -> tuple[int, str]:
    """Run `summit-train ...` on `ranks` ranks to its end."""
    return run(ranks, "-m", "summit_train", *words, timeout=timeout)


def succeed(ranks: int, *words: str) -> str:
    """Run `summit-train ...`, which must exit 0; its output."""
    status, output = command(ranks, *words)
    assert status == 0, output
    return output


def lines(text: str) -> Sequence[str]:
    """The lines of a text that are not empty."""
    return [line for line in text.splitlines() if line.strip()]


def bench_script(name: str) -> ModuleType:
    """The script bench/NAME.py as a module, by the name that scripts beside it import; the folder is no package."""
    path, name = ROOT / "bench" / f"{name}.py", name.rpartition("/")[2]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module
