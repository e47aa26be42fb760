"""A job in progress: the words of its launchers for each start, the nodes that answer, signals, and its log.

Python 3.9 and the standard library suffice.
"""

from __future__ import annotations

import os
import re
import secrets
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from summit_train.cluster.scheduler import Nodes, short_name
from summit_train.cluster.schedulers import SCHEDULERS
from summit_train.core.errors import UserError
from summit_train.core.files import write_json
from summit_train.core.run_folder import FAILURE

SECRET = "SUMMIT_TRAIN_SECRET"  # ranks prove to each other that they know it; no other process can join them
_MOST_AT_ONCE = 128
_PROGRAM_WORDS = 3  # PYTHON -m summit_train
# On each node: do what a rank needs, and print one line with node, status and the last of the words.
_ANSWER = """words=$("$@" 2>&1 </dev/null); code=$?; test $code = 0 && words=
echo "@answer ${SLURMD_NODENAME:-$(uname -n)} $code ${words##*
}\""""


@dataclass(frozen=True)
class JobFacts:
    """The facts of a job that `submit` writes to RUN/job/job.json.

    python: the interpreter of `submit`, which is that of the ranks outside of containers.
    min_nodes: the fewest to start on. can_shrink: the job may go on without a node that it had.
    warn_after_s: seconds after the start until the warning, where the scheduler sends none.
    stage: packed sets to copy to node_local; environment: a tar of one, or an image, to copy there too.
    sweep: folder of the sweep whose table to write. trains: the program trains RUN/job/spec.yaml.
    """

    scheduler: str
    launcher: str
    python: str
    nodes: int
    ranks_per_node: int
    min_nodes: int
    can_shrink: bool
    spare_nodes: int
    restarts: int
    max_requeues: int
    warn_after_s: int
    has_secret: bool
    stage: Sequence[str]
    node_local: str | None
    environment: str | None
    image: str | None
    sweep: str | None
    trains: bool


class Waits(NamedTuple):
    """Seconds: for the next node's answer at the first start and at others, for a launcher after its ranks have failed.

    The first start may read all files from a slow file system. look: between two looks for answers or a failure. watch:
    between two questions whether the script's own node is lost. lock: for that of another job; NFS frees that of a lost
    node after 90 s.
    """

    first_answer: float = 120
    answer: float = 30
    look: float = 5
    launcher: float = 20
    watch: float = 30
    lock: float = 100


USUAL = Waits()


class Answer(NamedTuple):
    """What is wrong with a node that was asked to start the program, and whether the launcher says so; or nothing."""

    wrong: str = ""
    is_launchers: bool = False


class Signals:
    """The signals that come to this process, in order; SIGCHLD only ends a waiting."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._read, write = os.pipe()
        for end in (self._read, write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (*numbers, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)

    def wait(self, seconds: float) -> list[signal.Signals]:
        """Return those that have come, at once or within these seconds."""
        select.select([self._read], [], [], max(seconds, 0))
        with suppress(BlockingIOError):
            return [signal.Signals(byte) for byte in os.read(self._read, 4096) if byte != signal.SIGCHLD]
        return []


class RunningJob:
    """The job of a script that runs now.

    launcher, program: the words of the script; no launcher where the program starts its ranks itself. nodes: those in
    use. node_local: the folder that the profile names, its variables filled in. python, image: the values of {python}
    and {image}. stop: the signal that asked the job to stop, or "".
    """

    def __init__(
        self, run: Path, job_id: str, facts: JobFacts, launcher: Sequence[str], program: Sequence[str], waits: Waits
    ) -> None:
        self.run = run
        self.folder = run / "job"
        self.job_id = job_id
        self.facts = facts
        self.launcher = launcher
        self.program = program
        self.waits = waits
        self.batch = SCHEDULERS[facts.scheduler]
        self.chooses_nodes = facts.launcher in self.batch.can_spare
        self.nodes = Nodes((), self.folder / "hosts")
        self.num_nodes = facts.nodes
        self.restarts = 0
        self.stop = ""
        self.node_local = os.path.expandvars(facts.node_local or "")
        self.staged = f"{self.node_local}/summit_train_{job_id}"
        self.python = [facts.python]
        self.image = facts.image
        self._attended: int | None = None  # the process that gets the signals
        self._began = int(time.time())
        self._script_environ = dict(os.environ)
        if facts.has_secret:
            self._script_environ.setdefault(SECRET, secrets.token_hex(32))
        self.environ = self.batch.environment(self._script_environ, (), False)
        stops = [signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if self.batch.hangs_up else [])]
        self._signals = Signals(*stops, signal.SIGALRM)

    def use(self, nodes: Sequence[str]) -> None:
        """Launch on these nodes from now on."""
        self.nodes = self.nodes._replace(names=nodes)
        self.num_nodes = len(nodes)
        self.environ = self.batch.environment(self._script_environ, nodes, self.restarts > 0)
        # A rank that fails leaves its reason there: a name for each start, as ranks of an earlier one may still end.
        self.environ[FAILURE] = str(self.folder / f"failure.{self._began}.{self.restarts}")
        lines = self.batch.lines(self.facts.launcher, nodes, self.facts.ranks_per_node)
        self.nodes.file.write_text(lines, "utf-8")

    def ask(self, candidates: Sequence[str]) -> dict[str, Answer]:
        """Ask nodes to start the program; return their answers: nothing where it starts, else what is wrong.

        They are asked in one step. Those that are unknown then, as a launcher may need all of them to start anything,
        are asked one by one.
        """
        answers: dict[str, Answer] = {}
        with tempfile.TemporaryDirectory() as folder:
            if len(candidates) > 1 and (self.restarts == 0 or self.batch.asks_at_once):
                answers = self._ask_step([(candidates, Path(folder, "all"))])
            rest = [node for node in candidates if node not in answers]
            while rest and not self.stop:
                answers.update(self._ask_step([([node], Path(folder, node)) for node in rest[:_MOST_AT_ONCE]]))
                rest = rest[_MOST_AT_ONCE:]
        return answers

    def _ask_step(self, groups: Sequence[tuple[Sequence[str], Path]]) -> dict[str, Answer]:
        """Ask groups of nodes at once, each by a launch of its own with a file for its nodes; return the answers.

        A single node always has one. A signal that asks the job to stop ends this early.
        """
        end = program_end(self.program)
        # Behind the launcher's own options, which a runtime of containers may have in the program's place.
        first = end - _PROGRAM_WORDS if self.program[0].startswith("-") else 0
        program = [*self._filled(self.program[:first]), "sh", "-c", _ANSWER, "sh"]
        program += self._filled(self.program[first:end])
        program += ["doctor", "--answer", str(self.run / "job/spec.yaml")] if self.facts.trains else ["--version"]
        seconds = self.waits.answer if self.restarts else self.waits.first_answer
        asking: list[tuple[Sequence[str], IO[bytes], subprocess.Popen[bytes]]] = []
        for nodes, file in groups:
            file.write_text(self.batch.lines("", nodes, 1), "utf-8")
            launcher = self._one_each(Nodes(nodes, file), len(nodes))
            output: IO[bytes] = open(f"{file}.out", "w+b")  # noqa: SIM115  (closed below)
            asking.append((nodes, output, self.start([*launcher, *program], output)))
        until = time.monotonic() + seconds
        num_answers = 0
        while not self.heard() and time.monotonic() < until:
            if all(process.poll() is not None for _, _, process in asking):
                break
            self.hear(min(self.waits.look, until - time.monotonic()))
            former = num_answers
            num_answers = sum(Path(output.name).read_bytes().count(b"@answer ") for _, output, _ in asking)
            if num_answers > former:  # a thousand nodes that read the same files take their time
                until = time.monotonic() + seconds
        answers: dict[str, Answer] = {}
        for nodes, output, process in asking:
            is_late = process.poll() is None
            if is_late:
                process.kill()
                process.wait()
            output.seek(0)
            found = _answers(output.read().decode(errors="replace"), nodes)
            output.close()
            if len(nodes) == 1 or (is_late and found):  # those that are silent while others answer
                wrong = f"no answer within {seconds:g} s" if is_late else f"exit status {process.returncode}"
                found = {**dict.fromkeys(nodes, Answer(wrong)), **found}
            answers.update(found)
        if any(process.returncode == -signal.SIGKILL for _, _, process in asking):
            self.batch.end_ranks()
        return answers

    def _filled(self, words: Sequence[str]) -> list[str]:
        """Return words with the names in braces filled in; {python} may become several words.

        Raises UserError for another name. ${NAME} is left to a shell.
        """
        values = {
            "nodes": self.num_nodes,
            "ranks": self.num_nodes * self.facts.ranks_per_node,
            "hosts": self.batch.hosts(self.nodes),
            "hostfile": self.nodes.file,
            "staged": self.staged,
            **({} if self.image is None else {"image": self.image}),
        }

        def value(found: re.Match[str]) -> str:
            if found[1] not in values:
                right = f"must be one of {', '.join(values)}, or python in a word of its own"
                raise UserError(f"the script's last line: {found.string}: {found[0]}: {right}")
            return str(values[found[1]])

        filled: list[str] = []
        for word in words:
            if word == "{python}":
                filled += self.python
            elif word.startswith((str(self.run), self.facts.python)):  # a path may have braces of its own
                filled.append(word)
            else:
                filled.append(re.sub(r"(?<!\$)\{(\w+)\}", value, word))
        return filled

    def ranks_words(self) -> list[str]:
        """Return the script's words that start the ranks on the nodes in use."""
        return [*self._filled(self.launcher), *self._filled(self.program)]

    def program_start(self) -> list[str]:
        """Return the words that start this program in the ranks' environment, up to its own."""
        return self._filled(self.program[: program_end(self.program)])

    def _one_each(self, nodes: Nodes, num_nodes: int) -> list[str]:
        """Return words that start a process on each node, with the variables that the script hands to mpirun."""
        launcher = self.batch.on_each_node(self.facts.launcher, nodes, num_nodes)
        if launcher[:1] != ["mpirun"]:
            return launcher
        names = [self.launcher[i + 1] for i, word in enumerate(self.launcher) if word == "-x"]
        return launcher + [word for name in names if name in self.environ for word in ("-x", name)]

    def on_each_node(self, words: Sequence[str]) -> list[str]:
        """Return words that start one process of a command on each node in use."""
        return [*self._one_each(self.nodes, self.num_nodes), *words]

    def start(self, words: Sequence[str], output: IO[bytes] | int | None = None) -> subprocess.Popen[bytes]:
        """Start a process that the terminal's signals, and some of the scheduler's, do not reach."""
        ignored = [signal.SIGINT, signal.SIGQUIT, *self.batch.not_for_launchers.get(self.facts.launcher, ())]

        def ignore() -> None:
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)

        return subprocess.Popen(
            ["sh", "-c", 'exec "$@"', "sh", *words],  # which has words for a program that is missing
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            preexec_fn=ignore,
        )

    def attend(self, words: Sequence[str], may_hang: bool = False) -> int:
        """Run a command to its end, hand signals to it, and return its exit status, as a shell has it.

        may_hang: the command is ended soon after its ranks have failed, as a launcher may wait for a node that is
        silent until the scheduler gives that up, minutes later.
        """
        process = self.start(words)
        self._attended = process.pid
        failure = Path(self.environ[FAILURE]) if may_hang and self.facts.restarts and self.chooses_nodes else None
        end_at = None
        while process.poll() is None:
            self.hear(self.waits.look if end_at is None else end_at - time.monotonic())
            if end_at is None and failure is not None and failure.exists():
                end_at = time.monotonic() + self.waits.launcher
            elif end_at is not None and time.monotonic() >= end_at:
                self.say("the ranks have failed, but the launcher still waits: ending it")
                self.batch.end_ranks()
                process.kill()
                process.wait()
        self._attended = None
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

    def hear(self, seconds: float) -> list[signal.Signals]:
        """Wait for a signal or for the end of a process; return the signals that ask the job to stop."""
        numbers = self._signals.wait(seconds)
        for number in numbers:
            # By its own alarm a job is warned where the scheduler does not, and a hang-up is how one is cancelled.
            name = {signal.SIGALRM: "USR2", signal.SIGHUP: "TERM"}.get(number, number.name[3:])
            if self.stop not in ("TERM", "INT"):  # a cancelled job that is warned, too, stays cancelled
                self.stop = name
            if self._attended is not None:
                self.batch.ask_to_stop(self.facts.launcher, self._attended)
            self.say(f"SIG{name}: the {'job' if self._attended is None else 'ranks'} must stop, with a checkpoint")
        return numbers

    def heard(self) -> bool:
        """Check for signals; return True if one has asked the job to stop."""
        self.hear(0)
        return self.stop != ""

    def say(self, text: str) -> None:
        """Write a line for people: to the job's output, and to RUN/job/log."""
        line = f"{now(' ')} job {self.job_id}: {text}"
        with suppress(OSError):  # a full disk, or a reader that has gone, must not end the keeper of ranks that run
            os.write(1, f"{line}\n".encode("utf-8", "surrogateescape"))
        self.add("log", line)

    def add(self, name: str, line: str) -> None:
        """Append a line to a file in RUN/job."""
        with suppress(OSError), open(self.folder / name, "a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(f"{line}\n")

    def note(self, state: str) -> None:
        """Write the job's state for programs: RUN/job/state.json."""
        values = {"job": self.job_id, "state": state, "since": time.time(), "restarts": self.restarts}
        with suppress(OSError):  # a full disk ends the ranks, and they say so
            write_json(self.folder / "state.json", {**values, "nodes": list(self.nodes.names)})


def _answers(text: str, nodes: Sequence[str]) -> dict[str, Answer]:
    """Return the answers of nodes in the output of the launcher that asked them; for one node always one."""
    by_name = {short_name(node): node for node in nodes}
    answers: dict[str, Answer] = {}
    others: list[str] = []  # the launcher's own words
    for line in filter(str.strip, text.splitlines()):
        found = re.match(r"@answer (\S+) (\d+) (.*)", line)
        if found is None:
            others.append(line)
            continue
        node = nodes[0] if len(nodes) == 1 else by_name.get(short_name(found[1]), "")
        answers[node] = Answer("" if found[2] == "0" else found[3] or f"exit status {found[2]}")
    errors = [line for line in others if re.search("error|fatal", line, re.IGNORECASE)]
    for node in nodes:
        naming = [line for line in errors if re.search(rf"\b{re.escape(node)}\b", line)]
        if len(nodes) == 1:
            naming = [*errors, *others[-1:]]
        if node not in answers and naming:
            answers[node] = Answer(naming[0], is_launchers=True)
    answers.pop("", None)
    return answers


def program_end(words: Sequence[str]) -> int:
    """Return the index behind `PYTHON -m summit_train` in words. Raises ValueError where they lack it."""
    for end in range(2, len(words) + 1):
        if list(words[end - 2 : end]) == ["-m", "summit_train"]:
            return end
    raise ValueError(f"must be ... -m summit_train ..., got {list(words)}")


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file; an empty list where it is missing."""
    with suppress(FileNotFoundError):
        return path.read_text("utf-8", errors="surrogateescape").splitlines()
    return []


def now(between: str) -> str:
    """Return the local time, with this between date and time of day."""
    return time.strftime(f"%Y-%m-%d{between}%H:%M:%S")
