"""A real Slurm of three nodes on this machine: its own munged, slurmctld and a slurmd each, in a folder and on ports of
its own. Nothing in /etc is read or written, and nothing is left running."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from summit_train.__main__ import main
from summit_train.cluster.submit import submissions
from summit_train.core.comm.launch import Launch, job_address
from summit_train.core.processes import find_mpirun
from summit_train.core.run_folder import find_checkpoints, step_of
from summit_train.spec import load_spec
from tests.runs import steps_of
from tests.worlds import PATIENCE_S, ROOT, environment, forked

NODES = ("n1", "n2", "n3")
_DAEMONS = ("munged", "slurmctld", "slurmd")
_TOOLS = ("sbatch", "srun", "scancel", "scontrol", "squeue", "setpriv")
_LIBRARIES = {"its pmix plugin": "*/slurm*/mpi_pmix.so", "libpmix.so": "*/pmix2/lib/libpmix.so"}
_SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"  # a user's PATH need not have the daemons

# Three names for one machine, which has as many cores as the tests ask for. Delays that serve a real cluster are short
# here: a requeued job waits for the life of its credential before it starts again.
_CONFIG = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
TmpFS={folder}/tmp.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
KillWait=5
MessageTimeout={message_timeout}
MaxArraySize=100
PlugStackConfig={folder}/plugstack.conf
ReturnToService=2
SlurmdTimeout={timeout}
FirstJobId={first_job}
"""


SITE = f"""
name: two_nodes
extends: {ROOT}/configs/sites/slurm_generic.yaml
gpus_per_node: 0
ranks_per_node: 1
cores_per_node: 1
bind: false
warning_seconds: 10
directives: []
environment:
  OMP_NUM_THREADS: {{value: "1", why: both nodes are one machine}}
  OMPI_MCA_mpi_yield_when_idle: {{value: "1", why: a rank that waits leaves the core to the others}}
"""
# Without PMIx srun's ranks find each other by the job's number, here at an address that is named: this machine does not
# know its nodes' names.
BY_TORCH = ("comm=torch", "launcher_options=[]", "setup=[export MASTER_ADDR=127.0.0.1]")


class SlurmError(RuntimeError):
    """The cluster does not do what a test needs of it; the message has its logs."""


def missing() -> str | None:
    """What this machine lacks for a Slurm of its own, or None."""
    if os.geteuid() != 0:
        return "a Slurm of its own needs root"
    lacking = [name for name in (*_DAEMONS, *_TOOLS) if _program(name) is None]
    lacking += [name for name, pattern in _LIBRARIES.items() if not list(Path("/usr/lib").glob(pattern))]
    if lacking:
        return f"Slurm lacks {', '.join(lacking)}; as root on Debian `make test` installs it"
    return None if find_mpirun() else "no mpirun; `make setup` installs it"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}")


class Slurm:
    """A running cluster of nodes n1 to n3 with partition `test`; `environ` is what its users' programs need."""

    def __init__(self, folder: Path, cpus: int = 4, node_lost_after_s: int = 300) -> None:
        """node_lost_after_s: the controller gives up a node that has been silent for so long."""
        self.folder, self._cpus, self._node_lost_after_s = folder, cpus, node_lost_after_s
        self._daemons: list[subprocess.Popen[bytes]] = []
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:{_SYSTEM_PATH}"
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        self.environ = environment(SLURM_CONF=str(folder / "slurm.conf"), PATH=path, **root)

    def start(self) -> None:
        """Start the daemons and wait until all nodes are idle. Raises SlurmError when they do not come up."""
        for name in ("state", *(f"{kind}.{node}" for kind in ("spool", "tmp") for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        host, memory = socket.gethostname().split(".")[0], 1024 * self._cpus
        own = {"controller": _free_port(), "first_job": first_job()}
        own["message_timeout"] = max(3, min(30, self._node_lost_after_s))
        text = _CONFIG.format(folder=self.folder, timeout=self._node_lost_after_s, **own)
        for node in NODES:
            text += f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={_free_port()} "
            text += f"CPUs={self._cpus} RealMemory={memory}\n"
        # PBS's variables, which Slurm's own qsub and the scripts for PBS need.
        (self.folder / "plugstack.conf").write_text("optional spank_pbs.so\n")
        (self.folder / "slurm.conf").write_text(f"{text}PartitionName=test Nodes=ALL Default=YES MaxTime=60 State=UP\n")
        # A key of its own, so that a munged of the machine is neither needed nor touched.
        key, munge = self.folder / "munge.key", self.folder / "munge"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = [f"--{name}-file={munge}.{name}" for name in ("log", "pid", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={munge}.socket", f"--key-file={key}", *files)
        self.wait_until((self.folder / "munge.socket").exists, "munged's socket")
        self._daemon("slurmctld", "-D")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        self.wait_until(self.is_idle, "nodes idle")

    def is_idle(self) -> bool:
        """Whether all nodes wait for a job."""
        return self.run("sinfo", "-h", "-o", "%D %t", check=False).strip() == f"{len(NODES)} idle"

    def _daemon(self, name: str, *options: str) -> None:
        """Start a daemon that ends with this process, however that ends."""
        program = _program(name)
        assert program is not None
        with open(self.folder / f"{name}.{len(self._daemons)}.out", "wb") as output:
            words, environ = ["setpriv", "--pdeathsig", "KILL", program, *options], self.environ
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            self._daemons.append(subprocess.Popen(words, env=environ, start_new_session=True, **streams))

    def stop(self) -> None:
        """End every process of the cluster at once: daemons, scripts, ranks. Its folder is of no use any more."""
        while left := self.processes():
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            for daemon in self._daemons:
                daemon.poll()
        for daemon in self._daemons:
            daemon.wait()
        self._daemons.clear()

    def processes(self, **variables: str) -> list[int]:
        """The processes of this cluster: those whose environment names its configuration, and has `variables`."""
        wanted = {"SLURM_CONF": self.environ["SLURM_CONF"], **variables}
        return [process for process, environ in _environments() if wanted.items() <= environ.items()]

    def lose(self, node: str) -> None:
        """End every process of a node at once: its daemon, its steps' daemons, and what they have started."""
        tasks = {*self.processes(SLURMD_NODENAME=node)}
        daemons = {_parent(task) for task in tasks} - tasks
        daemons |= {daemon.pid for daemon in self._daemons if node in daemon.args}  # type: ignore[operator]
        # The youngest first: srun has a child that ends the step where its parent is killed.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in (*sorted(tasks, key=_begun, reverse=True), *daemons):
                with suppress(ProcessLookupError):
                    os.kill(process, number)

    def bring_back(self) -> None:
        """Start the daemons of lost nodes again."""
        for daemon in [daemon for daemon in self._daemons if daemon.poll() is not None]:
            self._daemons.remove(daemon)
            self._daemon("slurmd", "-D", "-N", str(daemon.args[-1]))  # type: ignore[index]

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Start no job within the block: they queue."""
        self.run("scontrol", "update", f"nodename={','.join(NODES)}", "state=drain", "reason=test")
        try:
            yield
        finally:
            self.run("scontrol", "update", f"nodename={','.join(NODES)}", "state=resume")

    @contextmanager
    def stopped(self, **variables: str) -> Iterator[None]:
        """Let the processes of a job stand still within the block: it cannot end while a busy machine runs a tool."""
        processes = self.processes(**variables)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, number)
            if number == signal.SIGSTOP:
                yield

    # ------------------------------------------------------------------------------------------------ what users do

    def run(self, *words: str, check: bool = True) -> str:
        """The output of a command on the cluster's login node. Raises SlurmError when it fails (with `check`)."""
        done = subprocess.run(
            words, env=self.environ, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )
        if check and done.returncode:
            raise SlurmError(f"{' '.join(words)} exited with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def program(self, *words: str) -> tuple[int, str]:
        """`summit-train ...` on the cluster's login node: its exit status and its output."""

        def work() -> int:
            os.environ.update(self.environ)
            return main(words)

        return forked(0, work)

    def submit(self, script: str, *options: str) -> str:
        """Submit the text of a script; the job's id. What it prints goes to `output(id)`."""
        path = self.folder / "script.sh"
        path.write_text(script)
        return self.run("sbatch", "--parsable", f"--output={self.folder}/%j.out", *options, str(path)).strip()

    def output(self, job: str) -> str:
        """What a job printed so far."""
        path = Path(self.show(job)["StdOut"])
        return path.read_text() if path.exists() else ""

    def show(self, job: str) -> Mapping[str, str]:
        """What `scontrol show job` says of it: JobState, Restarts, ExitCode, StdOut ..."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(re.findall(r"(\S+?)=(.*?)(?= [A-Z]\S*?=|\s*$)", shown))

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED ..."""
        return self.show(job)["JobState"]

    def wait(self, job: str, state: str, seconds: float = PATIENCE_S) -> Mapping[str, str]:
        """Wait for a job to come into `state`. Raises SlurmError when it ends otherwise or does not get there."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")
        self.wait_until(lambda: self.state(job) in (state, *ended), f"job {job} in state {state}", seconds)
        shown = self.show(job)
        if shown["JobState"] != state:
            text = f"job {job} is {shown['JobState']} ({shown['Reason']}, exit {shown['ExitCode']}), not {state}"
            raise SlurmError(f"{text}:\n{self.output(job)}")
        return shown

    def wait_until(self, done: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                logs = [f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log"))]
                outputs = [path.read_text()[-2000:] for path in sorted(self.folder.glob("*.out"))]
                raise SlurmError("\n".join([f"waited {seconds:g} s for {what} in vain", *logs, *outputs]))
            time.sleep(0.1)


@contextmanager
def running_slurm(folder: Path, node_lost_after_s: int = 300) -> Iterator[Slurm]:
    """A cluster in `folder` for the block; see `Slurm`."""
    with ExitStack() as stack:
        # By a short name, as the path of a socket has at most 107 bytes.
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm", dir="/tmp"))) / "cluster"
        folder.mkdir(parents=True, exist_ok=True)
        short.symlink_to(folder)
        slurm = Slurm(short, node_lost_after_s=node_lost_after_s)
        stack.callback(slurm.stop)
        slurm.start()
        yield slurm


def set_words(keys: Iterable[str]) -> list[str]:
    return [word for key in keys for word in ("--set", key)]


def submit(slurm: Slurm, site: Path, spec: Path, *keys: str, nodes: int = 2, status: int = 0) -> str:
    """Submit to some nodes; the job's id, as the run folder has it, or what is printed where it is refused."""
    words = ["submit", str(spec), "--site", str(site), "--nodes", str(nodes), "--walltime", "0:30"]
    ended, printed = slurm.program(*words, *set_words(keys))
    assert ended == status and "Traceback" not in printed, printed
    return printed if status else str(submissions(load_spec(spec, []).run_path)[-1]["id"])


def wait_for_step(slurm: Slurm, job: str, run: Path, step: int) -> None:
    """Wait until the job, which must not end before, has written down a step."""
    running = ("PENDING", "RUNNING", "COMPLETING")
    slurm.wait_until(lambda: max(steps_of(run), default=0) >= step or slurm.state(job) not in running, "a step")
    assert slurm.state(job) == "RUNNING", slurm.output(job)


def checkpoints(run: Path) -> list[int]:
    """The steps of the checkpoints of a run."""
    return list(map(step_of, find_checkpoints(run)))


def _begun(process: int) -> int:
    """When a process began, in ticks since the machine did; 0 for one that has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def _parent(process: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _environments() -> Iterator[tuple[int, dict[str, str]]]:
    """Every process with the environment it was started with; without those that ended meanwhile."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        yield int(folder.name), dict(word.split("=", 1) for word in words if "=" in word)


@cache
def first_job() -> int:
    """The first number of this process's jobs: far from other processes', with free ports for their ranks to meet."""
    own = 1000 + 100 * (os.getpid() % 100_000)
    return next(first for first in range(own, 60_000_000, 10_000_000) if all(map(_is_free, _meeting_ports(first))))


def _meeting_ports(first: int) -> Iterator[int]:
    """The ports that the first twenty jobs' numbers give, each with its steps in Slurm, in PBS and in Flux."""
    for job in range(first, first + 20):
        steps = [{"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": step} for step in ("", "0", "1", "2")]
        for variables in (*steps, {"PBS_JOBID": f"{job}.pbs"}, {"FLUX_JOB_ID": f"fA{job}"}):
            yield job_address({"MASTER_ADDR": "any", **variables}, Launch("srun", 0, 1))[1]


def _is_free(port: int) -> bool:
    with socket.socket() as one, suppress(OSError):
        one.bind(("", port))
        return True
    return False


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
