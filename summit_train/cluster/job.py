"""A job as text: (Site, Job) -> job script, a pure function. The templates are jobs/SCHEDULER_LAUNCHER.sh.j2."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from summit_train.cluster.site import Site, walltime_text
from summit_train.core.errors import UserError
from summit_train.spec.source import shipped


@dataclass(frozen=True)
class Job:
    """A job on a site.

    runs: run directories, absolute, each with the spec RUN/job/spec.yaml; several make a job array.
    workdir: folder that relative paths of the specs start at.
    python: interpreter with summit_train, at the same path on all nodes.
    at_once: most jobs of an array that run at the same time.
    max_requeues: how often one run may requeue itself.
    stage: packed sets to copy to the nodes' own disks.
    environment: file of the environment, or the container's image, to copy there too.
    sweep: folder of the sweep; each run that ends updates the sweep's table.
    command: what summit-train is to do on the ranks instead of training the run's spec.
    """

    name: str
    runs: tuple[Path, ...]
    nodes: int
    walltime_minutes: int
    workdir: Path = field(default_factory=Path.cwd)
    python: str = sys.executable
    at_once: int | None = None
    max_requeues: int = 20
    stage: tuple[Path, ...] = ()
    environment: Path | None = None
    sweep: Path | None = None
    command: tuple[str, ...] = ()

    @property
    def is_array(self) -> bool:
        """Return whether the job has several runs: an array whose index selects the run."""
        return len(self.runs) > 1

    @property
    def copies(self) -> bool:
        """Return whether the job copies anything to the nodes' own disks."""
        return bool(self.stage or self.environment)


class _Verbatim(str):
    """Text that is shell code and needs no quoting."""


def _quote(value: Any) -> str:
    """Quote a value for the shell. jinja2 applies this to every value that a template prints.

    The result has no line break: LSF reads every line that begins with #BSUB, quoted or not.
    """
    text = str(value)
    if isinstance(value, _Verbatim) or text.isprintable():
        return text if isinstance(value, _Verbatim) else shlex.quote(text)
    plain = {byte: chr(byte) for byte in range(0x20, 0x7F)} | {ord("'"): "\\'", ord("\\"): "\\\\"}
    return "$'" + "".join(plain.get(byte, f"\\x{byte:02x}") for byte in text.encode("utf-8", "surrogateescape")) + "'"


def _quote_words(option: str) -> _Verbatim:
    """Return the words of an option, such as `--mca pml ^ucx`, each quoted where a shell would read more into it."""
    return _Verbatim(" ".join(map(shlex.quote, option.split())))


def _with_variables(path: str) -> _Verbatim:
    """Quote a path, except for $NAMES, which the shell expands."""
    parts = re.split(r"(\$\w+|\$\{\w+\})", path)
    return _Verbatim("".join(f'"{part}"' if i % 2 else shlex.quote(part) for i, part in enumerate(parts) if part))


def job_name(name: str) -> str:
    """Return a name that schedulers accept in a directive: letters, digits and ._-, at most 64."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip("-.")[:64] or "run"


def render(site: Site, job: Job) -> str:
    """Return the job script, which ends with a newline.

    Raises UserError for an array where the scheduler has none, staging without node-local disks, and for a key that the
    site requires and that is not set.
    """
    for key in site.requires:
        if getattr(site, key) is None:
            raise UserError(f"{site.name}: a job must have {key}; give --set {key}=..., or write it into the profile")
    if job.is_array and not site.batch.has_arrays:
        raise UserError(f"{site.name}: has no job arrays; start the runs one after another")
    if job.stage and site.node_local is None:
        raise UserError(f"{site.name} has no disk to stage to; set node_local in the profile, or data.stage=null")
    loader = FileSystemLoader(shipped("jobs"))
    templates = Environment(loader=loader, undefined=StrictUndefined, finalize=_quote, keep_trailing_newline=True)
    templates.trim_blocks = templates.lstrip_blocks = True
    templates.filters |= {"expand": _with_variables, "verbatim": _Verbatim, "words": _quote_words}
    templates.filters["comment"] = lambda text: _Verbatim(" ".join(str(text).split()))
    moves = site.launcher in site.batch.can_spare
    min_nodes = min(site.min_nodes or job.nodes, job.nodes)  # a smaller job keeps all of its nodes
    numbers = {
        "moves": moves,
        "min_nodes": min_nodes,
        "can_shrink": site.spare_nodes > 0 or min_nodes < job.nodes,
        "num_nodes": "${#nodes[@]}" if moves else job.nodes,
        "num_ranks": f"$((${{#nodes[@]}} * {site.ranks}))" if moves else job.nodes * site.ranks,
        "ranks": job.nodes * site.ranks,
        "restarts": 0 if job.command else site.restarts,
        "walltime": walltime_text(job.walltime_minutes),
    }
    template = templates.get_template(f"{site.scheduler}_{site.launcher}.sh.j2")
    return template.render(site=site, job=job, name=job_name(job.name), **numbers)
