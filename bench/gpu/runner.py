"""Run one part of bench/gpu.sh as a process with a time limit, and say how it ended."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parts import HERE, Part

_ROOT = HERE.parents[1]


SLOWER = 8  # a rehearsal's limits are so many times longer: a CPU has other work

# Module -> package of what the parts import, besides torch.
_NEEDED = {"PIL": "pillow", "yaml": "pyyaml"} | {
    name: name
    for name in ("av", "hypothesis", "jinja2", "matplotlib", "numpy", "pydantic", "pytest", "rich", "tensorboard")
}


@dataclass(frozen=True)
class Ended:
    """How a part ended. values: its JSON file's, empty where it wrote none."""

    part: Part
    seconds: float
    problem: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def checks(self) -> list[dict[str, Any]]:
        """Return its checks as JSON objects."""
        checks: list[dict[str, Any]] = self.values.get("checks", [])
        return checks

    @property
    def passes(self) -> bool:
        """Return whether it came to its end and every check passes that is not only wanted."""
        return self.problem is None and all(check["passes"] or check["wanted"] for check in self.checks)

    def as_text(self) -> str:
        """Return a line for people."""
        failed = [check["name"] for check in self.checks if not check["passes"] and not check["wanted"]]
        said = self.problem or (f"FAILED: {'; '.join(failed)}" if failed else f"{len(self.checks)} checks pass")
        return f"{said} ({self.seconds:.0f} s)"


def no_gpu() -> str | None:
    """Return why no GPU can be measured with this Python, or None."""
    if importlib.util.find_spec("torch") is None:
        return "this Python has no torch; choose another one by PYTHON=..."
    import torch

    if torch.cuda.is_available():
        return None
    return "torch sees no NVIDIA GPU" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"


def missing_packages() -> list[str]:
    """Return the packages that this Python lacks."""
    return sorted(package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None)


def run(part: Part, out: Path, rehearse: bool, left_s: float) -> Ended:
    """Run a part, for `left_s` seconds at most. What it printed is in OUT/NAME.log."""
    limit = min(part.limit_s * (SLOWER if rehearse else 1), left_s)
    if limit < 5:
        return Ended(part, 0.0, "left out: the time of all parts is over")
    written = out / f"{part.name}.json"
    written.unlink(missing_ok=True)
    log, began = out / f"{part.name}.log", time.monotonic()
    status = _status(part.command(out, rehearse, limit), log, limit)
    seconds, values = time.monotonic() - began, {}
    if written.is_file():
        values = json.loads(written.read_text(encoding="utf-8"))
    return Ended(part, seconds, _problem(status, limit, values, log), values)


def _status(command: list[str], log: Path, limit_s: float) -> int | None:
    """Return the exit status of a command, None where it was stopped, with all of its processes, at the limit."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process and of those that it started."""
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _problem(status: int | None, limit_s: float, values: dict[str, Any], log: Path) -> str | None:
    """Return what a person must know about a part that did not come to its end; failed checks are no problem."""
    if status is None:
        return f"STOPPED after {limit_s:.0f} s, its limit; see {log.name}"
    if status == 0 and values:
        return None
    failed = [check for check in values.get("checks", []) if not check["passes"] and not check["wanted"]]
    if status == 1 and failed and "Traceback" not in log.read_text(encoding="utf-8", errors="replace"):
        return None
    return f"FAILED with exit status {status}: {_last_line(log)}"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
