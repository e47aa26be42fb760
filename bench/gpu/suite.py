"""The tests that are marked gpu, all of them: none may fail, none may be skipped."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import torch
from outcome import Check, Outcome, fact, run_part

ROOT = Path(__file__).resolve().parents[2]
_COUNTS = ("tests", "failures", "errors", "skipped")


def suite(args: argparse.Namespace, device: torch.device, outcome: Outcome) -> None:
    """Run the tests and count how they end."""
    counts, words = run_tests(gpu_files(ROOT / "tests"))
    outcome.values["tests"] = counts
    outcome.values["failed"] = words
    judge(counts, device, outcome)


def gpu_files(folder: Path) -> list[Path]:
    """Return the files that have a test for a GPU. The others need not be importable with this Python."""
    return [path for path in sorted(folder.rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]


def run_tests(files: list[Path]) -> tuple[dict[str, int], list[str]]:
    """Run the gpu tests of the files by pytest; return how many ended in which way, and what failed or was skipped."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rs", "-p", "no:cacheprovider"]
        # The options of setup.cfg but --strict-config, which wants pytest-timeout.
        command += ["-o", "addopts=--import-mode=importlib --strict-markers", f"--junitxml={written}", *map(str, files)]
        status = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode
        if not written.is_file():
            raise RuntimeError(f"pytest ended with {status} before it ran a test")
        return read_results(written)


def read_results(path: Path) -> tuple[dict[str, int], list[str]]:
    """Read a JUnit file: the counts, and one line for each test that failed or was skipped."""
    counts, words = dict.fromkeys(_COUNTS, 0), []
    for suite_ in ElementTree.parse(path).getroot().iter("testsuite"):
        for name in _COUNTS:
            counts[name] += int(suite_.get(name, 0))
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        for kind in ("failure", "error", "skipped"):
            if (found := case.find(kind)) is not None:
                words.append(f"{case.get('classname')}::{case.get('name')}: {kind}: {found.get('message')}")
    return counts, words


def judge(counts: dict[str, int], device: torch.device, outcome: Outcome) -> None:
    """Check the counts; a rehearsal only collects, because every test wants a GPU."""
    outcome.add(fact("there are tests", counts["tests"] > 0, f"{counts['tests']} tests"))
    outcome.add(Check("tests that fail", counts["failures"] + counts["errors"], 0))
    if device.type == "cuda":
        outcome.add(Check("tests that are skipped", counts["skipped"], 0))
    else:
        outcome.values["skipped"] = {"tests on a GPU": "no GPU"}


if __name__ == "__main__":
    sys.exit(run_part(__doc__, suite))
