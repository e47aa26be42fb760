"""A run's folder: its lock, its checkpoints by name, and job/, for what a job script and its ranks tell each other."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import is_locked, naming, read_file, remove_leftovers, take_lock
from summit_train.core.text import from_json

# By these a job tells its ranks to check the nodes before the first step, and to name the nodes of slow ranks as bad.
CHECK_NODES = "SUMMIT_TRAIN_CHECK_NODES"
EXCLUDE_SLOW = "SUMMIT_TRAIN_EXCLUDE_SLOW"
# The file in which a rank that fails leaves the reason: RUN/job/failure.BEGIN.RESTART, another for each start, so that
# the ranks of an earlier one do not speak for this one. BEGIN: when the script began, in seconds since 1970.
FAILURE = "SUMMIT_TRAIN_FAILURE"
ORIGIN_FILE = "origin.json"  # the checkpoint of another run that this one begins with
_MOST_WAITED_S = 100


def wait_for_lock(run_path: Path, tick: Callable[[], None]) -> None:
    """Wait up to 100 s, in a restart within a job, for the lock of a lost node; call `tick` each second.

    The file system's server frees it after some time, NFS after 90 s.
    """
    until = time.monotonic() + (_MOST_WAITED_S if FAILURE in os.environ else 0)
    while time.monotonic() < until and is_locked(run_path / "lock"):
        tick()
        time.sleep(1)


class RunLock(AbstractContextManager["RunLock"]):
    """Holds a run folder for this process within the block.

    It is a POSIX record lock on the file `lock`, so it ends with the process, however it ends. It belongs to the file,
    not to its name: if `lock` is deleted, another run can take the directory.
    """

    def __init__(self, run_path: Path) -> None:
        run_path.mkdir(parents=True, exist_ok=True)
        self._path = run_path / "lock"
        self._file = self._take()

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def check(self) -> None:
        """Take the directory again where `lock` was deleted. Raises RunFailed if another run has been faster."""
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                return
            wrong = f"{self._path} was deleted or replaced while this run was using the directory"
            other = f"another run has taken it ({self._path.read_text(encoding='utf-8').strip()})"
            raise RunFailed(f"{wrong}, and {other}; this one stops here")
        except FileNotFoundError:
            self._file.close()
        try:
            self._file = self._take()
        except UserError as error:
            raise RunFailed(str(error)) from error

    def _take(self) -> IO[str]:
        file = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115  (closed in __exit__)
        try:
            take_lock(file, wait=False)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            wrong = f"{self._path.parent}: another run is using this directory ({holder})"
            what = f"{wrong}; wait for it, or give this one another name (name=...)"
            raise (RunFailed if FAILURE in os.environ else UserError)(what) from error
        file.truncate(0)
        with naming(self._path):
            os.write(file.fileno(), f"{os.uname().nodename}, process {os.getpid()}\n".encode())
        return file


class CheckpointError(UserError):
    """A checkpoint cannot be read, or not be used for this run."""


def learner_path(path: Path, number: int) -> Path:
    """Return the path of the file with one learner's state, which a checkpoint has if learners differ."""
    return path.with_name(f"{path.stem}.learner_{number:04d}.pt")


def digest_path(path: Path) -> Path:
    """Return the path of the file with a checkpoint's SHA-256, in sha256sum's format."""
    return path.with_name(path.name + ".sha256")


def measures_path(path: Path) -> Path:
    """Return the path of the file with the measures of the validation that followed a checkpoint."""
    return path.with_suffix(".measures.json")


def checkpoint_path(run_path: Path, step: int) -> Path:
    return run_path / "checkpoints" / f"step_{step:08d}.pt"


def step_of(path: Path) -> int:
    """Return the number of updates in the name of a checkpoint."""
    return int(path.stem.removeprefix("step_"))


def find_checkpoints(run_path: Path) -> list[Path]:
    """Return the run's checkpoints, oldest first."""
    return sorted((run_path / "checkpoints").glob(f"step_{'[0-9]' * 8}.pt"))


def best_path(run_path: Path) -> Path:
    """Return the path of the file that names the run's best checkpoint: step, measure and value."""
    return run_path / "checkpoints" / "best.json"


def best_checkpoint(run_path: Path) -> Path:
    """Return the checkpoint that checkpoint.keep_best keeps. Raises CheckpointError if there is none."""
    file = best_path(run_path)
    try:
        return checkpoint_path(run_path, from_json(read_file(file))["step"])
    except FileNotFoundError as error:
        why = "has no best checkpoint; train with checkpoint.keep_best, or use last or a file"
        raise CheckpointError(f"{run_path}: {why}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: must name the step of a checkpoint ({error}); use last or a file") from error


def remove_half_written(run_path: Path) -> None:
    """Remove what killed processes have left of files in a run folder. The caller holds its lock."""
    remove_leftovers(run_path)
    folder = run_path / "checkpoints"
    for digest in folder.glob("step_*.pt.sha256"):  # written before its checkpoint, or its learner's file, has its name
        if digest.is_file() and not digest.with_suffix("").exists():
            digest.unlink()
    known = set(map(measures_path, find_checkpoints(run_path)))
    for path in folder.glob("step_*.measures.json"):
        if path.is_file() and path not in known:
            path.unlink()


class Spares(NamedTuple):
    """The nodes that a restart could replace by others, and those that it could do without: min_nodes must be left."""

    replaceable: int = 0
    losable: int = 0


def spares(run_path: Path) -> Spares:
    """Return the spares of this start; none without a job script, or with one that never moves."""
    with suppress(OSError, ValueError, TypeError):
        return Spares(*map(int, (run_path / "job" / "spares").read_text("utf-8").split()))
    return Spares()


def script_began() -> str | None:
    """Return when the job script began, as text; None without a script that restarts the ranks."""
    file = os.environ.get(FAILURE)
    return None if file is None else Path(file).name.partition(".")[2].rpartition(".")[0] or None


def bad_nodes(run_path: Path) -> list[str]:
    """Return the hosts that RUN/job/bad_nodes names, as the job script reads it; none without the file.

    A line names those in its first word, with commas between them and before a colon, such as `node4: ECC`; # begins a
    comment.
    """
    return _hosts(_text(run_path / "job" / "bad_nodes"))


def name_bad_nodes(run_path: Path, reasons: Mapping[str, str]) -> list[str]:
    """Add to RUN/job/bad_nodes the hosts that it does not name yet, each with a reason of one line; return them.

    The next start of the ranks leaves them out. Outside a job, RUN/job does not exist and nothing is written.
    """
    path = run_path / "job" / "bad_nodes"
    if not path.parent.is_dir():
        return []
    text = _text(path)
    known = _hosts(text)
    new = [host for host in reasons if host not in known]
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write("" if text.endswith("\n") or not (text and new) else "\n")
        file.writelines(f"{host} {reasons[host]}\n" for host in new)
    return new


def _text(path: Path) -> str:
    # It may be written by hand, on Windows with a byte-order mark.
    return path.read_text("utf-8-sig", errors="replace") if path.exists() else ""


def _hosts(text: str) -> list[str]:
    words = [line.split()[0] for line in text.splitlines() if line.strip()]
    names = [name for word in words if not word.startswith("#") for name in re.split("[,;]", word)]
    return [name.partition(":")[0] if name.count(":") == 1 else name for name in names if name]
