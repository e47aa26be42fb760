"""Slurm: sbatch and squeue."""

from __future__ import annotations

import getpass
import os
import re
from pathlib import Path

from summit_train.cluster.schedulers.scheduler import Scheduler, ask, minutes_of
from summit_train.core.errors import RunFailed, UserError


class Slurm(Scheduler):
    launchers = ("srun", "mpirun")
    can_spare = launchers
    command = "sbatch"
    gpus_flag = "--gpus-per-node={gpus}"
    mail = "--mail-type=END,FAIL"
    answer = r"^(\d+)(?:;.*)?$"

    def words(self, script: Path, launcher: str, after: str | None = None) -> list[str]:
        # It expands %j and the like even in the folder's own path.
        if set(str(script.absolute())) & set("%\\"):
            raise UserError(f"{script.parent}: Slurm cannot write output below a name with % or \\; change it")
        return ["sbatch", "--parsable", *([f"--dependency=afterany:{after}"] if after else []), script.name]

    def member(self, array: str, number: int) -> str:
        return f"{array}_{number}"

    def states(self) -> dict[str, str]:
        # All jobs of this user: asking for a job that is gone would be an error.
        answer = ask(["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i %T"])
        states = dict(line.split(maxsplit=1) for line in answer.splitlines() if line.strip())
        return {name: "running" if state in ("RUNNING", "COMPLETING") else "queued" for name, state in states.items()}

    def accounts(self) -> list[str]:
        words = ["sacctmgr", "--noheader", "--parsable2", "show", "associations", "format=account"]
        return sorted(set(ask([*words, f"user={getpass.getuser()}"]).split()))

    def queue_limits(self, queue: str | None) -> tuple[int | None, int | None]:
        answer = ask(["scontrol", "--oneliner", "show", "partition", *([queue] if queue else [])])
        for one in (dict(re.findall(r"(\w+)=(\S*)", line)) for line in answer.splitlines()):
            if queue or one.get("Default") == "YES":
                counts = [int(one[key]) for key in ("MaxNodes", "TotalNodes") if one.get(key, "").isdigit()]
                return minutes_of(one["MaxTime"]), min(counts, default=None)
        raise RunFailed("Slurm has no default partition")
