"""tests/install_timm.sh with a stand-in for Python: it installs timm alone, where it can, and never stops tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

SCRIPT = Path(__file__).with_name("install_timm.sh")


def install(folder: Path, found: int, pip: str) -> tuple[int, str]:
    """Exit status and output with a Python that says `found` (0: there) and then runs `pip` in the shell."""
    python = folder / "python"
    python.write_text(f'#!/bin/bash\n[[ $1 == -c ]] && exit {found}\necho "$*" >>calls\n{pip}\n')
    python.chmod(0o755)
    done = subprocess.run(["bash", str(SCRIPT), str(python)], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_nothing_is_done_where_it_is_there(tmp_path: Path) -> None:
    assert install(tmp_path, found=0, pip="exit 9") == (0, "")
    assert not (tmp_path / "calls").exists()


def test_it_is_installed_without_what_it_wants(tmp_path: Path) -> None:
    status, output = install(tmp_path, found=1, pip="exit 0")
    assert status == 0 and "installing timm" in output and "could not" not in output
    assert (tmp_path / "calls").read_text().endswith("install --no-deps -c jobs/constraints.txt timm\n")


def test_a_machine_that_cannot_says_why_and_goes_on(tmp_path: Path) -> None:
    status, output = install(tmp_path, found=1, pip="echo ERROR: No matching distribution >&2; exit 1")
    assert status == 0
    assert output.splitlines()[-1] == "tests: timm could not be installed: ERROR: No matching distribution"
