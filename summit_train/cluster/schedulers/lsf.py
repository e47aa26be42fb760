"""LSF: bsub and bjobs."""

from __future__ import annotations

from pathlib import Path

from summit_train.cluster.schedulers.scheduler import Scheduler, ask
from summit_train.core.errors import RunFailed


class Lsf(Scheduler):
    launchers = ("jsrun", "mpirun")
    command = "bsub"
    mail = "-N"
    answer = r"Job <(\d+)>"

    def words(self, script: Path, launcher: str, after: str | None = None) -> list[str]:
        # bsub reads a script given as an argument only with LSB_BSUB_PARSE_SCRIPT, which sites with jsrun set.
        named = [script.name] if launcher == "jsrun" else []
        return ["bsub", *(["-w", f"ended({after})"] if after else []), *named]

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
