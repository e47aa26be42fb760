"""tests/install.sh with stand-ins: it installs where it can, asks nobody twice, and stops no test."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("install.sh")
TOOLS = ("bash", "cat", "cksum", "find", "grep", "mkdir", "rm", "sed", "tail")
PINS = "timm==1.0\ntransformers==2.0\n"
ABSENT = "echo not-installed; exit 1"
# Python's -c asks for a version; what else it is told are pip's words.
LACKS = '[[ $1 == -c ]] && exit 1; echo "$*" >>calls; '
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root installs Debian's packages")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder but for the pins, with nothing on PATH but the shell's tools."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/constraints.txt").write_text(PINS)
    (tmp_path / "bin").mkdir()
    for name in TOOLS:
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or name)
    return tmp_path


def install(folder: Path, *what: str, variables: dict[str, str] | None = None, **programs: str) -> str:
    """The output of the script, which must exit 0, with these programs on PATH too."""
    for name, text in programs.items():
        program = folder / "bin" / name.replace("_", "-")
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    done = subprocess.run(
        ["bash", str(SCRIPT), str(folder / "bin/python"), *what],
        cwd=folder, env={"PATH": str(folder / "bin"), **(variables or {})}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def calls(folder: Path) -> Sequence[str]:
    """What the stand-ins were told so far."""
    file = folder / "calls"
    return file.read_text().splitlines() if file.exists() else []


def test_nothing_is_done_where_all_is_there(folder: Path) -> None:
    for there in ("slurm_torque/usr", "flux/flux_python-0.88.0.dist-info", "flux/ply-3.11.dist-info"):
        (folder / "build" / there).mkdir(parents=True)
    found = 'for name in "${@:3}"; do echo installed; done'
    every = ("slurm", "pbs", "chromium", "timm", "transformers", "flux")
    assert install(folder, *every, apt_get="exit 9", dpkg_query=found, python="[[ $1 == -c ]]") == ""


def test_debians_packages_are_left_out_elsewhere(folder: Path) -> None:
    assert install(folder, "slurm", "pbs", "chromium") == ""


def test_the_version_wanted_is_the_pinned_one(folder: Path) -> None:
    asked = 'echo "${@: -2}" >>calls; [[ $4 == 1.0 ]]'
    install(folder, "timm", "transformers", python=asked)
    assert calls(folder)[:2] == ["timm 1.0", "transformers 2.0"]
    assert calls(folder)[2:] == ["jobs/constraints.txt transformers"], "pip, of what is another version"


@needs_root
def test_packages_are_installed_after_an_update_where_the_lists_are_old(folder: Path) -> None:
    apt = 'echo "$*" >>calls; case "$*" in *update*) : >updated ;; *) [[ -e updated ]] ;; esac'
    said = install(folder, "slurm", apt_get=apt, dpkg_query=ABSENT)
    assert said == "tests: installing slurm (the output goes to build/slurm.log)\n"
    first, second, third = calls(folder)
    assert first == third and first.endswith("install --no-install-recommends slurm-wlm munge libpmix-dev")
    assert second == "-q update"
    install(folder, "chromium")
    assert calls(folder)[-1].endswith("--no-install-recommends chromium")


@needs_root
def test_slurms_qsub_is_unpacked_and_not_installed(folder: Path) -> None:
    apt = 'case "$*" in *download*) : >slurm-wlm-torque_1.deb ;; *) echo "$*" >>calls ;; esac'
    install(folder, "pbs", apt_get=apt, dpkg_query=ABSENT, dpkg='mkdir usr; echo "$*" >>../../calls')
    assert (folder / "build/slurm_torque/usr").is_dir() and calls(folder)[1] == "-x slurm-wlm-torque_1.deb ."
    assert calls(folder)[0].endswith("install --no-install-recommends libslurm-perl libswitch-perl")


@needs_root
def test_a_machine_that_cannot_install_slurm_says_why(folder: Path) -> None:
    apt = "echo Reading package lists...; echo 'E: Unable to locate package munge' >&2; exit 100"
    said = install(folder, "slurm", apt_get=apt, dpkg_query=ABSENT)
    assert said.splitlines()[-1] == "tests: slurm could not be installed: E: Unable to locate package munge"


def test_python_packages_bring_no_torch(folder: Path) -> None:
    """transformers depends on none."""
    said = install(folder, "timm", "transformers", "flux", python=f"{LACKS} exit 0")
    assert said.count("installing") == 3 and "could not" not in said
    timm, transformers, flux = calls(folder)
    assert timm.endswith("install --no-deps -c jobs/constraints.txt timm")
    assert transformers.endswith("install -c jobs/constraints.txt transformers")
    assert flux.endswith("install --no-deps --target build/flux --upgrade flux-python==0.88.0 ply==3.11")


def test_what_cannot_be_had_is_asked_for_once_a_day_and_always_named(folder: Path) -> None:
    why = "tests: timm could not be installed: ERROR: No matching distribution"
    python = f"{LACKS} echo ERROR: No matching distribution >&2; exit 1"
    for _ in range(2):
        assert install(folder, "timm", python=python).splitlines()[-1] == why
        assert len(calls(folder)) == 1
    install(folder, "timm", variables={"CI": "true"})
    assert len(calls(folder)) == 2
    (folder / "jobs/constraints.txt").write_text(f"{PINS}torch==2.0\n")
    install(folder, "timm")
    assert len(calls(folder)) == 3
    failed = folder / "build/timm.failed"
    a_day_ago = failed.stat().st_mtime - 24 * 3600 - 60
    os.utime(failed, (a_day_ago, a_day_ago))
    assert "could not" not in install(folder, "timm", python=f"{LACKS} exit 0")
    assert len(calls(folder)) == 4 and not failed.exists()
