"""Check a site profile: what a login node can tell, and a trial job that runs the doctor on the nodes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL

from summit_train.cluster.doctor import ANSWER_S, check_disk, check_ranks
from summit_train.cluster.job import Job, job_name, render
from summit_train.cluster.probe import Check, Status
from summit_train.cluster.site import COMM, Container, Site, walltime_text
from summit_train.cluster.submit import chain, job_states, prepare_job
from summit_train.core.errors import RunFailed
from summit_train.core.text import counted

_TRIAL_MINUTES = 15
_OF_ONE_MACHINE = ("tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs")
_POLL_S = 2.0
_LATE_S = 30.0  # until what a node wrote shows here


def examine_site(site: Site, run_dir: Path) -> Iterator[Check]:
    """Yield what can be told without a job. run_dir: where runs will be written."""
    each = f"{counted(site.ranks, 'rank')} of {counted(site.cores_per_rank, 'core')}, {site.gpus_per_node} GPUs a node"
    missing = [f"--set {key}=..." for key in site.requires if getattr(site, key) is None]
    fix = f"give {' '.join(missing)}, or write it into the profile" if missing else ""
    yield _judged("profile", f"{site.name}: {site.scheduler}, {site.launcher}; {each}", fix)
    for note in site.notes:
        yield Check("note", "warn", note)
    yield check_ranks({COMM: site.comm})
    if site.launcher != "ranks":  # train --ranks is part of this program
        yield check_launcher(site)
    if site.host_python is not None:
        yield check_host_python(site.host_python)
    if site.container is not None:
        yield from check_container(site, site.container, run_dir)
    yield check_disk("disk for runs", run_dir)
    if (command := site.batch.command) is None:
        return
    yield check_shared("runs on the nodes", run_dir)
    yield check_shared("Python on the nodes", Path(sys.prefix))
    path = shutil.which(command)
    yield _judged("scheduler", path or f"no {command} on PATH", "" if path else f"use a login node of {site.name}")
    if path is not None:
        yield check_account(site)
        yield check_queue(site)


def _judged(name: str, found: str, fix: str, status: Status = "fail") -> Check:
    """Return a check that is ok if it has nothing to fix, else of `status`."""
    return Check(name, status if fix else "ok", found, fix)


def check_container(site: Site, box: Container, run_dir: Path) -> Iterator[Check]:
    """Yield whether the runtime's program is here, what its mounts lack, and what only the nodes can tell."""
    if box.runtime in ("apptainer", "podman_hpc"):  # the others are part of Slurm
        yield check_program(site, "container's runtime", box.runtime.replace("_", "-"))
    folders = {"the working folder": Path.cwd(), "runs": run_dir.absolute(), "node_local": site.node_local}
    for line in box.gaps(folders):
        found, _, fix = line.partition("; ")
        yield Check("container", "warn", found, fix)
    yield Check("container on the nodes", "ok", f"{box.runtime} with {box.image}: not tried here; --submit tries it")


def check_host_python(python: str) -> Check:
    """Check that an interpreter can run the job keeper."""
    try:
        words = [python, "-c", "import sys; print(sys.version.split()[0]); sys.exit(sys.version_info < (3, 9))"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_S, stdin=DEVNULL)
        found = f"{python}: {(done.stdout or done.stderr).strip()}"
        status = done.returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        found = f"{python}: {error}"
        status = 1
    return _judged("host_python", found, "host_python must be Python 3.9 or newer, on all nodes" if status else "")


def check_launcher(site: Site) -> Check:
    # The launcher pals is an mpiexec, which has the name of its kind.
    return check_program(site, "launcher", "mpiexec" if site.launcher == "pals" else site.launcher)


def check_program(site: Site, name: str, program: str) -> Check:
    """Load the modules and run the setup in a login shell, and look for the program there."""
    lines = [f"module load {shlex.quote(module)} || exit" for module in site.modules]
    own = shlex.quote(str(Path(sys.executable).parent))
    # As in the templates of the launchers.
    path = f"export PATH=$PATH:{own}" if site.launcher in ("pals", "mpiexec") else f"export PATH={own}:$PATH"
    shell = "\n".join(["exec 3>&1 >&2", *lines, *site.setup, path, f"command -v {program} >&3"])
    fix = f"modules and setup must work, and put {program} on PATH"
    try:
        done = subprocess.run(
            ["bash", "-lc", shell],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=ANSWER_S,
            stdin=DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Check(name, "fail", f"no answer within {ANSWER_S:g} s", fix)
    found = [f"no {program} on PATH", *done.stderr.splitlines(), *done.stdout.splitlines()][-1]
    return _judged(name, found, fix if done.returncode else "")


def check_account(site: Site) -> Check:
    """Compare the site's account with this user's in the scheduler."""
    own = site.account or "none"
    try:
        known = site.batch.accounts()
    except RunFailed as error:
        return Check("account", "warn", f"{own}, not checked: {error}")
    if site.account in (None, *known):
        return Check("account", "ok", f"{own}; yours: {', '.join(known)}")
    return Check("account", "fail", f"{own} is not yours", f"set account to one of {', '.join(known)}")


def check_queue(site: Site) -> Check:
    """Compare the walltimes and numbers of nodes that the profile allows with those of the queue."""
    try:
        limits = site.batch.queue_limits(site.queue)
    except RunFailed as error:
        return Check("queue", "fail", str(error), "set queue to one that the scheduler has")
    if limits is None:
        return Check("queue", "warn", f"{site.queue or 'the default'}, not checked on {site.scheduler}")
    minutes, nodes = limits
    walltime = "any time" if minutes is None else walltime_text(minutes)
    found = f"{site.queue or 'the default'}: {walltime} on {nodes or 'any number of'} nodes"
    caps = [(cap.nodes, cap.walltime) for cap in site.walltime_caps] or [(sys.maxsize, sys.maxsize)]
    fits = all(most <= (nodes or most) and longest <= (minutes or longest) for most, longest in caps)
    fix = f'the profile allows more: set walltime_caps, such as [{{nodes: {nodes or 1}, walltime: "{walltime}"}}]'
    return _judged("queue", found, "" if fits else fix, "warn")


def check_shared(name: str, folder: Path, mounts: Path = Path("/proc/mounts")) -> Check:
    """Check that a folder is not on a file system that this machine has to itself."""
    path = os.path.realpath(folder)
    table = [line.split()[1:3] for line in mounts.read_text(encoding="utf-8").splitlines()]
    above = [mount for mount in table if os.path.commonpath([mount[0], path]) == mount[0]]
    at, kind = max(above, key=lambda mount: len(mount[0]))
    fix = "if it is this machine's alone, use a folder on a shared file system; --submit finds out"
    return _judged(name, f"{path}: {kind} at {at}", fix if kind in _OF_ONE_MACHINE else "", "warn")


def trial(site: Site, run_dir: Path, nodes: int) -> Iterator[Check]:
    """Run the doctor on all ranks of `nodes` nodes, in a job like every job; yield its states and its findings."""
    folder = (run_dir / f"doctor_{job_name(site.name)}").absolute()
    words = ["doctor", "--json", "--run-dir", str(folder)]
    words += ["--node-local", site.node_local] if site.node_local else []
    words += ["--check-nodes"] if site.check_nodes else []
    minutes = min(_TRIAL_MINUTES, site.walltime_cap(nodes) or _TRIAL_MINUTES)
    job = Job("doctor", (folder,), nodes, minutes, max_requeues=0, command=tuple(words))
    script = prepare_job(site, job, render(site, job))
    for output in script.parent.glob("*.out"):  # of the trial before
        output.unlink()
    (job_id,) = chain(site, job, script, 1)
    state = "unknown"
    while state != "gone":
        former = state
        state = job_states(site, [job_id])[job_id]
        if state != former:
            now = "has ended" if state == "gone" else f"is {state}"
            yield Check("trial job", "ok", f"{job_id} {now}; {script.parent} has its script and output")
        time.sleep(_POLL_S)
    deadline = time.monotonic() + _LATE_S
    while True:
        lines = [
            line
            for path in script.parent.glob("*.out")
            for line in path.read_text("utf-8", errors="replace").splitlines()
        ]
        if found := [line for line in lines if line.startswith("{")]:
            break
        if time.monotonic() > deadline:
            lines = ["no output: do the nodes see this folder?", *lines]
            said = next((line for line in lines if line.startswith("summit-train")), lines[-1])
            yield Check("trial job", "fail", said, f"read {script.parent}/*.out, and try its script's lines by hand")
            return
        time.sleep(_POLL_S)
    values = json.loads(found[-1])
    for check in values["checks"]:
        yield Check(**{**check, "name": f"node: {check['name']}"})
    if not values["ranks"]:
        fix = "check launcher, and that a container gets the launcher's variables"
        yield Check("node: ranks", "fail", "a process was started alone: no launcher's variables reach it", fix)
        return
    for name, number, fix in (
        ("ranks", nodes * site.ranks, "check launcher and ranks_per_node"),
        ("GPUs", site.gpus_per_node, "check gpus_flag, gpus_per_node, and that torch is one for these GPUs"),
        ("cores", site.cores_per_rank, "check cores_per_node and bind, and that jobs get whole nodes"),
    ):
        fewest = len(values["ranks"]) if name == "ranks" else min(rank[name] for rank in values["ranks"])
        said = f"{fewest}{'' if name == 'ranks' else ' for each rank'}; the profile says {number}"
        # A launcher may show each rank its own GPU only; two ranks on the same one would have failed in NCCL.
        own = name == "GPUs" and fewest == 1 and site.ranks == number
        yield _judged(f"node: {name}", said, "" if own or fewest >= number else fix)
