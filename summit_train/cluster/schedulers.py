"""The batch systems, each a class here, its templates in jobs/ and its word in SCHEDULERS.

They are asked to take a script, and which jobs of this user they have.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NoReturn

from summit_train.core.errors import RunFailed, UserError

_ANSWER_S = 60.0
# What a job's shell tells its own steps: sbatch and its like would take it for wishes of the new job, over the script's
# directives, and hand it on to the job's launcher. Those that say where the scheduler is, and a user's own choice of
# account, queue, reservation and QOS, stay.
_OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "PBS_", "LSB_", "LS_JOBPID", "FLUX_JOB_", "FLUX_TASK_", "PALS_")
_OF_THE_SITE = (
    "SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT", "SBATCH_ACCOUNT", "SBATCH_PARTITION",
    "SBATCH_RESERVATION", "SBATCH_QOS", "SBATCH_CLUSTERS", "PBS_CONF_FILE", "PBS_EXEC", "PBS_SERVER", "PBS_DEFAULT",
    "LSB_BSUB_PARSE_SCRIPT", "LSB_DEFAULTQUEUE", "LSB_DEFAULTPROJECT", "LSB_DEFAULT_USERGROUP",
)  # fmt: skip


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
    def words(self, script: Path, launcher: str, after: str | None = None, without: Sequence[str] = ()) -> list[str]:
        """Return the command that submits the script, in its own folder, and on stdin if it does not name it.

        after: id of a job that has to end first, in any state. without: hosts to leave out, if the scheduler has an
        option for that. Raises UserError for a path that the scheduler misreads.
        """

    def by_hand(self, script: Path, launcher: str) -> str:
        """Return the line of shell that submits the script."""
        words = self.words(script, launcher)
        stdin = "" if script.name in words else f" < {script.name}"
        return f"cd {shlex.quote(str(script.parent))} && {shlex.join(words)}{stdin}"

    def submit(self, script: Path, launcher: str, after: str | None, without: Sequence[str] = ()) -> str:
        """Hand the script over in its own folder, for the output; return the job's id. without: hosts to leave out.

        Raises RunFailed if refused.
        """
        words = self.words(script, launcher, after, without)
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


def environment_outside(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what tells of a job that the shell is in."""
    return {name: value for name, value in environ.items() if name in _OF_THE_SITE or not name.startswith(_OF_A_JOB)}


def ask(words: Sequence[str], folder: Path | None = None, stdin: Path | None = None) -> str:
    """Return what a command prints, as if asked outside of any job.

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
            )
        except OSError as error:
            raise RunFailed(f"{words[0]} cannot be started: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise RunFailed(f"{words[0]} did not answer within {_ANSWER_S:g} s") from error
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split()) or "nothing"
        raise RunFailed(f"{words[0]} refused (exit status {done.returncode}): {said}")
    return done.stdout


def user_name() -> str:
    """Return this user's name. Raises RunFailed for one that the system knows by number alone."""
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:  # of Python before 3.13, and of later ones
        raise RunFailed(f"user {os.getuid()} has no name in the password database; set USER to it") from error


def minutes_of(text: str) -> int | None:
    """Return [DAYS-][HH:]MM:SS as minutes, rounded down; None for other words, such as UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    days, hours, minutes = (int(part or 0) for part in found.groups()[:3]) if found else (0, 0, 0)
    return 60 * (24 * days + hours) + minutes if found else None


class Slurm(Scheduler):
    launchers = ("srun", "mpirun")
    can_spare = launchers
    command = "sbatch"
    gpus_flag = "--gpus-per-node={gpus}"
    mail = "--mail-type=END,FAIL"
    answer = r"^(\d+)(?:;.*)?$"

    def words(self, script: Path, launcher: str, after: str | None = None, without: Sequence[str] = ()) -> list[str]:
        # It expands %j and the like even in the folder's own path.
        if set(str(script.absolute())) & set("%\\"):
            raise UserError(f"{script.parent}: Slurm cannot write output below a name with % or \\; change it")
        # sbatch refuses unknown nodes, and Slurm's names of nodes have no domain.
        names = [host if re.fullmatch(r"[\d.]+", host) else host.partition(".")[0] for host in without]
        excluded = [f"--exclude={','.join(dict.fromkeys(names))}"] if without else []
        dependency = [f"--dependency=afterany:{after}"] if after else []
        return ["sbatch", *excluded, "--parsable", *dependency, script.name]

    def submit(self, script: Path, launcher: str, after: str | None, without: Sequence[str] = ()) -> str:
        try:
            return super().submit(script, launcher, after, without)
        except RunFailed as error:
            if "Invalid job array specification" not in str(error):
                raise
            most = "an array must have fewer runs than MaxArraySize (`scontrol show config`)"
            way = "start the sweep with fewer runs, then add the others to its file and start it again"
            raise RunFailed(f"{error}; {most}: {way}") from error

    def member(self, array: str, number: int) -> str:
        return f"{array}_{number}"

    def states(self) -> dict[str, str]:
        # All jobs of this user: asking for a job that is gone would be an error.
        answer = ask(["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i %T"])
        states = dict(line.split(maxsplit=1) for line in answer.splitlines() if line.strip())
        return {name: "running" if state in ("RUNNING", "COMPLETING") else "queued" for name, state in states.items()}

    def accounts(self) -> list[str]:
        words = ["sacctmgr", "--noheader", "--parsable2", "show", "associations", "format=account"]
        return sorted(set(ask([*words, f"user={user_name()}"]).split()))

    def queue_limits(self, queue: str | None) -> tuple[int | None, int | None]:
        answer = ask(["scontrol", "--oneliner", "show", "partition", *([queue] if queue else [])])
        for one in (dict(re.findall(r"(\w+)=(\S*)", line)) for line in answer.splitlines()):
            if queue or one.get("Default") == "YES":
                counts = [int(one[key]) for key in ("MaxNodes", "TotalNodes") if one.get(key, "").isdigit()]
                return minutes_of(one["MaxTime"]), min(counts, default=None)
        raise RunFailed("Slurm has no default partition")


class Lsf(Scheduler):
    launchers = ("jsrun", "mpirun")
    command = "bsub"
    mail = "-N"
    answer = r"Job <(\d+)>"

    def words(self, script: Path, launcher: str, after: str | None = None, without: Sequence[str] = ()) -> list[str]:
        # bsub reads a script given as an argument only with LSB_BSUB_PARSE_SCRIPT, which sites with jsrun set.
        named = [script.name] if launcher == "jsrun" else []
        excluded: list[str] = []
        if without:
            # -R on the command line replaces the script's own, so repeat them; bsub combines several.
            condition = " && ".join(f"hname!='{host}'" for host in without)
            directives = re.findall(r"^#BSUB (.*)$", script.read_text("utf-8"), re.M)
            excluded = ["-R", f"select[{condition}]"]
            for words in map(shlex.split, directives):
                for word, following in zip(words, [*words[1:], ""], strict=True):
                    if word.startswith("-R"):
                        excluded += ["-R", word[2:] or following]
        dependency = ["-w", f"ended({after})"] if after else []
        return ["bsub", *excluded, *dependency, *named]

    def states(self) -> dict[str, str]:
        try:
            answer = ask(["bjobs", "-noheader", "-o", "jobid jobindex stat"])
        except RunFailed as error:
            if "No unfinished job found" not in str(error):
                raise
            return {}
        return {
            job if index == "0" else f"{job}[{index}]": "running" if state in ("RUN", "UNKWN") else "queued"
            for job, index, state in (words for words in map(str.split, answer.splitlines()) if len(words) == 3)
        }


class Pbs(Scheduler):
    """PBS Pro and OpenPBS. Launchers: mpiexec of HPE's PALS, that of MPICH and Intel MPI (Hydra), Open MPI's mpirun.

    Its arrays are not used: no job may depend on one of an array's, which a run that is warned needs to go on.
    """

    launchers = ("pals", "mpiexec", "mpirun")
    can_spare = launchers
    command = "qsub"
    has_arrays = False
    mail = "-m ae"
    own_output = "*.o[0-9]*"
    answer = r"^(\d+(?:\.[\w.-]+)?)$"

    def words(self, script: Path, launcher: str, after: str | None = None, without: Sequence[str] = ()) -> list[str]:
        return ["qsub", *(["-W", f"depend=afterany:{after}"] if after else []), script.name]

    def states(self) -> dict[str, str]:
        # qselect names what has not finished, by its whole id, which qstat cuts off.
        own = ["qselect", "-T", "-u", user_name()]
        return dict.fromkeys(ask(own).split(), "queued") | dict.fromkeys(ask([*own, "-s", "RE"]).split(), "running")


class Flux(Scheduler):
    """It has no arrays of batch jobs: a sweep submits job by job."""

    launchers = ("flux",)
    can_spare = launchers
    command = "flux"
    has_arrays = False
    own_output = "flux-*.out"
    answer = r"^[fƒ](\w+)$"  # ƒ where the locale has it

    def words(self, script: Path, launcher: str, after: str | None = None, without: Sequence[str] = ()) -> list[str]:
        excluded = [f"--requires=-host:{','.join(without)}"] if without else []
        dependency = [f"--dependency=afterany:{after}"] if after else []
        return ["flux", "batch", *excluded, *dependency, script.name]

    def submit(self, script: Path, launcher: str, after: str | None, without: Sequence[str] = ()) -> str:
        return "f" + super().submit(script, launcher, after, without)

    def states(self) -> dict[str, str]:
        answer = ask(["flux", "jobs", "--no-header", "--filter=pending,running", "--format={id.f58plain} {status}"])
        jobs = (line.split() for line in answer.splitlines() if line.strip())
        return {name: "running" if state in ("RUN", "CLEANUP") else "queued" for name, state in jobs}


class Local(Scheduler):
    """This machine: no queue. A job runs at once, in the foreground."""

    launchers = ("ranks", "mpirun")  # ranks: `train --ranks`
    command = None
    has_arrays = False

    def words(self, script: Path, launcher: str, after: str | None = None, without: Sequence[str] = ()) -> list[str]:
        return ["bash", script.name]

    def submit(self, script: Path, launcher: str, after: str | None, without: Sequence[str] = ()) -> NoReturn:
        """Replace this process with the job, so that signals reach the script."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvp("bash", ["bash", str(script)])

    def states(self) -> dict[str, str]:
        return {}


SCHEDULERS: dict[str, Scheduler] = {"slurm": Slurm(), "lsf": Lsf(), "pbs": Pbs(), "flux": Flux(), "local": Local()}
