"""Flux: flux batch and flux jobs."""

from __future__ import annotations

from pathlib import Path

from summit_train.cluster.schedulers.scheduler import Scheduler, ask, job_id


class Flux(Scheduler):
    """It has no arrays of batch jobs: a sweep submits job by job."""

    launchers = ("flux",)
    can_spare = launchers
    command = "flux"
    has_arrays = False

    def submit(self, script: Path, launcher: str, after: str | None) -> str:
        words = ["flux", "batch", *([f"--dependency=afterany:{after}"] if after else []), script.name]
        return "f" + job_id(r"^[fƒ](\w+)$", words, ask(words, script.parent))  # ƒ where the locale has it

    def states(self) -> dict[str, str]:
        answer = ask(["flux", "jobs", "--no-header", "--filter=pending,running", "--format={id.f58plain} {status}"])
        jobs = (line.split() for line in answer.splitlines() if line.strip())
        return {name: "running" if state in ("RUN", "CLEANUP") else "queued" for name, state in jobs}
