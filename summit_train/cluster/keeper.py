"""The job keeper: start a job's ranks on nodes that answer, and again when they fail, until the run is done.

A job script ends in `python -m summit_train.cluster.keeper RUN JOB -- LAUNCHER ... -- PROGRAM ...`. In these words it
fills in {nodes}, {hosts}, {hostfile} and {ranks} for each start, and {python}, {image} and {staged}, which it copies to
the nodes' own disks. `submit` writes what else it must know to RUN/job/job.json; the keeper writes RUN/job/log for
people and RUN/job/state.json for programs. docs/node_failures.md describes what it does.

It runs outside of containers: Python 3.9 and the standard library suffice.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path

from summit_train.cluster.running_job import USUAL, JobFacts, RunningJob, Waits, lines_of, now, program_end
from summit_train.cluster.scheduler import short_name
from summit_train.cluster.schedulers import SCHEDULERS
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import file_sha256, is_locked
from summit_train.core.run_folder import FAILURE, RunLock, bad_nodes, find_checkpoints, step_of

_STOPPED = 85  # of a rank: stopped on request, with a checkpoint; of a job: requeue me
_USER_ERROR = 2
_TERMINATED = 143
_TABLE_SECONDS = 600


class End(Enum):
    """Why the ranks are not started again."""

    ENDED = "they ended by themselves, for good"
    INTERRUPTED = "a signal came while no ranks could hear it"
    LOST = "too few nodes are left"
    REFUSED = "too few nodes answered the first time, or the launcher starts nothing on any"


class Keeper:
    """Keeps one job of a run, from the last line of its script to its exit status: `keep`."""

    def __init__(self, job: RunningJob) -> None:
        self.job = job
        self.run = job.run
        self.facts = job.facts
        self.batch = job.batch
        self._answering: list[str] = []  # nodes, those to spare too
        self._guard: subprocess.Popen[bytes] | None = None
        self._environment = f"{job.node_local}/summit_train_environment_{job.job_id}"

    def keep(self) -> int:
        """Return the job's exit status: 0 when the run is done, 85 to be requeued.

        One keeper at a time works on a run. A lost node may hold the lock for a while; a signal then ends this job and
        leaves the run's state to the other one.
        """
        try:
            self.job.ranks_words()  # a name in braces may be wrong
            until = time.monotonic() + self.job.waits.lock
            waited = False
            while is_locked(self.job.folder / "lock") and time.monotonic() < until and not self.job.heard():
                waited = True
                self.job.hear(1)
            if waited and self.job.heard():
                self.job.say("stopped while another job of this run held its folder; submit it again to continue")
                return 1
            with RunLock(self.job.folder):
                return self._keep()
        except UserError as error:
            self.job.say(str(error))
            return _USER_ERROR

    def _keep(self) -> int:
        if (self.run / "job/done").exists():
            self.job.say(f"{self.run} is done already")
            return 0
        folder = self.job.node_local
        if (self.facts.stage or self.facts.environment) and (not folder.startswith("/") or "$" in folder):
            wrong = f"must be an absolute path on each node, got {folder!r}; try to export it in the profile's setup"
            self.job.say(f"node_local {wrong}")
            return _USER_ERROR
        if not self.batch.has_warning:
            signal.alarm(max(1, self.facts.warn_after_s - _seconds_since_start()))
        at_first = self._progress()
        try:
            end, status = self._start_ranks()
        except RunFailed as error:  # of the scheduler, asked for the job's nodes
            self.job.say(str(error))
            # A warning to all processes of the job ends those that ask, too.
            end = End.INTERRUPTED if self.job.heard() else End.REFUSED
            status = 1
        self._remove_copies()
        if self._guard is not None:
            self._guard.terminate()
        if end is End.REFUSED:
            self.job.note("failed")
            return 1
        if end is End.ENDED and not (self.run / "stopped").exists():
            return self._finish(status)
        return self._continue_later(end, at_first)

    def _start_ranks(self) -> tuple[End, int]:
        """Start the ranks, again as long as they may; return why they end, and their exit status."""
        why = ""
        failed_at: tuple[int, ...] = ()  # what there was when the ranks failed last: steps, scores, bad nodes
        while True:
            if self.job.chooses_nodes:
                missing, end = self._find_nodes()
                if end is not None:
                    return end, 0
                why += f", without {','.join(missing)}" if missing else ""
            self._announce(why)
            status = self._copy_to_nodes()
            if self.job.heard():
                return End.INTERRUPTED, status
            if status == 0:
                self.job.note("running")
                status = self.job.attend(self.job.ranks_words(), may_hang=True)
            if (self.run / "job/done").exists():  # the result is complete: a later signal does not make the job fail
                return End.ENDED, 0
            if status in (0, _USER_ERROR) or (self.run / "stopped").exists():
                return End.ENDED, status
            if self.job.heard():  # a warning that came too early, or too late
                return End.INTERRUPTED if self.job.stop == "USR2" else End.ENDED, status
            why, status = self._reason(status)
            gained = (*self._progress(), len(lines_of(self.run / "job/bad_nodes")))
            if self.job.restarts >= self.facts.restarts or gained == failed_at:
                return End.ENDED, status
            failed_at = gained
            self.job.restarts += 1
            restart = f"restart {self.job.restarts} of {self.facts.restarts}"
            self.job.say(f"the ranks ended with {why} at step {gained[0]}; {restart}")

    # Before a start: nodes, a guard, copies.

    def _find_nodes(self) -> tuple[list[str], End | None]:
        """Choose the nodes to use, in the job's order; return those that were in use and are gone, and why to end.

        Left out are nodes that job/bad_nodes names or the scheduler calls down, and those that cannot start ranks now.
        """
        for path in self.job.folder.glob("failure.*"):  # of an earlier start
            path.unlink(missing_ok=True)
        bad = bad_nodes(self.run)
        for name in [name for name in bad if not re.fullmatch(r"[A-Za-z0-9][\w.:-]*", name)][:8]:
            self.job.say(f"job/bad_nodes: {name!r} must be a node's name; write a line for each node")
        left_out = {short_name(name) for name in bad}
        by_name: dict[str, str] = {}
        for node in self.batch.nodes(self.job.job_id, self.job.restarts > 0):
            by_name.setdefault(short_name(node), node)
        candidates = [node for name, node in by_name.items() if name not in left_out]
        self.job.note("asking nodes")
        answers = self.job.ask(candidates)
        if self.job.heard():
            return [], End.INTERRUPTED
        wrong = {node: answer for node, answer in answers.items() if answer.wrong}
        for node in list(wrong)[:8]:
            self.job.say(f"{node} cannot start ranks: {wrong[node].wrong}")
        good = [node for node in candidates if node not in wrong]
        missing = [node for node in self.job.nodes.names if node not in good]
        self.job.use(good[: self.facts.nodes])
        self._answering = good
        # For the ranks: the nodes that the next start could replace, and lose.
        left = len(good) if self.job.restarts < self.facts.restarts else 0
        spares = f"{max(0, left - self.job.num_nodes)} {max(0, left - self.facts.min_nodes)}\n"
        (self.job.folder / "spares").write_text(spares, "utf-8")
        if self.job.num_nodes >= self.facts.min_nodes:
            return missing, None
        needed = f"needed: {self.facts.min_nodes}; set spare_nodes or min_nodes in the site profile"
        known = f"; {self.job.folder}/bad_nodes leaves out {','.join(bad)}" if bad else ""
        self.job.say(f"nodes left: {self.job.num_nodes} ({' '.join(self.job.nodes.names)}), {needed}{known}")
        # This node is not lost: a launcher that refuses all of them would refuse the next job, too.
        refuses = not good and bool(wrong) and all(answer.is_launchers for answer in wrong.values())
        return missing, End.REFUSED if self.job.restarts == 0 or refuses else End.LOST

    def _announce(self, why: str) -> None:
        (self.run / "stopped").unlink(missing_ok=True)
        self._set_guard()
        nodes = f"{self.job.num_nodes} node{'s' if self.job.num_nodes > 1 else ''}"
        ranks = f"{self.job.num_nodes * self.facts.ranks_per_node} ranks"
        where = f"from step {self._progress()[0]} on {nodes}, {ranks}"
        self.job.say(f"{self.run} {where}")
        if self.job.restarts:
            names = f": {' '.join(self.job.nodes.names)}" if self.job.chooses_nodes else ""
            line = f"job {self.job.job_id}: {why}; {where}{names}"
            self.job.add("restarts", f"{now('T')}{time.strftime('%z')} {line}")

    def _set_guard(self) -> None:
        """Have another node requeue the job if this one is lost.

        A job that may go on without a node stays without its script.
        """
        if self._guard is not None:
            self._guard.terminate()
        words = self.batch.on_another_node(self._answering) if self.facts.can_shrink else None
        if words is not None:
            launcher, node = words
            own = [sys.argv[0]] if sys.argv[0].endswith(".pyz") else ["-m", "summit_train.cluster.keeper"]
            keeper = [sys.executable, *own, str(self.run), self.job.job_id, "--watch", node]
            self._guard = self.job.start([*launcher, *keeper], subprocess.DEVNULL)

    def _copy_to_nodes(self) -> int:
        """Copy the environment and the packed sets to the nodes in use; return an exit status."""
        self.job.note("copying")
        if self.facts.environment is not None:
            self._copy_environment(self.facts.environment)
        for packed in self.facts.stage:
            if self.job.heard():
                return 0
            words = [*self.job.program_start(), "data", "stage", packed, self.job.staged]
            status = self.job.attend(self.job.on_each_node(words))
            if status != 0:
                return status
        return 0

    def _copy_environment(self, shared: str) -> None:
        """Have the ranks start from a copy on each node, or all of them from the shared one where a node has none."""
        start = time.monotonic()
        is_image = self.facts.image is not None
        what = "image" if is_image else "environment"
        self.job.python = [self.facts.python]
        self.job.image = self.facts.image
        on_node = ["bash", "-c", (pkgutil.get_data("summit_train", "jobs/copy.sh") or b"").decode(), "copy.sh"]
        source = shared  # one process of each node reads it
        if self.job.restarts == 0:
            status = self.job.attend(self.job.on_each_node([*on_node, "prepare", self._environment]))
            broadcast = self.batch.broadcast(shared, f"{self._environment}/file")  # to all of the job's nodes
            if status == 0 and broadcast and not self.facts.spare_nodes and not self.job.heard():
                status = self.job.attend(broadcast)
                source = f"{self._environment}/file" if status == 0 else shared
        if self.job.heard():
            return
        digest = [file_sha256(shared)] if is_image else []
        status = self.job.attend(self.job.on_each_node([*on_node, "unpack", self._environment, source, *digest]))
        disk = f"every node's {self.facts.node_local}"
        if status == 0:
            copy = f"{self._environment}/copy"
            self.job.image = copy
            # The working folder is last on its path.
            self.job.python = ["env", "PYTHONSAFEPATH=1", f"{copy}/bin/python"]
            self.job.say(f"the {what} is on {disk} after {time.monotonic() - start:.0f} s")
        elif not self.job.heard():
            self.job.say(f"warning: {shared} is not on {disk}; the ranks start from the shared {what}")

    def _remove_copies(self) -> None:
        folders = [self.job.staged] if self.facts.stage else []
        folders += [self._environment] if self.facts.environment is not None else []
        num_nodes = len(self.job.nodes.names) if self.job.chooses_nodes else self.job.num_nodes
        if folders and num_nodes > 0:
            self.job.attend(self.job.on_each_node(["rm", "-rf", "--", *folders]))

    # After the last start.

    def _finish(self, status: int) -> int:
        """Return the exit status of a job that is done or has failed."""
        if status == 0:
            for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            (self.run / "job/done").touch()
            self.job.note("done")
            self.job.say(f"done, {self.run}")
            if self.facts.sweep is not None:
                words = [self.facts.python, "-m", "summit_train", "sweep", self.facts.sweep, "--status"]
                try:
                    subprocess.run(words, stdin=subprocess.DEVNULL, check=True, timeout=_TABLE_SECONDS)
                except (OSError, subprocess.SubprocessError) as error:
                    self.job.say(f"the sweep's table is not up to date: {error}")
            return 0
        self.job.note("failed")
        after = f" after SIG{self.job.stop}" if self.job.stop else ""
        self.job.say(f"failed with exit status {status}{after}; not started again")
        return 1 if status == _STOPPED else status  # 85 would ask for a requeue

    def _continue_later(self, end: End, at_first: tuple[int, int]) -> int:
        """Have the run continued by this job or another one, if it may; return this job's exit status."""
        self.job.heard()
        self.job.note("stopped")
        last = self._progress()
        stopped = f"stopped at step {last[0]}"
        preemption = self.batch.preemption(self.job.job_id)
        if preemption == "requeued":
            self.job.say(f"{stopped}; the scheduler has requeued it, and starts it again")
            return _TERMINATED
        if self.job.stop in ("TERM", "INT") and not preemption:
            self.job.note("cancelled")
            unless = "" if self.facts.scheduler == "slurm" else ", unless the scheduler starts it again"
            self.job.say(f"stopped by SIG{self.job.stop} at step {last[0]}; submit it again to continue{unless}")
            return _TERMINATED
        # If eval.json exists, only the report is missing.
        is_idle = last[0] <= at_first[0] and last[1] == at_first[1] and not (self.run / "eval.json").exists()
        if is_idle and end is not End.LOST and not preemption:
            self.job.say(f"{stopped} without a new step or score since its start; not started again")
            return 1
        last_of_chain = "".join(lines_of(self.job.folder / "last_job"))
        if last_of_chain not in ("", self.job.job_id):
            self.job.say(f"{stopped}; the next job of the chain goes on")
            return 0
        if self.batch.command is None:
            self.job.say(f"{stopped}; submit it again to continue")
            return _STOPPED
        return self._requeue(stopped, "preemptions" if preemption else "requeues", bool(last_of_chain))

    def _requeue(self, stopped: str, kind: str, is_chain: bool) -> int:
        """Ask for the job's continuation, if it may have one more; RUN/job/`kind` has a line for each."""
        former = lines_of(self.job.folder / kind)
        most = self.facts.max_requeues * (10 if kind == "preemptions" else 1)  # which are not the job's fault
        if len(former) >= most:
            self.job.say(f"{stopped} after {len(former)} {kind}, no more are allowed; submit it again to continue")
            return 1
        self.job.say(f"{stopped}; requeued, {len(former) + 1} of {most} {kind}")
        self.job.add(kind, f"{self.job.job_id} {stopped.removeprefix('stopped at ')}")
        try:
            new = self.batch.requeue(self.job.job_id, self.job.folder / "job.sh", self.facts.launcher)
        except RunFailed as error:
            (self.job.folder / kind).write_text("".join(f"{line}\n" for line in former), "utf-8")
            self.job.say(f"not requeued: {error}; submit it again to continue")
            return 1
        self.job.note("requeued")
        if new is not None:  # the sweep's status and the next submission look for it there
            self.job.say(f"job {new} continues")
            submissions = map(json.loads, lines_of(self.job.folder / "submitted.jsonl"))
            for submission in [line for line in submissions if line["id"] == self.job.job_id][-1:]:
                self.job.add("submitted.jsonl", json.dumps({**submission, "id": new}))
            if is_chain:
                (self.job.folder / "last_job").write_text(f"{new}\n", "utf-8")
        return _STOPPED

    # What there is.

    def _reason(self, status: int) -> tuple[str, int]:
        """Return why the ranks failed: a rank's words if it left some, as the launcher may have been killed here."""
        failure = self.job.environ.get(FAILURE)
        lines = lines_of(Path(failure)) if failure else []
        if not lines:
            return f"exit status {status}", status
        first = re.sub("^summit-train[:,] ", "", lines[0])
        return f'"{" ".join([first, *lines[1:][-1:]])}"', 1

    def _progress(self) -> tuple[int, int]:
        """Return the number of updates in the newest checkpoint, and the bytes of a stopped evaluation's scores."""
        scored = 0
        for path in self.run.glob("predictions/*.partial"):
            with suppress(OSError):
                scored += path.stat().st_size
        return max(map(step_of, find_checkpoints(self.run)), default=0), scored


def _seconds_since_start() -> int:
    """Return the seconds since this process began, as the job's script."""
    ticks = int(Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()[19])
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


_USAGE = "usage: python -m summit_train.cluster.keeper RUN JOB -- LAUNCHER ... -- PROGRAM ... (or -- PROGRAM ...)"


def main(words: Sequence[str], waits: Waits = USUAL) -> int:
    """Keep the job whose script has these words; return its exit status."""
    if len(words) < 4 or words[2] not in ("--", "--watch"):
        print(_USAGE, file=sys.stderr)
        return _USER_ERROR
    run = Path(words[0])
    job_id = words[1]
    about = run / "job/job.json"
    if not about.exists():
        print(f"{about} is missing; write script and spec by `summit-train submit --write`", file=sys.stderr)
        return _USER_ERROR
    values = json.loads(about.read_text("utf-8", errors="surrogateescape"))
    # A newer version may have written others.
    facts = JobFacts(**{name: values[name] for name in JobFacts.__dataclass_fields__ if name in values})
    if words[2] == "--watch":
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        SCHEDULERS[facts.scheduler].watch(job_id, words[3], run / "job", facts.max_requeues, waits.watch)
        return 0
    launcher: list[str] = []
    program = list(words[3:])
    if "--" in program:
        at = program.index("--")
        launcher = program[:at]
        program = program[at + 1 :]
    try:
        program_end(program)
    except ValueError as error:
        print(f"{_USAGE}: PROGRAM {error}", file=sys.stderr)
        return _USER_ERROR
    return Keeper(RunningJob(run, job_id, facts, launcher, program, waits)).keep()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
