"""A cluster of stand-ins: programs on PATH that check their options, and a scheduler's part in a job's life."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.worlds import environment

PROGRAMS = (
    "bsub", "bjobs", "jsrun", "jskill", "srun", "mpirun", "sbatch", "squeue", "scontrol", "qsub", "qselect", "pbsnodes",
    "flux",
)  # fmt: skip
_SOURCE = Path(__file__).with_name("standin_programs.py")
# The job keeper is the real one, with $STANDIN_WAITS as fewer seconds.
_KEEPER = f"""[ "$2" != summit_train.cluster.keeper ] || {{
    shift 2
    exec {sys.executable} -c '
import json, os, sys
from summit_train.cluster.keeper import main
from summit_train.cluster.running_job import Waits
sys.exit(main(sys.argv[1:], Waits(**json.loads(os.environ.get("STANDIN_WAITS", "{{}}")))))' "$@"
}}
"""


class Standins:
    """The programs in folder/bin, their notes in folder; `environ` has them first on PATH."""

    def __init__(self, folder: Path, *programs: str) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        for name in programs or PROGRAMS:
            self.program(name, self.bin / name)

    def program(self, name: str, path: Path) -> Path:
        """The stand-in of that name as an executable file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-IS", str(_SOURCE), name]  # without packages it starts sooner
        path.write_text(f'#!/bin/sh\n{_KEEPER if name == "trainer" else ""}exec {shlex.join(words)} "$@"\n')
        path.chmod(0o755)
        return path

    @property
    def environ(self) -> dict[str, str]:
        """This process's environment, as a login node's."""
        return environment(STANDINS=str(self.folder), PATH=f"{self.bin}:{os.environ['PATH']}")

    def calls(self, program: str) -> list[dict[str, Any]]:
        """What a program was called with, in order."""
        path = self.folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in map(json.loads, lines) if line["program"] == program]

    def jobs(self) -> list[dict[str, Any]]:
        """What bsub, qsub or flux batch took, in order."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("job_*.json"))]


def start_lsf_job(
    standins: Standins, job: Mapping[str, Any], index: int = 0, **environ: str
) -> subprocess.Popen[bytes]:
    """Start a job as LSF does: a copy of the script, in the folder it was submitted from, output added to -o's file."""
    name = job["options"]["-o"].replace("%J", str(job["id"])).replace("%I", str(index))
    hosts = standins.folder / "hosts"
    hosts.write_text("localhost\n" * 2)
    lsf = {"LSB_JOBID": str(job["id"]), "LSB_JOBINDEX": str(index), "LSB_DJOB_HOSTFILE": str(hosts)}
    return _start(standins, job, Path(job["folder"]), name, lsf | environ)


def start_pbs_job(standins: Standins, job: Mapping[str, Any], **environ: str) -> subprocess.Popen[bytes]:
    """Start a job as PBS does: a copy of the script, at home."""
    hosts = standins.folder / "hosts"
    hosts.write_text("localhost\n")
    pbs = {"PBS_JOBID": f"{job['id']}.pbs", "PBS_NODEFILE": str(hosts), "PBS_O_WORKDIR": job["folder"]}
    return _start(standins, job, standins.folder, f"{job['options']['-N']}.o{job['id']}", pbs | environ)


def start_flux_job(standins: Standins, job: Mapping[str, Any], **environ: str) -> subprocess.Popen[bytes]:
    """Start a job as Flux does: a copy of the script, in the folder it was submitted from, in its own instance."""
    (standins.folder / "hosts").write_text("localhost\n")
    flux = {"STANDIN_FLUX_JOB": f"\u0192A{job['id']}"}
    return _start(standins, job, Path(job["folder"]), f"flux-A{job['id']}.out", flux | environ)


def _start(
    standins: Standins, job: Mapping[str, Any], folder: Path, output_name: str, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    copy = standins.folder / f"spooled_{job['id']}"
    copy.write_text(job["script"])
    with open(folder / output_name, "ab") as output:
        return subprocess.Popen(
            ["/bin/bash", str(copy)],
            cwd=folder,
            env=standins.environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def warn(process: subprocess.Popen[bytes], number: int = signal.SIGUSR2) -> None:
    """Signal all processes of a job on its launch node, as LSF does."""
    os.killpg(process.pid, number)


def requeues(job: Mapping[str, Any], status: int) -> bool:
    """Whether LSF puts a job with that exit status back into the queue."""
    return str(status) in job["options"].get("-Q", "").split()
