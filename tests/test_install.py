"""tests/install_packages.sh and install_oracles.sh with stand-ins: they install where they can and stop no test."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PACKAGES, ORACLES = (Path(__file__).with_name(f"install_{name}.sh") for name in ("packages", "oracles"))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root installs anything")


def install(what: str, folder: Path, **programs: str) -> tuple[int, str]:
    """Exit status and output in an empty folder, with nothing on PATH but the shell's tools and these programs."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("bash", "cat", "grep", "mkdir", "tail"):
        (tools / name).symlink_to(shutil.which(name) or name)
    for name, text in programs.items():
        program = tools / name.replace("_", "-")
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    done = subprocess.run(
        ["bash", str(PACKAGES), what], cwd=folder, env={"PATH": str(tools)}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_nothing_is_done_where_the_packages_are_there_or_on_other_systems(tmp_path: Path) -> None:
    there = "for name in slurm-wlm munge libpmix-dev; do echo installed; done"
    for name, programs in ("a", {"apt_get": "echo called; exit 9", "dpkg_query": there}), ("b", {}):
        (tmp_path / name).mkdir()
        assert install("slurm", tmp_path / name, **programs) == (0, "")


@needs_root
def test_the_packages_are_installed_after_an_update_where_the_lists_are_old(tmp_path: Path) -> None:
    apt = 'echo "$*" >>calls; case "$*" in *update*) : >updated ;; *) [[ -e updated ]] ;; esac'
    status, output = install("slurm", tmp_path, apt_get=apt, dpkg_query="echo not-installed; exit 1")
    assert status == 0 and "installing slurm-wlm munge libpmix-dev" in output and "could not" not in output
    first, second, third = (tmp_path / "calls").read_text().splitlines()
    assert first == third and first.endswith("install --no-install-recommends slurm-wlm munge libpmix-dev")
    assert second == "-q update"
    for file in (tmp_path / "calls", tmp_path / "updated", *(tmp_path / "bin").iterdir()):
        file.unlink()
    (tmp_path / "bin").rmdir()
    install("chromium", tmp_path, apt_get=apt, dpkg_query="exit 1")
    assert (tmp_path / "calls").read_text().splitlines()[0].endswith("--no-install-recommends chromium")


@needs_root
def test_a_machine_that_cannot_install_slurm_says_why(tmp_path: Path) -> None:
    apt = "echo Reading package lists...; echo 'E: Unable to locate package munge' >&2; exit 100"
    status, output = install("slurm", tmp_path, apt_get=apt, dpkg_query="exit 1")
    assert status == 0
    assert output.splitlines()[-1] == "tests: slurm could not be installed: E: Unable to locate package munge"


def install_oracles(folder: Path, found: int, pip: str) -> tuple[int, str]:
    """Exit status and output with a Python that says `found` (0: there) and then runs `pip` in the shell."""
    python = folder / "python"
    python.write_text(f'#!/bin/bash\n[[ $1 == -c ]] && exit {found}\necho "$*" >>calls\n{pip}\n')
    python.chmod(0o755)
    done = subprocess.run(["bash", str(ORACLES), str(python)], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_nothing_is_done_where_the_oracles_are_there(tmp_path: Path) -> None:
    assert install_oracles(tmp_path, found=0, pip="exit 9") == (0, "")
    assert not (tmp_path / "calls").exists()


def test_timm_is_installed_without_what_it_depends_on(tmp_path: Path) -> None:
    """transformers with it, which depends on no torch."""
    status, output = install_oracles(tmp_path, found=1, pip="exit 0")
    assert status == 0 and "installing timm" in output and "could not" not in output
    timm, transformers = (tmp_path / "calls").read_text().splitlines()
    assert timm.endswith("install --no-deps -c jobs/constraints.txt timm")
    assert transformers.endswith("install -c jobs/constraints.txt transformers")


def test_a_machine_that_cannot_install_an_oracle_says_why(tmp_path: Path) -> None:
    status, output = install_oracles(tmp_path, found=1, pip="echo ERROR: No matching distribution >&2; exit 1")
    assert status == 0
    reasons = [line for line in output.splitlines() if "could not" in line]
    assert reasons == [
        f"tests: {name} could not be installed: ERROR: No matching distribution" for name in ("timm", "transformers")
    ]


def test_what_flux_and_pbs_need_never_stops_the_tests(tmp_path: Path) -> None:
    """Nothing is done where it is there; what fails is said."""
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho "$*" >>calls\necho no network\nexit 1\n')
    python.chmod(0o755)
    flux, pbs = (Path(__file__).with_name(f"install_{name}.sh") for name in ("flux", "pbs"))
    done = subprocess.run(["bash", flux, python], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "tests: flux-python could not be installed: no network\n")
    assert "--no-deps --target build/flux flux-python==" in (tmp_path / "calls").read_text()
    (tmp_path / "build/flux/flux").mkdir(parents=True)
    (tmp_path / "build/slurm_torque/usr").mkdir(parents=True)
    for script in (flux, pbs):
        done = subprocess.run(["bash", script, "false"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
