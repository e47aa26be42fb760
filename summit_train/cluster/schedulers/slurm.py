"""Slurm: sbatch and squeue."""

from __future__ import annotations

import os
from pathlib import Path

from summit_train.cluster.schedulers.scheduler import Scheduler, ask, job_id
from summit_train.core.errors import UserError


class Slurm(Scheduler):
    launchers = ("srun", "mpirun")
    can_spare = ("srun",)
    command = "sbatch"

    def submit(self, script: Path, launcher: str, after: str | None) -> str:
        # It expands %j and the like even in the folder's own path.
        if set(str(script.absolute())) & set("%\\"):
            raise UserError(f"{script.parent}: Slurm cannot write output below a name with % or \\; change it")
        words = ["sbatch", "--parsable", *([f"--dependency=afterany:{after}"] if after else []), script.name]
        return job_id(r"^(\d+)(?:;.*)?$", words, ask(words, script.parent))

    def member(self, array: str, number: int) -> str:
        return f"{array}_{number}"

    def states(self) -> dict[str, str]:
        # All jobs of this user: asking for a job that is gone would be an error.
        answer = ask(["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i %T"])
        states = dict(line.split(maxsplit=1) for line in answer.splitlines() if line.strip())
        return {name: "running" if state in ("RUNNING", "COMPLETING") else "queued" for name, state in states.items()}
