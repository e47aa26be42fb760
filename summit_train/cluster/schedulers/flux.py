"""Flux: flux batch and flux jobs."""

from __future__ import annotations

from pathlib import Path

from summit_train.cluster.schedulers.scheduler import Scheduler, ask


class Flux(Scheduler):
    """It has no arrays of batch jobs: a sweep submits job by job."""

    launchers = ("flux",)
    can_spare = launchers
    command = "flux"
    has_arrays = False
    own_output = "flux-*.out"
    answer = r"^[fƒ](\w+)$"  # ƒ where the locale has it

    def words(self, script: Path, launcher: str, after: str | None = None) -> list[str]:
        return ["flux", "batch", *([f"--dependency=afterany:{after}"] if after else []), script.name]

    def submit(self, script: Path, launcher: str, after: str | None) -> str:
        return "f" + super().submit(script, launcher, after)

    def states(self) -> dict[str, str]:
        answer = ask(["flux", "jobs", "--no-header", "--filter=pending,running", "--format={id.f58plain} {status}"])
        jobs = (line.split() for line in answer.splitlines() if line.strip())
        return {name: "running" if state in ("RUN", "CLEANUP") else "queued" for name, state in jobs}
