"""A job as text: (Site, Job) -> job script, pure. The templates are jobs/SCHEDULER_LAUNCHER.sh.j2."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from summit_train.cluster.site import Site, shipped, walltime_text


class JobError(ValueError):
    """A job that cannot be as it was asked for."""


@dataclass(frozen=True)
class Job:
    """What is to be run on a site.

    runs: run directories, absolute; what is trained is RUN/job/spec.yaml. One: a plain job; several: an array.
    workdir: where relative paths of the specs start. python: the interpreter with summit_train, at the same path on all
    nodes. stage: packed folders to copy to the nodes' own disks. at_once: cap on an array's jobs that run together.
    max_requeues: how often one run may be put back into the queue.
    sweep: folder of the sweep that the runs are of; each one that is done brings the sweep's table up to date.
    """

    name: str
    runs: tuple[Path, ...]
    nodes: int
    walltime_minutes: int
    workdir: Path
    python: str
    at_once: int | None = None
    max_requeues: int = 20
    stage: tuple[Path, ...] = ()
    sweep: Path | None = None

    @property
    def is_array(self) -> bool:
        """Several runs: one job array, its index chooses the run."""
        return len(self.runs) > 1


class _Verbatim(str):
    """Text that is shell already."""


def _quote(value: Any) -> str:
    """Every value that a template prints goes through here, so none can be forgotten.

    A line break never gets into the script: LSF reads a line that begins with #BSUB wherever it stands, quoted or not.
    """
    text = str(value)
    if isinstance(value, _Verbatim) or text.isprintable():
        return text if isinstance(value, _Verbatim) else shlex.quote(text)
    plain = {byte: chr(byte) for byte in range(0x20, 0x7F)} | {ord("'"): "\\'", ord("\\"): "\\\\"}
    return "$'" + "".join(plain.get(byte, f"\\x{byte:02x}") for byte in text.encode("utf-8", "surrogateescape")) + "'"


def _with_variables(path: str) -> _Verbatim:
    """A path with $NAMES for the shell to expand, and nothing else for it to read."""
    parts = re.split(r"(\$\w+|\$\{\w+\})", path)
    return _Verbatim("".join(f'"{part}"' if i % 2 else shlex.quote(part) for i, part in enumerate(parts) if part))


def _comment(text: Any) -> _Verbatim:
    return _Verbatim(" ".join(str(text).split()))


def job_name(name: str) -> str:
    """A name as schedulers take it on a line that no shell reads: letters, digits and ._-, 64 at most."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip("-.")[:64] or "run"


def render(site: Site, job: Job) -> str:
    """The job script, which ends with a newline.

    Raises JobError for a job without runs, and for staging on a site without node-local disks.
    """
    if not job.runs:
        raise JobError("a job without runs")
    if job.is_array and site.scheduler == "local":
        raise JobError(f"{site.name}: this machine has no job arrays; start the runs one after another")
    if job.stage and site.node_local is None:
        raise JobError(f"{site.name} names no node_local disk to stage to; set it in the profile, or data.stage=null")
    templates = Environment(
        loader=FileSystemLoader(shipped("jobs")),
        undefined=StrictUndefined,
        finalize=_quote,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {"comment": _comment, "expand": _with_variables, "verbatim": _Verbatim}
    return templates.get_template(f"{site.scheduler}_{site.launcher}.sh.j2").render(
        site=site,
        job=job,
        name=job_name(job.name),
        ranks=job.nodes * site.ranks,
        walltime=walltime_text(job.walltime_minutes),
    )
