"""Hand a job to the scheduler: write its script, submit it, ask for its state; and what a job stages.

Files in RUN/job/: spec.yaml, job.sh, job.json (what the job keeper must know), submitted.jsonl (a line for each
submission), last_job (id of a chain's last job). The job adds `done`, which rank 0 writes too, `lock`, `log`,
state.json, `requeues` and `preemptions` (a line for each) and its output.
"""

from __future__ import annotations

import json
import re
import time
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import summit_train
from summit_train.cluster.environment import environment_files, environment_key, pack
from summit_train.cluster.job import KEEPER, Job, facts
from summit_train.cluster.site import Site
from summit_train.core.errors import UserError
from summit_train.core.files import naming, read_file, replacing, write_json, write_text
from summit_train.core.progress import shown
from summit_train.core.run_folder import bad_nodes
from summit_train.core.text import from_json
from summit_train.data.manifest.reading import PACK_FILE
from summit_train.spec import Spec, dump_spec


def staged_folders(site: Site, specs: Iterable[Spec]) -> tuple[Path, ...]:
    """Return the packed sets of the specs with data.stage=auto, each once; none on a site without node_local."""
    staged = [spec.data for spec in specs if spec.data.stage == "auto" and site.node_local is not None]
    paths = dict.fromkeys(Path(path).absolute() for data in staged for path in (data.train, data.val))
    return tuple(path for path in paths if (path / PACK_FILE).is_file())


def staged_environment(site: Site, run_dir: Path) -> Path | None:
    """Return the file of the environment that is copied to the nodes; None where ranks start from the shared one.

    It is the container's image, the file that the site names, or one of this environment below `run_dir`, whose name
    changes with the environment and which `write_job` makes. Raises UserError if that file is missing.
    """
    if not site.stage_environment:
        return None
    if site.container is None and site.stage_environment is True:
        return run_dir.absolute() / f"environments/{environment_key(environment_files())}.tar"
    file = Path(site.container.image if site.container else str(site.stage_environment))
    if not file.is_file():
        key = "container.image" if site.container else "stage_environment"
        raise UserError(f"{site.name}: {key}: must be a file, to be copied to the nodes, got {file}")
    return file.absolute()


def staging_row(site: Site, spec: Spec, folders: Iterable[Path]) -> list[tuple[str, str]]:
    """Return one (name, value) row for people, or none where the spec does not ask the job to stage."""
    if spec.data.stage != "auto":
        return []
    if site.node_local is None:
        return [("staging", f"none: {site.name} has no node_local")]
    names = ", ".join(map(str, folders))
    return [("staging", f"{names} to {site.node_local}" if names else "none: data.train and data.val are not packed")]


def output_rows(site: Site, *jobs: Job) -> list[tuple[str, str]]:
    """Return (name, value) rows for people: where the output of the jobs goes, and how to be mailed; none here."""
    if site.is_here:  # a job prints to the terminal
        return []
    job = jobs[0]
    batch = site.batch
    folder = f"{job.runs[0]}/job" if len(jobs) == len(job.runs) == 1 else "RUN/job"
    files = f"{job.sweep}/job/array_*.out" if job.is_array else batch.own_output and f"{folder}/{batch.own_output}"
    output = f"{folder}/*.out" + (f"; {site.scheduler}'s own messages: {files}" if files else "")
    if batch.mail is None:
        return [("output", output), ("mail", f"none; {site.scheduler} sends none")]
    name = re.split("[= ]", batch.mail)[0]
    options = [line.option for line in site.directives if re.split("[= ]", line.option)[0] == name]
    add = f"""none; to get it, add to the profile: +directives: [{{option: "{batch.mail}", why: mail}}]"""
    return [("output", output), ("mail", f"as {', '.join(options)} says" if options else add)]


def write_job(site: Site, job: Job, text: str, specs: Sequence[Spec] = (), folder: Path | None = None) -> Path:
    """Write every run's spec, the script and the environment that it copies; return the script's path.

    It deletes the marks of earlier jobs. text: the script. specs: one for each run, in the order of job.runs; none
    where the job has a command of its own. folder: of the script, by default RUN/job of the first run.
    """
    about = asdict(facts(site, job))
    for run, spec in zip(job.runs, specs, strict=not job.command):
        write_text(run / "job/spec.yaml", dump_spec(spec))
    for run in job.runs:
        write_json(run / "job/job.json", about)
        if site.host_python is not None:
            write_keeper(run / "job" / KEEPER)
        for mark in ("done", "requeues", "preemptions", "last_job"):
            (run / "job" / mark).unlink(missing_ok=True)
    if job.environment is not None and not job.environment.exists():
        with shown("MB of the environment packed", in_logs=True) as show:
            pack(environment_files(), job.environment, lambda done, total: show(done >> 20, total >> 20))
    script = (folder or job.runs[0] / "job") / "job.sh"
    write_text(script, text)
    return script


def write_keeper(path: Path) -> None:
    """Write the job keeper as one file, which any Python from 3.9 on runs."""
    package = Path(summit_train.__file__).parent
    names = [f"cluster/{name}.py" for name in ("__init__", "keeper", "running_job", "scheduler", "schedulers")]
    names += [f"core/{name}.py" for name in ("__init__", "errors", "files", "run_folder", "text")]
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr(
            "__main__.py", "import sys\nfrom summit_train.cluster.keeper import main\nsys.exit(main(sys.argv[1:]))\n"
        )
        for name in ("__init__.py", *names, "jobs/copy.sh"):
            archive.write(package / name, f"summit_train/{name}")


def prepare_job(site: Site, job: Job, text: str, *specs: Spec, by_hand: bool = False) -> Path:
    """Write the spec and the script of a job of one run; return the script's path. text, specs: as in write_job.

    by_hand: it is not submitted here. Raises UserError without a scheduler, and where a job of this run is queued or
    running; by hand, the scheduler is needed only if jobs of this run were submitted before.
    """
    if not by_hand:
        site.check_scheduler()
    # Another scheduler's number says nothing here.
    ids = [line["id"] for line in submissions(job.runs[0]) if line["scheduler"] == site.scheduler]
    for job_id, state in job_states(site, ids).items():
        if state != "gone":
            raise UserError(f"{job.runs[0]}: job {job_id} is {state}; wait for it, or cancel it first")
    return write_job(site, job, text, specs)


def chain(site: Site, job: Job, script: Path, jobs: int, after: str | None = None) -> list[str]:
    """Submit a script `jobs` times, each to start when the one before has ended; return their ids.

    after: id of a job that the first one waits for. Each job is recorded as soon as the scheduler has it. When a job
    has finished the run, the later ones end at once. On this machine the job replaces this process.
    Raises UserError for a folder that the scheduler misreads, RunFailed where it refuses.
    """
    ids: list[str] = []
    without = list(dict.fromkeys(host for run in job.runs for host in bad_nodes(run)))
    for _ in range(jobs):
        ids.append(site.batch.submit(script, site.launcher, ids[-1] if ids else after, without))
        record(site, job, script, ids[-1])
        if jobs > 1:
            write_text(job.runs[0] / "job/last_job", f"{ids[-1]}\n")
    return ids


def record(site: Site, job: Job, script: Path, job_id: str) -> None:
    """Append the submission to every run's RUN/job/submitted.jsonl. In an array each run's own id has an index."""
    for index, run in enumerate(job.runs, 1):
        line = {
            "id": site.batch.member(job_id, index) if job.is_array else job_id,
            "time": time.time(),
            "site": site.name,
            "scheduler": site.scheduler,
            "script": str(script),
            "spec": str(run / "job/spec.yaml"),
            "nodes": job.nodes,
            "walltime_minutes": job.walltime_minutes,
        }
        path = run / "job/submitted.jsonl"
        with naming(path), open(path, "a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(json.dumps(line) + "\n")


def submissions(run: Path) -> list[dict[str, Any]]:
    """Return the submissions of this run, oldest first."""
    path = run / "job/submitted.jsonl"
    if not path.exists():
        return []
    return [from_json(line) for line in read_file(path).splitlines()]


def job_states(site: Site, ids: Sequence[str]) -> dict[str, str]:
    """Return queued, running or gone for each id. An array's own id is running while one of its jobs is.

    Raises UserError without a scheduler, RunFailed where it does not answer.
    """
    if not ids:
        return {}
    site.check_scheduler()
    states = site.batch.states()
    found = {}
    for job_id in ids:
        members = {state for name, state in states.items() if job_id in (name, re.split(r"[_\[]", name)[0])}
        found[job_id] = "gone" if not members else "running" if "running" in members else "queued"
    return found
