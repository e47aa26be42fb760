"""tests/install_slurm.sh with stand-ins for apt-get and dpkg-query: it installs where it can, and never stops tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("install_slurm.sh")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root installs anything")


def install(folder: Path, **programs: str) -> tuple[int, str]:
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
        ["bash", str(SCRIPT)], cwd=folder, env={"PATH": str(tools)}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_nothing_is_done_where_the_packages_are_there(tmp_path: Path) -> None:
    there = "for name in slurm-wlm munge libpmix-dev; do echo installed; done"
    assert install(tmp_path, apt_get="echo called; exit 9", dpkg_query=there) == (0, "")


def test_nothing_is_done_on_other_systems(tmp_path: Path) -> None:
    assert install(tmp_path) == (0, "")


@needs_root
def test_the_packages_are_installed_after_an_update_where_the_lists_are_old(tmp_path: Path) -> None:
    apt = 'echo "$*" >>calls; case "$*" in *update*) : >updated ;; *) [[ -e updated ]] ;; esac'
    status, output = install(tmp_path, apt_get=apt, dpkg_query="echo not-installed; exit 1")
    assert status == 0 and "installing slurm-wlm munge libpmix-dev" in output and "could not" not in output
    first, second, third = (tmp_path / "calls").read_text().splitlines()
    assert first == third and first.endswith("install --no-install-recommends slurm-wlm munge libpmix-dev")
    assert second == "-q update"


@needs_root
def test_a_machine_that_cannot_says_why_and_goes_on(tmp_path: Path) -> None:
    apt = "echo Reading package lists...; echo 'E: Unable to locate package munge' >&2; exit 100"
    status, output = install(tmp_path, apt_get=apt, dpkg_query="exit 1")
    assert status == 0
    assert output.splitlines()[-1] == "tests: Slurm could not be installed: E: Unable to locate package munge"
