"""A job as text: (Site, Job) -> job script, a pure function. The templates are jobs/SCHEDULER_LAUNCHER.sh.j2."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from summit_train.cluster.running_job import SECRET, JobFacts
from summit_train.cluster.site import Container, LauncherOption, Site, walltime_text
from summit_train.core.errors import UserError
from summit_train.core.run_folder import FAILURE
from summit_train.spec.source import shipped

KEEPER = "keeper.pyz"  # in RUN/job: the job keeper for an interpreter that has no summit_train


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
        """Tell an array of several runs, whose index selects the run, from a job of one."""
        return len(self.runs) > 1


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
    folders = [shipped("jobs")]
    name = f"{site.scheduler}_{site.launcher}.sh.j2"
    if site.template is not None:  # it may include the shipped ones
        folders.insert(0, site.template.parent)
        name = site.template.name
    loader = FileSystemLoader(folders)
    templates = Environment(loader=loader, undefined=StrictUndefined, finalize=_quote, keep_trailing_newline=True)
    templates.trim_blocks = templates.lstrip_blocks = True
    templates.filters |= {"verbatim": _Verbatim, "comment": lambda text: _Verbatim(" ".join(str(text).split()))}
    values = {
        "can_shrink": facts(site, job).can_shrink,
        "keeper": _Verbatim('"$python" -m summit_train.cluster.keeper'),
        "options": _words_of(site.launcher_options),
        "program": _program(site, job),
        "ranks": job.nodes * site.ranks,
        "slots": _Verbatim(""),
        "walltime": walltime_text(job.walltime_minutes),
    }
    if site.host_python is not None:
        values["keeper"] = _Verbatim(f'{site.host_python} "$run/job/{KEEPER}"')
    try:
        return templates.get_template(name).render(site=site, job=job, name=job_name(job.name), **values)
    except TemplateError as error:
        if site.template is None:
            raise
        raise UserError(f"{site.name}: template: {site.template}: {error}") from error


def _words_of(options: Iterable[LauncherOption]) -> _Verbatim:
    """Return options, such as `--mca pml ^ucx`, each after a space, quoted where a shell would read more into it."""
    return _Verbatim("".join(f" {shlex.quote(word)}" for option in options for word in option.option.split()))


def _program(site: Site, job: Job) -> _Verbatim:
    """Return the command of each rank as words for the shell: this program, in the container where there is one."""
    python = "{python}" if job.environment else '"$python"'
    inside = ""
    if site.container is not None:
        python = _quote(site.container.python)
        inside = _into_container(site, site.container, "{image}" if job.environment else _quote(site.container.image))
    words = "".join(f" {_quote(word)}" for word in job.command) or ' train "$run/job/spec.yaml"'
    if job.stage and not job.command:
        words += " \"data.stage='{staged}'\""
    return _Verbatim(f"{inside}{python} -m summit_train{words}")


def _into_container(site: Site, box: Container, image: str) -> str:
    """Return the words that enter the image, which for pyxis and edf are options of srun."""
    options = _words_of(box.options)
    mounts = [_with_variables(mount) for mount in box.mounts]
    if box.runtime == "apptainer":
        binds = "".join(f" --bind {mount}" for mount in mounts)
        return f"apptainer exec{binds}{options} {image} \\\n    "
    if box.runtime == "podman_hpc":
        volumes = "".join(f" --volume {mount}" for mount in mounts)
        variables = "".join(f" --env {_quote(name)}" for name in _of_ranks(site))
        network = "--net=host --ipc=host"  # ranks talk to each other as those outside do
        inside = f'podman-hpc run --rm {network} --workdir "$PWD"{volumes} \\\n   {variables}'
        return f"{inside} \\\n   {options} {image} "
    if box.runtime == "pyxis":
        words = f'--container-image={image} --container-workdir="$PWD" --container-mounts={",".join(mounts)}'
        return f"{words}{options} \\\n    "
    return f'--environment={image}{options} env --chdir="$PWD" '  # the environment's file has image and mounts


def _of_ranks(site: Site) -> list[str]:
    """Return the names of the variables that a rank needs, with patterns for those of launchers."""
    launchers = ["SLURM_*", "FLUX_*", "PBS_*", "LSB_*", "JSM_*", "PALS_*", "PMI*", "OMPI_*", "MASTER_*"]
    failure = [FAILURE] if site.launcher in site.batch.can_spare else []
    secret = [SECRET] if site.comm != "horovod" else []
    return [*launchers, *failure, *secret, *site.environment]


def facts(site: Site, job: Job) -> JobFacts:
    """Return the facts of a job that its script does not give to the job keeper."""
    min_nodes = min(site.min_nodes or job.nodes, job.nodes)  # a smaller job keeps all of its nodes
    return JobFacts(
        scheduler=site.scheduler,
        launcher=site.launcher,
        python=job.python,
        nodes=job.nodes,
        ranks_per_node=site.ranks,
        min_nodes=min_nodes,
        can_shrink=site.spare_nodes > 0 or min_nodes < job.nodes,
        spare_nodes=site.spare_nodes,
        restarts=0 if job.command else site.restarts,
        max_requeues=job.max_requeues,
        warn_after_s=job.walltime_minutes * 60 - site.warning_seconds,
        has_secret=site.comm != "horovod",
        stage=list(map(str, job.stage)),
        node_local=site.node_local,
        environment=None if job.environment is None else str(job.environment),
        image=None if site.container is None else site.container.image,
        sweep=None if job.sweep is None else str(job.sweep),
        trains=not job.command,
    )
