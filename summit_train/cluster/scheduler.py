"""What a batch system must answer, on a login node and within a job, and how it is asked. Runs in Python 3.9."""

from __future__ import annotations

import getpass
import os
import re
import shlex
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, NamedTuple

from summit_train.core.errors import RunFailed

_ANSWER_S = 200.0  # twice the longest that Slurm lets a large machine take (MessageTimeout)
LONGEST_WORD = 100_000  # of a command; Linux takes 128 KiB
# Variables of a job's shell for its steps: sbatch and its like would take them for options of the new job, over the
# script's directives, and pass them to the job's launcher. Those that say where the scheduler is, and a user's choice
# of account, queue, reservation and QOS, stay.
_OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "PBS_", "LSB_", "LS_JOBPID", "FLUX_JOB_", "FLUX_TASK_", "PALS_")
_OF_THE_SITE = (
    "SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT", "SBATCH_ACCOUNT", "SBATCH_PARTITION",
    "SBATCH_RESERVATION", "SBATCH_QOS", "SBATCH_CLUSTERS", "PBS_CONF_FILE", "PBS_EXEC", "PBS_SERVER", "PBS_DEFAULT",
    "LSB_BSUB_PARSE_SCRIPT", "LSB_DEFAULTQUEUE", "LSB_DEFAULTPROJECT", "LSB_DEFAULT_USERGROUP",
)  # fmt: skip


class Nodes(NamedTuple):
    """Nodes of a job, for its launchers: their names, and a file with a line for each."""

    names: Sequence[str]
    file: Path


class Scheduler(ABC):
    """One batch system.

    launchers: what starts the ranks in its jobs; a template jobs/SCHEDULER_LAUNCHER.sh.j2 each.
    command: the program that takes jobs; None: jobs run here, in the foreground.
    has_arrays: one job may have many runs.
    can_spare: those launchers that leave hosts out, bad and lost ones, so that a job may have spare nodes.
    gpus_flag: the option that asks for the {gpus} of a node, where a site may have another one.
    mail: the option that asks for mail at a job's end; None: there is none.
    own_output: files in the folder of a job's script with the scheduler's messages; None: the job's output has them.
    answer: a pattern of what the command prints, whose first group is the job's id.
    asks_at_once: a launcher of it that cannot reach one node starts its processes on the others all the same.
    has_warning: it sends a signal before the walltime.
    hangs_up: it cancels a job by SIGHUP.
    not_for_launchers: signals to all processes of a job of which these launchers would end.
    """

    launchers: ClassVar[tuple[str, ...]]
    command: ClassVar[str | None]
    has_arrays: ClassVar[bool] = True
    can_spare: ClassVar[tuple[str, ...]] = ()
    gpus_flag: ClassVar[str | None] = None
    mail: ClassVar[str | None] = None
    own_output: ClassVar[str | None] = None
    answer: ClassVar[str]
    asks_at_once: ClassVar[bool] = False
    has_warning: ClassVar[bool] = True
    hangs_up: ClassVar[bool] = False
    not_for_launchers: ClassVar[Mapping[str, Sequence[signal.Signals]]] = {}

    @abstractmethod
    def words(self, script: Path, launcher: str, after: str | None = None, without: Sequence[str] = ()) -> list[str]:
        """Return the command that submits the script, in its own folder, and on stdin if it does not name it.

        after: id of a job that has to end first, in any state. without: hosts to leave out, if the scheduler has an
        option for that. Raises UserError for a path that the scheduler misreads.
        """

    def by_hand(self, script: Path, launcher: str) -> str:
        """Return the line of shell that submits the script, without what this shell has of another job."""
        words = self.words(script, launcher)
        if self.command is not None:
            stale = sorted(set(os.environ) - set(environment_outside(os.environ)))
            words = [*(["env"] if stale else []), *(f"--unset={name}" for name in stale), *words]
        stdin = "" if script.name in words else f" < {script.name}"
        return f"cd {shlex.quote(str(script.parent))} && {shlex.join(words)}{stdin}"

    def submit(self, script: Path, launcher: str, after: str | None, without: Sequence[str] = ()) -> str:
        """Hand the script over in its own folder, for the output; return the job's id. without: hosts to leave out.

        Raises RunFailed if refused.
        """
        return self._hand_over(self.words(script, launcher, after, without), script)

    def _hand_over(self, words: Sequence[str], script: Path) -> str:
        answer = ask(words, script.parent, None if script.name in words else script)
        found = re.search(self.answer, answer, re.M)
        if found is None:
            raise RunFailed(f"{words[0]} answered {answer.strip()!r}, which names no job")
        return found.group(1)

    @abstractmethod
    def states(self) -> dict[str, str]:
        """Return id -> queued or running of this user's jobs, an array's one by one. Raises RunFailed."""

    def accounts(self) -> list[str]:
        """Return the accounts that this user may charge. Raises RunFailed where the scheduler does not say."""
        raise RunFailed("the scheduler does not say which are yours")

    def queue_limits(self, queue: str | None) -> tuple[int | None, int | None] | None:
        """Return the most minutes and nodes of a job (None: any), None if unknown. Raises RunFailed for no queue."""
        return None

    def member(self, array: str, number: int) -> str:
        """Return the id of one run of an array, counted from 1."""
        return f"{array}[{number}]"

    # Within a job.

    def nodes(self, job_id: str, is_restart: bool) -> list[str]:
        """Return the job's nodes, without those that the scheduler calls down; none where launchers find them."""
        return []

    def environment(self, environ: Mapping[str, str], nodes: Sequence[str], is_restart: bool) -> dict[str, str]:
        """Return the environment of a job's launchers, from that of its script."""
        return dict(environ)

    def hosts(self, nodes: Nodes) -> str:
        """Return the names with commas between them, or where they are too long for a word the path of their file."""
        names = ",".join(nodes.names)
        return names if len(names) <= LONGEST_WORD else str(nodes.file)

    def lines(self, launcher: str, nodes: Sequence[str], ranks: int) -> str:
        """Return the text of the file of the nodes, in the launcher's form."""
        slots = f" slots={ranks}" if launcher == "mpirun" else ""
        return "".join(f"{node}{slots}\n" for node in nodes)

    @abstractmethod
    def on_each_node(self, launcher: str, nodes: Nodes, num_nodes: int) -> list[str]:
        """Return the words that start one process on each of the nodes. nodes: none where launchers find them."""

    def on_another_node(self, nodes: Sequence[str]) -> tuple[list[str], str] | None:
        """Return words that start a process on one of the nodes but this one, and this one's name.

        None where this node needs no watch: without it the scheduler ends the job.
        """
        return None

    def watch(self, job_id: str, node: str, folder: Path, max_requeues: int, seconds: float) -> None:
        """Look every `seconds` whether a job still has the node of its script, and requeue it if not.

        folder: RUN/job, whose files say so.
        """
        raise NotImplementedError

    def broadcast(self, source: str, target: str) -> list[str] | None:
        """Return words that copy a file to all nodes of the job, from node to node; None if there are none."""
        return None

    def ask_to_stop(self, launcher: str, process: int) -> None:
        """Have the ranks write a checkpoint and leave with 85: SIGTERM would make most launchers kill them."""
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR2)

    def end_ranks(self) -> None:
        """End ranks that would outlive their launcher."""
        return None

    def preemption(self, job_id: str) -> str:
        """Return "requeued" where the scheduler has put the job back itself, "preempted" where it wants its nodes."""
        return ""

    def requeue(self, job_id: str, script: Path, launcher: str) -> str | None:
        """Have the job continued later; return the id of the new job, None for the same one. Raises RunFailed."""
        return None


def environment_outside(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what tells of a job that the shell is in."""
    return {name: value for name, value in environ.items() if name in _OF_THE_SITE or not name.startswith(_OF_A_JOB)}


def _ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def ask(
    words: Sequence[str], folder: Path | None = None, stdin: Path | None = None, *, outlives_job: bool = False
) -> str:
    """Run a command as outside of any job; return its output.

    outlives_job: the command has the job's processes ended, of which it is one, and must not end of that itself.
    Raises RunFailed where it cannot be started, fails, or does not answer in time.
    """
    with open(stdin or os.devnull, "rb") as source:
        try:
            done = subprocess.run(
                words,
                cwd=folder,
                env=environment_outside(os.environ),
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                stdin=source,
                timeout=_ANSWER_S,
                preexec_fn=_ignore_sigterm if outlives_job else None,
            )
        except OSError as error:
            raise RunFailed(f"{words[0]} cannot be started: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise RunFailed(f"{words[0]} did not answer within {_ANSWER_S:g} s") from error
    if done.returncode != 0:
        reason = " ".join((done.stderr or done.stdout).split()) or "nothing"
        raise RunFailed(f"{words[0]} refused (exit status {done.returncode}): {reason}")
    return done.stdout


def short_name(host: str) -> str:
    """Return a host's name without its domain; an IPv4 address has none."""
    return host if re.fullmatch(r"[\d.]+", host) else host.partition(".")[0]


def user_name() -> str:
    """Return this user's name. Raises RunFailed for one that the system knows by number alone."""
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:  # of Python before 3.13, and of later ones
        raise RunFailed(f"user {os.getuid()} has no name in the password database; set USER to it") from error
