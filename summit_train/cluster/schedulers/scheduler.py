"""What a batch system is asked: to take a script, and which jobs of this user it has."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from summit_train.core.errors import RunFailed

_ANSWER_S = 60.0


class Scheduler(ABC):
    """One batch system.

    launchers: what starts the ranks in its jobs; a template jobs/SCHEDULER_LAUNCHER.sh.j2 each.
    command: the program that takes jobs; None: jobs run here, in the foreground.
    has_arrays: one job may have many runs.
    can_spare: those launchers that leave hosts out, bad and lost ones, so that a job may have spare nodes.
    gpus_flag: the option that asks for the {gpus} of a node, where a site may have another one.
    mail: the option that asks for mail at a job's end; None: there is none.
    own_output: files beside a job's script that get the scheduler's own words; None: the job's output has them.
    answer: a pattern of what the command prints, whose first group is the job's id.
    """

    launchers: ClassVar[tuple[str, ...]]
    command: ClassVar[str | None]
    has_arrays: ClassVar[bool] = True
    can_spare: ClassVar[tuple[str, ...]] = ()
    gpus_flag: ClassVar[str | None] = None
    mail: ClassVar[str | None] = None
    own_output: ClassVar[str | None] = None
    answer: ClassVar[str]

    @abstractmethod
    def words(self, script: Path, launcher: str, after: str | None = None) -> list[str]:
        """Return the command that submits the script, in its own folder, and on stdin if it does not name it.

        after: id of a job that has to end first, in any state. Raises UserError for a path that the scheduler misreads.
        """

    def by_hand(self, script: Path, launcher: str) -> str:
        """Return the line of shell that submits the script."""
        words = self.words(script, launcher)
        stdin = "" if script.name in words else f" < {script.name}"
        return f"cd {shlex.quote(str(script.parent))} && {shlex.join(words)}{stdin}"

    def submit(self, script: Path, launcher: str, after: str | None) -> str:
        """Hand the script over in its own folder, where the output goes, and return the job's id.

        Directives need no path of the user's in this way. Raises UserError as `words` does, RunFailed if refused.
        """
        words = self.words(script, launcher, after)
        answer = ask(words, script.parent, None if script.name in words else script)
        found = re.search(self.answer, answer, re.M)
        if found is None:
            raise RunFailed(f"{words[0]} answered {answer.strip()!r}, which names no job")
        return found.group(1)

    @abstractmethod
    def states(self) -> dict[str, str]:
        """Return id -> queued or running for this user's jobs that have not ended; each run of an array is one.

        Raises RunFailed where the scheduler does not answer.
        """

    def accounts(self) -> list[str]:
        """Return the accounts that this user may charge. Raises RunFailed where the scheduler does not say."""
        raise RunFailed("the scheduler does not say which are yours")

    def queue_limits(self, queue: str | None) -> tuple[int | None, int | None] | None:
        """Return the most minutes and nodes of a job (None: any), None if unknown. Raises RunFailed for no queue."""
        return None

    def member(self, array: str, number: int) -> str:
        """Return the id of one run of an array, counted from 1."""
        return f"{array}[{number}]"


def ask(words: Sequence[str], folder: Path | None = None, stdin: Path | None = None) -> str:
    """Return what a command prints. Raises RunFailed where it cannot be started, fails, or does not answer in time."""
    with open(stdin or os.devnull, "rb") as source:
        try:
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, stdin=source, timeout=_ANSWER_S)
        except OSError as error:
            raise RunFailed(f"{words[0]} cannot be started: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise RunFailed(f"{words[0]} did not answer within {_ANSWER_S:g} s") from error
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split()) or "nothing"
        raise RunFailed(f"{words[0]} refused (exit status {done.returncode}): {said}")
    return done.stdout


def minutes_of(text: str) -> int | None:
    """Return [DAYS-][HH:]MM:SS as minutes, rounded down; None for other words, such as UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    days, hours, minutes = (int(part or 0) for part in found.groups()[:3]) if found else (0, 0, 0)
    return 60 * (24 * days + hours) + minutes if found else None
