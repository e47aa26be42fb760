"""jobs/setup.sh where something is missing: it says what to install and ends with 2 before it fetches anything."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.worlds import PATIENCE_S

ROOT = Path(__file__).parents[1]
KERNELS = "summit_train/models/fast/native"
SCRIPTS = sorted([*ROOT.glob("jobs/*.sh"), *ROOT.glob("tests/*.sh"), ROOT / ".ci" / "run"])
TOOLS = ("bash", "cat", "cp", "dirname", "grep", "head", "mkdir", "mktemp", "paste", "printf", "rm", "sed", "sha256sum",
         "cut", "tail", "tr", "wc")  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what set-up reads, beside a folder `bin` that holds the shell's tools and nothing else."""
    repo = tmp_path / "repo"
    (tmp_path / "bin").mkdir()
    shutil.copytree(ROOT / "jobs", repo / "jobs")
    shutil.copytree(ROOT / KERNELS, repo / KERNELS, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, repo / name)
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, tool
        (tmp_path / "bin" / tool).symlink_to(found)
    return repo


def set_up(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run set-up with the tools of `checkout` alone on PATH."""
    return subprocess.run(
        ["bash", "jobs/setup.sh"],
        cwd=checkout,
        env={"PATH": str(checkout.parent / "bin"), "HOME": str(checkout.parent), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def add_program(checkout: Path, name: str, text: str) -> Path:
    """A shell script on the PATH that set-up sees."""
    path = checkout.parent / "bin" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_shell_accepts_every_script() -> None:
    for script in SCRIPTS:
        done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), script


COMPILES = 'while [ "$1" != -o ]; do shift; done; echo > "$2"'
OWN = {"PYTHON": sys.executable}
# What is missing -> programs on PATH, environment, and what is said.
MISSING: dict[str, tuple[dict[str, str], dict[str, str], tuple[str, ...]]] = {
    "python": ({}, {}, ("no Python >= 3.10", "apt-get install python3 ")),
    "new python": ({"python3": "exit 1"}, {}, ("no Python >= 3.10",)),  # an old one's answer to the version question
    "compiler": ({}, OWN, ("no C++ compiler that knows C++20", "apt-get install g++ make")),
    "new compiler": ({"g++": "echo 'error: unrecognized command-line option -std=c++20' >&2; exit 1"}, OWN,
                     ("g++ 11 or newer",)),
    "headers": ({"python3": 'case "$2" in *Python.h*) exit 1;; *) exit 0;; esac'}, {}, ("Python.h", "python3-dev")),
    "make": ({"c++": COMPILES}, OWN, ("no make on PATH",)),
    "ensurepip": ({"c++": COMPILES, "make": "exit 0",
                   "python3": 'case "$2" in *"import venv"*) exit 1;; *) echo Python 3.12.0;; esac'}, {},
                  ("apt-get install python3-venv",)),
    "yes or no": ({}, OWN | {"HOROVOD": "off"}, ("HOROVOD must be yes or no, got 'off'",)),
}  # fmt: skip


@pytest.mark.parametrize("missing", MISSING)
def test_what_is_missing_is_named_with_2_before_anything_is_made(checkout: Path, missing: str) -> None:
    programs, environment, said = MISSING[missing]
    for name, text in programs.items():
        add_program(checkout, name, text)
    done = set_up(checkout, **environment)
    assert done.returncode == 2 and all(part in done.stderr for part in said), done.stderr
    assert not (checkout / ".venv").exists()


def test_without_horovod_neither_compiler_nor_headers_nor_mpi_are_asked_for(checkout: Path) -> None:
    """The Python here cannot make an environment, which is what set-up looks at next."""
    add_program(checkout, "python3", 'case "$2" in *Python.h* | *"import venv"*) exit 1;; *) exit 0;; esac')
    done = set_up(checkout, HOROVOD="no")
    assert done.returncode == 2
    assert "cannot make virtual environments" in done.stderr and done.stderr.count("setup: ") == 1


def test_a_folder_that_is_no_environment_is_left_alone(checkout: Path) -> None:
    add_program(checkout, "c++", COMPILES)
    add_program(checkout, "make", "exit 0")
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "mine").write_text("keep")
    done = set_up(checkout, PYTHON=sys.executable)
    assert done.returncode == 2
    assert "no virtual environment" in done.stderr
    assert (checkout / ".venv" / "mine").read_text() == "keep"


def test_no_network(checkout: Path) -> None:
    """An environment is there, but no index answers: nothing listens on port 9 of this host."""
    add_program(checkout, "c++", COMPILES)
    add_program(checkout, "make", "exit 0")
    venv.create(checkout / ".venv", with_pip=False)
    packages = next((checkout / ".venv" / "lib").glob("python*/site-packages"))
    pip = importlib.util.find_spec("pip")
    assert pip is not None and pip.origin is not None
    (packages / "pip").symlink_to(Path(pip.origin).parent)
    done = set_up(
        checkout,
        PYTHON=sys.executable,
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_RETRIES="0",
        PIP_NO_CACHE_DIR="1",
    )
    assert done.returncode == 2, done.stderr
    assert "installing PyTorch: the Python package index cannot be reached" in done.stderr
    assert "PIP_INDEX_URL" in done.stderr
    # What was begun is taken up again, not taken for done.
    assert not (checkout / ".venv" / ".setup").exists()


@pytest.mark.parametrize("changed", ["setup.cfg", "jobs/build_horovod.sh", f"{KERNELS}/kernels.cpp"])
def test_nothing_to_do_once_it_is_done(checkout: Path, changed: str) -> None:
    python = add_program(checkout, "python", "exit 1")
    (checkout / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(python, checkout / ".venv" / "bin" / "python")
    names = ("jobs/setup.sh", "jobs/build_horovod.sh", "jobs/constraints.txt", "setup.cfg", "pyproject.toml")
    names += (f"{KERNELS}/*.[ch]pp",)
    script = f"{{ cat {' '.join(names)}; echo '{checkout}    yes'; }} | sha256sum | cut -d' ' -f1 > .venv/.setup"
    subprocess.run(["bash", "-c", script], cwd=checkout, check=True)
    done = set_up(checkout)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert set_up(checkout, HOROVOD="no").returncode == 2  # another environment: it begins, and finds no Python
    with (checkout / changed).open("a") as file:
        file.write("# changed\n")
    assert set_up(checkout).returncode == 2  # it begins, and finds no Python


def test_what_the_scripts_import_is_there() -> None:
    imports = [
        (module, name.strip())
        for script in sorted((ROOT / "jobs").glob("*.sh"))
        for module, names in re.findall(r"from (summit_train[\w.]*) import ([\w, ]+)", script.read_text())
        for name in names.split(",")
    ]
    assert ("summit_train.cluster.doctor", "check_allreduce") in imports
    for module, name in imports:
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"
