"""What a soak does: it starts a run again and again, does it harm, and counts what that cost and what it left."""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from summit_train.core.files import file_sha256
from summit_train.core.processes import find_mpirun, mpi_environment, mpirun_command, torchrun_command
from summit_train.core.run_folder import find_checkpoints
from summit_train.data.motion import MotionSet, write_motion_set
from summit_train.report.goodput import time_spent
from summit_train.report.records import RunRecord
from tests import slurm
from tests.conftest import spec_writer
from tests.runs import assert_bit_equal, final_state, records
from tests.worlds import PATIENCE_S, ROOT, children, environment

MARK = "SUMMIT_TRAIN_SOAK"  # in the environment of every process of a soak
STEPS_AN_EPOCH, PULSES, ROOM = 40, 8, 1 << 20
RANK_NAMES = ("OMPI_COMM_WORLD_RANK=", "SLURM_PROCID=", "RANK=")

UNASKED = "none"  # what a start died of by itself
# What the ranks must say of a fault, or the next start where "then" stands before it; "" for one that nobody survives
# to name, and for one that ends nothing.
KINDS = {
    "kill": "",
    "stop": r"rank \d+ on \S+ has been silent|no progress",
    "full disk": r"could not be written: File too large|File too large",
    "torn file": r"then passed over: \S+ the file is damaged",
    "lost node": "",
    "slow rank": "",
    "NaN": r"loss or gradient that is not finite",
    "bad video": r"train_\d+\.mp4",
    "loader death": r"a worker process has died|kills the process that reads it",
    "signal": r"stopped by",
}


@dataclass
class Fault:
    """A fault of a rank, a file or a node.

    at: the highest step before it ended the ranks, or when it came. status: of the launcher, None where the run went
    on. named: the ranks said what it was; None where none of them can.
    """

    kind: str
    at: int
    status: int | None = None
    named: bool | None = None


@dataclass
class Found:
    """What the soak found. left: processes after each start, and files and sockets at the end, by their names."""

    faults: list[Fault] = field(default_factory=list)
    runs: int = 0
    equal: int = 0
    starts: int = 0
    goodput: list[float] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


class Job:
    """One start of a run: its launcher, and its processes, found by their environment."""

    def __init__(self, spec: Path, words: Sequence[str], environ: Mapping[str, str]) -> None:
        self.spec, self.mark = spec, uuid.uuid4().hex
        self.output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (lives as long as this)
        self.launcher = subprocess.Popen(
            [*words, sys.executable, "-m", "tests.soak.rank", "train", str(spec)],
            env={**environ, MARK: self.mark},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output,
            start_new_session=True,
        )

    def printed(self) -> str:
        self.output.seek(0)
        return self.output.read()

    def processes(self) -> dict[int, tuple[str, list[str]]]:
        """The processes of this start that have not ended: process -> command line, environment."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (process / "environ").read_text(errors="replace").split("\0")
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                # Without words it has ended and waits for its parent.
                if words and f"{MARK}={self.mark}" in variables:
                    found[int(process.name)] = (words, variables)
        return found

    def ranks(self) -> dict[int, int]:
        """Rank -> process."""
        found = {}
        for pid, (words, variables) in self.processes().items():
            if f"{sys.executable} -m tests.soak.rank" in words[:200]:
                numbers = [v.removeprefix(name) for name in RANK_NAMES for v in variables if v.startswith(name)]
                found |= {int(number): pid for number in numbers[:1]}
        return found

    def workers(self) -> list[int]:
        """The processes that load clips: what the ranks' fork servers have forked."""
        servers = {pid for pid, (words, _) in self.processes().items() if "fork_server.serve" in words}
        return sorted(pid for server in servers for pid in children(server) if pid in servers)

    def clear(self) -> list[str]:
        """Give the processes of this start a moment to end; kill those that have not, and name them."""
        deadline = time.monotonic() + 20
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [f"process {words[:100]}" for words, _ in left.values()]


class Soak:
    """The soak of one set of options; `found` grows with it."""

    def __init__(self, args: argparse.Namespace, folder: Path, cluster: slurm.Slurm | None) -> None:
        self.args, self.folder, self.cluster = args, folder, cluster
        self.chance, self.found = random.Random(args.seed), Found()
        self.kinds = [kind for kind in args.kinds if kind != "lost node" or cluster is not None]
        (folder / "tmp").mkdir()
        variables = {"SUMMIT_TRAIN_COMM": args.comm, "TMPDIR": str(folder / "tmp"), "PYTHONUNBUFFERED": "1"}
        self.environ = mpi_environment(environment(**variables))
        mpirun = find_mpirun()
        ranks = args.ranks
        self.words = mpirun_command(mpirun or "", ranks) if args.comm == "horovod" else torchrun_command(ranks)
        self.queue = list[str]()
        self.videos = write_data(folder / "data", ranks * 2 * STEPS_AN_EPOCH)
        write_data(folder / "calm_data", ranks * 2 * STEPS_AN_EPOCH)  # the same bytes, which no fault reaches

    def run(self) -> Found:
        calm = self._spec("calm", "calm_data")
        job = Job(calm, self.words, self.environ)  # alongside the first run with faults
        while not self.found.runs or not self._is_over():
            spec = self._spec(f"soaked{self.found.runs}", "data")
            self._train(spec)
            if self.found.runs == 0:
                if job.launcher.wait() != 0:
                    raise SystemExit(f"the run without faults failed:\n{job.printed()}")
                self.found.left += job.clear()
            self.found.runs += 1
            self.found.equal += _are_equal(calm, spec)
            run = RunRecord(_run_path(spec))
            self.found.starts += len(run.log.starts)
            if (spent := time_spent(run)) is not None:
                self.found.goodput.append(spent.goodput)
        self.found.left += [str(path) for path in Path("/dev/shm").iterdir()] if self.args.private else []
        self.found.left += [str(path) for path in (self.folder / "tmp").rglob("*") if _is_left(path)]
        self.found.left += [str(path) for path in (self.folder / "runs").rglob(".*")]
        return self.found

    def _is_over(self) -> bool:
        """Whether all faults have come that were asked for."""
        kinds = {fault.kind for fault in self.found.faults}
        return len(self.found.faults) >= self.args.faults or kinds >= set(self.kinds)

    def _spec(self, name: str, data_name: str) -> Path:
        return spec_writer(self.folder / data_name, self.folder)(
            name,
            data={"workers": 1},
            scale={"gpus": self.args.ranks},
            schedule={"epochs": self.args.steps // STEPS_AN_EPOCH},
            evaluate={"every_epochs": 10},
            checkpoint={"every_minutes": self.args.checkpoint_s / 60, "background": True, "keep": 2},
            watch={"stall_seconds": self.args.stall_s},
        )

    def _train(self, spec: Path) -> None:
        """Start the run again and again until it reaches its end, with a fault when one is due."""
        pending: Fault | None = None
        total = self.args.steps // STEPS_AN_EPOCH * STEPS_AN_EPOCH
        while True:
            kind, due = self._next_kind(), math.inf
            before, job_faults = _progress(spec).starts, len(self.found.faults)
            job = self._start(spec, kind)
            while kind is not None and job.launcher.poll() is None:
                time.sleep(0.2)
                steps = _progress(spec)
                if steps.starts == before or steps.since < 2 or steps.highest == total:
                    continue
                if due == math.inf:  # the time in which nothing is trained does not count
                    due = time.monotonic() + self.chance.expovariate(1 / self.args.every)
                if time.monotonic() < due:
                    continue
                fault = Fault(kind, steps.highest)
                if not self._inject(fault, job, spec):
                    continue  # not possible yet, such as to tear a file that has none before it
                self.queue.pop(0)
                self.found.faults.append(fault)
                due, kind = math.inf, None
                if fault.kind == "slow rank":
                    self._tell(fault)
                    kind = self._next_kind()
            status = self._ended(job, spec)
            output = job.printed()
            self.found.left += job.clear()
            if pending is not None and (rule := KINDS.get(pending.kind, "")).startswith("then "):
                pending.named = re.search(rule.removeprefix("then "), output) is not None
            self._repair()
            if status == 0:
                return
            if kind is not None or job_faults == len(self.found.faults):
                self.found.faults.append(Fault(UNASKED, 0))
                print(output[-4000:], file=sys.stderr)
            pending = self.found.faults[-1]
            pending.status = status
            pending.at = _progress(spec).highest
            if (rule := KINDS.get(pending.kind, "")) and not rule.startswith("then "):
                pending.named = re.search(rule, output) is not None
            self._tell(pending)

    def _ended(self, job: Job, spec: Path) -> int:
        """Wait for the end of a start; the launcher's status."""
        seen, since = _progress(spec), time.monotonic()
        while (status := job.launcher.poll()) is None:
            time.sleep(0.5)
            if (now := _progress(spec)) != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() - since > PATIENCE_S:
                raise SystemExit(f"the run hangs after {self.found.faults[-1:]}:\n{job.printed()[-4000:]}")
        return status

    def _start(self, spec: Path, kind: str | None) -> Job:
        if kind != "lost node" or self.cluster is None:
            return Job(spec, self.words, self.environ)
        self.cluster.wait_until(self.cluster.is_idle, "all nodes")
        # Without PMIx the ranks find each other at an address that is named: this machine does not know its nodes.
        joined = {"SUMMIT_TRAIN_COMM": "torch", "MASTER_ADDR": "127.0.0.1", "TMPDIR": self.environ["TMPDIR"]}
        words = ["srun", "-N2", f"-n{self.args.ranks}", "--kill-on-bad-exit=1", "--mpi=none"]
        return Job(spec, words, {**self.cluster.environ, **joined, "OMP_NUM_THREADS": "1"})

    def _next_kind(self) -> str | None:
        """The kind of the next fault, None after the last; a new round where the last one is over."""
        if len(self.found.faults) >= self.args.faults:
            return None
        while not self.queue:
            queue = self.chance.sample(self.kinds, len(self.kinds))
            # A slow rank ends no start, and a node can only be lost in a start of its own.
            last = ["slow rank"] if self.found.faults[-1:] and self.found.faults[-1].kind == "slow rank" else []
            if ("slow rank", "lost node") not in pairwise([*last, *queue]) or len(queue) < 3:
                self.queue = queue
        return self.queue[0]

    def _inject(self, fault: Fault, job: Job, spec: Path) -> bool:
        """Do it; return whether it could be done."""
        ranks = job.ranks()
        if len(ranks) < self.args.ranks:
            return False
        victim = ranks[self.chance.randrange(self.args.ranks)]
        with suppress(ProcessLookupError):  # the run reached its end at this moment
            match fault.kind:
                case "kill":
                    os.kill(victim, signal.SIGKILL)
                case "stop":
                    os.kill(victim, signal.SIGSTOP)
                case "full disk":  # for files beyond a megabyte: checkpoints, but not the log
                    resource.prlimit(ranks[0], resource.RLIMIT_FSIZE, (ROOM, resource.RLIM_INFINITY))
                case "torn file":
                    checkpoints = find_checkpoints(_run_path(spec))
                    if len(checkpoints) < 2:
                        return False
                    os.kill(victim, signal.SIGKILL)
                    os.truncate(checkpoints[-1], self.chance.randrange(checkpoints[-1].stat().st_size))
                case "lost node":
                    assert self.cluster is not None
                    self.cluster.lose(slurm.NODES[1])
                case "slow rank":
                    for _ in range(PULSES):
                        os.kill(victim, signal.SIGSTOP)
                        time.sleep(1)
                        os.kill(victim, signal.SIGCONT)
                        time.sleep(0.3)
                case "NaN":
                    os.kill(victim, signal.SIGUSR1)
                case "bad video":
                    flip_a_byte(self.chance.choice(self.videos), self.chance)
                case "loader death":
                    workers = job.workers()
                    if not workers:
                        return False
                    os.kill(self.chance.choice(workers), signal.SIGKILL)
                case "signal":
                    os.kill(victim, signal.SIGUSR2)
        return True

    def _repair(self) -> None:
        """Bring back what a fault took away: the videos' bytes and the node."""
        for video in self.videos:
            saved = video.with_suffix(".saved")
            if saved.exists():
                saved.replace(video)
        if self.cluster is not None:
            self.cluster.bring_back()

    def _tell(self, fault: Fault) -> None:
        status = "went on" if fault.status is None else f"status {fault.status}"
        said = {None: "", True: ", named", False: ", NOT named"}[fault.named]
        print(f"fault {len(self.found.faults)}: {fault.kind} at step {fault.at}: {status}{said}", file=sys.stderr)


class Progress(NamedTuple):
    """How often a run has begun to train, its steps since it last did, the highest step."""

    starts: int
    since: int
    highest: int


def _progress(spec: Path) -> Progress:
    starts = records(_run_path(spec), "start")
    steps = records(_run_path(spec), "step")
    begun = starts[-1]["time"] if starts else 0.0
    since = sum(step["time"] >= begun for step in steps)
    return Progress(len(starts), since, max((step["step"] for step in steps), default=0))


def _is_left(path: Path) -> bool:
    """Whether a file or a socket was left, other than the reason of a failed rank, which torchrun keeps."""
    if path.name == "error.json" and any(parent.name.startswith("torchelastic_") for parent in path.parents):
        return False
    with suppress(FileNotFoundError):
        return not stat.S_ISDIR(path.lstat().st_mode)
    return False


def _run_path(spec: Path) -> Path:
    return spec.parent / "runs" / spec.stem


def _are_equal(calm: Path, soaked: Path) -> bool:
    """Whether two runs ended in the same bits, with the same accuracy."""
    one, other = map(_run_path, (calm, soaked))
    try:
        assert_bit_equal(final_state(one), final_state(other))
    except AssertionError as error:
        print(f"{soaked.stem}: not the bits of the run without faults: {error}", file=sys.stderr)
        return False
    top1 = {json.loads((run / "eval.json").read_text())["top1_mean"] for run in (one, other)}
    return len(top1) == 1


def write_data(folder: Path, num_train: int) -> list[Path]:
    """Write the motion set, with the SHA-256 of each video in its lists; the training videos."""
    list(write_motion_set(folder, num_train, 8, MotionSet(size=32, num_frames=8)))
    for name in ("train", "val"):
        with open(folder / f"{name}.csv", newline="") as file:
            rows = [row | {"sha256": file_sha256(folder / row["path"])} for row in csv.DictReader(file)]
        with open(folder / f"{name}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return sorted((folder / "videos").glob("train_*.mp4"))


def flip_a_byte(video: Path, chance: random.Random) -> None:
    """Damage a video in place; its bytes are kept beside it."""
    shutil.copyfile(video, video.with_suffix(".saved"))
    with open(video, "r+b") as file:
        place = chance.randrange(video.stat().st_size)
        file.seek(place)
        (old,) = file.read(1)
        file.seek(place)
        file.write(bytes([old ^ 0xFF]))
