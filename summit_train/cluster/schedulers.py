"""The batch systems, each a class here, its templates in jobs/ and its word in SCHEDULERS. Runs in Python 3.9."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, NoReturn

from summit_train.cluster.scheduler import LONGEST_WORD, Nodes, Scheduler, ask, short_name, user_name
from summit_train.core.errors import RunFailed, UserError

# What the steps of an interactive job leave in a shell, whose `sbatch` hands it on: srun takes these for options.
_OF_A_STEP = ("SLURM_STEP", "SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURM_PTY_", "SLURM_SRUN_", "SLURM_MPI_TYPE", "SRUN_")


def minutes_of(text: str) -> int | None:
    """Return [DAYS-][HH:]MM:SS as minutes, rounded down; None for other words, such as UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    days, hours, minutes = (int(part or 0) for part in found.groups()[:3]) if found else (0, 0, 0)
    return 60 * (24 * days + hours) + minutes if found else None


def _mpirun_on_each_node(num_nodes: int, *hosts: str) -> list[str]:
    return ["mpirun", "-np", str(num_nodes), *hosts, "--map-by", "ppr:1:node", "--bind-to", "none"]


class Slurm(Scheduler):
    launchers = ("srun", "mpirun")
    can_spare = launchers
    command = "sbatch"
    gpus_flag = "--gpus-per-node={gpus}"
    mail = "--mail-type=END,FAIL"
    answer = r"^(\d+)(?:;.*)?$"
    asks_at_once = True

    def words(self, script: Path, launcher: str, after: str | None = None, without: Sequence[str] = ()) -> list[str]:
        # It expands %j and the like even in the folder's own path.
        if set(str(script.absolute())) & set("%\\"):
            raise UserError(f"{script.parent}: Slurm cannot write output below a name with % or \\; change it")
        # sbatch refuses unknown nodes, and Slurm's names of nodes have no domain.
        excluded = [f"--exclude={','.join(dict.fromkeys(map(short_name, without)))}"] if without else []
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

    def nodes(self, job_id: str, is_restart: bool) -> list[str]:
        listed = os.environ["SLURM_JOB_NODELIST"]
        if is_restart:  # a job that may go on without a lost node does not list it any more
            with suppress(RunFailed):
                listed = ask(["squeue", "--noheader", f"--jobs={job_id}", "--format=%N"]).strip() or listed
        return ask(["scontrol", "show", "hostnames", listed]).split()

    def environment(self, environ: Mapping[str, str], nodes: Sequence[str], is_restart: bool) -> dict[str, str]:
        stays = ("SRUN_CPUS_PER_TASK", "SRUN_CONTAINER")  # of the script
        kept = {name: value for name, value in environ.items() if name in stays or not name.startswith(_OF_A_STEP)}
        # As --overlap: Slurm may not know yet that the last step has ended.
        return {**kept, "SLURM_OVERLAP": "1"} if is_restart else kept

    def on_each_node(self, launcher: str, nodes: Nodes, num_nodes: int) -> list[str]:
        words = ["srun", "--overlap", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1"]
        return [*words, f"--nodelist={self.hosts(nodes)}", "--mpi=none"]

    def on_another_node(self, nodes: Sequence[str]) -> tuple[list[str], str] | None:
        this = os.environ["SLURMD_NODENAME"]
        others = [node for node in nodes if node != this]
        return (self.on_each_node("srun", Nodes(others[-1:], Path()), 1), this) if others else None

    def watch(self, job_id: str, node: str, folder: Path, max_requeues: int, seconds: float) -> None:
        while True:
            time.sleep(seconds)
            with suppress(RunFailed):  # Slurm is asked again
                answer = ask(["squeue", "--noheader", f"--jobs={job_id}", "--format=%T %N"])
                state, _, listed = answer.strip().partition(" ")
                if state not in ("RUNNING", "SUSPENDED") or not listed:
                    return  # the job has ended, or has been requeued
                if node in ask(["scontrol", "show", "hostnames", listed]).split():
                    continue
                requeues = folder / "requeues"
                if requeues.exists() and len(requeues.read_text("utf-8").splitlines()) >= max_requeues:
                    ask(["scancel", job_id])
                    return
                self._requeue_without(job_id, node, folder)

    def _requeue_without(self, job_id: str, node: str, folder: Path) -> None:
        """Requeue a job that has lost the node of its script, and say so before: this process ends with the job.

        Raises RunFailed where Slurm refuses; then the files are as before.
        """
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        line = f"{now} job {job_id}: requeued, as {node}, where its script ran, is lost\n"
        texts = {"requeues": f"{job_id} without {node}\n", "restarts": line, "log": line, f"{job_id}.out": line}
        sizes: dict[Path, int] = {}
        for name, text in texts.items():
            with open(folder / name, "a", encoding="utf-8") as file:
                sizes[folder / name] = file.tell()
                file.write(text)
        try:
            ask(["scontrol", "requeue", job_id], outlives_job=True)
        except RunFailed:
            for path, size in sizes.items():
                os.truncate(path, size)
            raise

    def broadcast(self, source: str, target: str) -> list[str] | None:
        return ["sbcast", "--force", source, target]

    def preemption(self, job_id: str) -> str:
        number = os.environ["SLURM_JOB_ID"]  # job_id may be ARRAY_INDEX
        record = ""
        with suppress(RunFailed):
            record = ask(["scontrol", "--oneliner", "show", "job", number])
        found = re.search(rf"^JobId={number} .*", record, re.M)
        restarts = re.search(r" Restarts=(\d+)", found.group()) if found else None
        if restarts and int(restarts.group(1)) > int(os.environ.get("SLURM_RESTART_COUNT") or 0):
            return "requeued"
        return "preempted" if found and re.search(r" PreemptTime=\d", found.group()) else ""  # within its grace time

    def requeue(self, job_id: str, script: Path, launcher: str) -> str | None:
        state = "RUNNING"
        with suppress(RunFailed):  # it is requeued without an answer, too
            state = ask(["squeue", "--noheader", f"--jobs={job_id}", "--format=%T"]).strip()
        if state != "RUNNING":  # a job that was cancelled meanwhile stays cancelled
            raise RunFailed(f"Slurm calls it {state or 'gone'}, so it is not requeued here")
        ask(["scontrol", "requeue", job_id], outlives_job=True)
        return None


class Lsf(Scheduler):
    launchers = ("jsrun", "mpirun")
    command = "bsub"
    mail = "-N"
    answer = r"Job <(\d+)>"
    # LSF signals every process of a job on its launch node. jsrun is kept out of it, jskill tells the ranks.
    not_for_launchers: ClassVar = {"jsrun": [signal.SIGUSR2]}

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

    def on_each_node(self, launcher: str, nodes: Nodes, num_nodes: int) -> list[str]:
        if launcher == "mpirun":
            return _mpirun_on_each_node(num_nodes, "--hostfile", os.environ["LSB_DJOB_HOSTFILE"])
        return ["jsrun", "-n", str(num_nodes), "-r", "1", "-a", "1", "-c", "1"]

    def ask_to_stop(self, launcher: str, process: int) -> None:
        if launcher == "mpirun":
            super().ask_to_stop(launcher, process)
        else:  # they may just have ended
            subprocess.run(["jskill", "-s", str(int(signal.SIGUSR2)), "all"], stdin=subprocess.DEVNULL, check=False)


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
    has_warning = False  # at the walltime it sends SIGTERM and, seconds later, SIGKILL

    def words(self, script: Path, launcher: str, after: str | None = None, without: Sequence[str] = ()) -> list[str]:
        return ["qsub", *(["-W", f"depend=afterany:{after}"] if after else []), script.name]

    def states(self) -> dict[str, str]:
        # qselect names what has not finished, by its whole id, which qstat cuts off.
        words = ["qselect", "-T", "-u", user_name()]
        return dict.fromkeys(ask(words).split(), "queued") | dict.fromkeys(ask([*words, "-s", "RE"]).split(), "running")

    def nodes(self, job_id: str, is_restart: bool) -> list[str]:
        down = ""
        with suppress(RunFailed):
            down = ask(["pbsnodes", "-l"])
        gone = {short_name(line.split()[0]) for line in down.splitlines() if line.strip()}
        nodes = Path(os.environ["PBS_NODEFILE"]).read_text("utf-8").split()
        return [node for node in nodes if short_name(node) not in gone]

    def environment(self, environ: Mapping[str, str], nodes: Sequence[str], is_restart: bool) -> dict[str, str]:
        # Rank 0 is on the first one. Not by another PBS_NODEFILE: Open MPI looks for PBS's own files in its folder.
        return {"MASTER_ADDR": nodes[0], **environ} if nodes else dict(environ)

    def on_each_node(self, launcher: str, nodes: Nodes, num_nodes: int) -> list[str]:
        if launcher == "mpirun":
            return _mpirun_on_each_node(num_nodes, "--hostfile", str(nodes.file))
        if launcher == "mpiexec":
            return ["mpiexec", "-f", str(nodes.file), "-n", str(num_nodes), "-ppn", "1"]
        return ["mpiexec", "--hostfile", str(nodes.file), "-n", str(num_nodes), "--ppn", "1", "--cpu-bind", "none"]

    def ask_to_stop(self, launcher: str, process: int) -> None:
        # Hydra passes SIGTERM on and waits for the ranks; SIGUSR2 ends it.
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM if launcher == "mpiexec" else signal.SIGUSR2)

    def requeue(self, job_id: str, script: Path, launcher: str) -> str | None:
        # qrerun is for operators and no exit status requeues.
        return self.submit(script, launcher, job_id)


def ranges(names: Sequence[str]) -> str:
    """Return names such as n1,n2,n3,m as n[1-3],m, in their order."""
    words: list[tuple[str, str, int]] = []  # what stands before the last number, the first of its numbers, how many
    for name in names:
        stem = name.rstrip("0123456789")
        number = name[len(stem) :]
        if words and number and words[-1][0] == stem and words[-1][1]:
            first = words[-1][1]
            if number == str(int(first) + words[-1][2]).zfill(len(first)):
                words[-1] = (stem, first, words[-1][2] + 1)
                continue
        words.append((stem, number, 1))
    ends = [(stem, first, str(int(first or 0) + count - 1).zfill(len(first)), count) for stem, first, count in words]
    return ",".join(f"{stem}[{first}-{last}]" if count > 1 else f"{stem}{first}" for stem, first, last, count in ends)


class Flux(Scheduler):
    """It has no arrays of batch jobs: a sweep submits job by job."""

    launchers = ("flux",)
    can_spare = launchers
    command = "flux"
    has_arrays = False
    own_output = "flux-*.out"
    answer = r"^[fƒ](\w+)$"  # ƒ where the locale has it
    # A signal to the job reaches all processes of its script; older versions of `flux run` would end of it.
    not_for_launchers: ClassVar = {"flux": [signal.SIGUSR2, signal.SIGHUP]}
    hangs_up = True

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

    def nodes(self, job_id: str, is_restart: bool) -> list[str]:
        return ask(["flux", "hostlist", "--expand", "--delimiter=\n", "avail"]).split()  # those that are up

    def environment(self, environ: Mapping[str, str], nodes: Sequence[str], is_restart: bool) -> dict[str, str]:
        return {**environ, "MASTER_ADDR": nodes[0]} if nodes else dict(environ)  # where rank 0 is

    def hosts(self, nodes: Nodes) -> str:
        names = ",".join(nodes.names)
        return names if len(names) <= LONGEST_WORD else ranges(nodes.names)

    def on_each_node(self, launcher: str, nodes: Nodes, num_nodes: int) -> list[str]:
        words = [f"--requires=host:{self.hosts(nodes)}", f"--nodes={num_nodes}", f"--ntasks={num_nodes}"]
        return ["flux", "run", *words, "--exclusive", "-o", "gpu-affinity=off"]

    def ask_to_stop(self, launcher: str, process: int) -> None:
        words = ["flux", "job", "killall", "--force", "--signal=SIGUSR2"]  # to all ranks; they may just have ended
        subprocess.run(words, stdin=subprocess.DEVNULL, check=False)

    def end_ranks(self) -> None:
        # Of this job's own instance: without its client a run goes on.
        subprocess.run(["flux", "cancel", "--all"], stdin=subprocess.DEVNULL, check=False)

    def requeue(self, job_id: str, script: Path, launcher: str) -> str | None:
        # Flux requeues nothing: a new job of the enclosing instance continues when this one has ended.
        flux, *words = self.words(script, launcher, job_id)
        return "f" + self._hand_over([flux, "--parent", *words], script)


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

    def on_each_node(self, launcher: str, nodes: Nodes, num_nodes: int) -> list[str]:
        return []


SCHEDULERS: dict[str, Scheduler] = {"slurm": Slurm(), "lsf": Lsf(), "pbs": Pbs(), "flux": Flux(), "local": Local()}
