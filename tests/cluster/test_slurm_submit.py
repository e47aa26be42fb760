"""`summit-train submit` on a real Slurm: two nodes; a run that is warned, killed, cancelled or refused, and goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from summit_train.cluster.job import Job
from summit_train.cluster.site import load_site
from summit_train.cluster.submit import write_job
from summit_train.spec import load_spec
from tests.conftest import WriteSpec, spec_writer
from tests.runs import assert_bit_equal, final_state, steps_of
from tests.slurm import Slurm
from tests.worlds import ROOT

pytestmark = [pytest.mark.slow]

# Enough steps that a run is still at it when a signal arrives.
EPOCHS = {"schedule": {"epochs": 8, "warmup_epochs": 1}}
SITE = f"""
name: two_nodes
extends: {ROOT}/configs/sites/slurm_generic.yaml
gpus_per_node: 0
ranks_per_node: 1
cores_per_node: 1
bind: false
warning_seconds: 10
directives: []
environment:
  OMP_NUM_THREADS: {{value: "1", why: both nodes are one machine}}
  OMPI_MCA_mpi_yield_when_idle: {{value: "1", why: a rank that waits leaves the core to the others}}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of the test's cluster."""
    path = tmp_path_factory.mktemp("site") / "two_nodes.yaml"
    path.write_text(SITE)
    return path


@pytest.fixture(scope="module")
def whole(slurm: Slurm, site: Path, motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    job = submit(slurm, site, spec_writer(motion_set, folder)("whole", **EPOCHS))
    slurm.wait(job, "COMPLETED")
    return folder / "runs/whole"


def submit(slurm: Slurm, site: Path, spec: Path, *more: str) -> str:
    """Submit to both nodes; the job's id, as the run directory has it."""
    done = slurm.program("submit", str(spec), "--site", str(site), "--nodes", "2", "--walltime", "0:30", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    submitted = load_spec(spec, []).run_path / "job/submitted.jsonl"
    return str(json.loads(submitted.read_text().splitlines()[-1])["id"])


def wait_for_step(slurm: Slurm, job: str, run: Path, step: int) -> None:
    """Wait until the job, which must not end before, has written down a step."""
    slurm.wait(job, "RUNNING")
    running = ("RUNNING", "COMPLETING")
    slurm.wait_until(lambda: max(steps_of(run), default=0) >= step or slurm.state(job) not in running, "a step")
    assert slurm.state(job) == "RUNNING", slurm.output(job)


def checkpoints(run: Path) -> list[int]:
    """The steps of the checkpoints of a run."""
    return sorted(int(path.stem.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*.pt"))


def test_a_run_is_trained_over_both_nodes(slurm: Slurm, whole: Path) -> None:
    (submission,) = map(json.loads, (whole / "job/submitted.jsonl").read_text().splitlines())
    shown = slurm.show(submission["id"])
    assert (shown["JobState"], shown["NodeList"], shown["ExitCode"]) == ("COMPLETED", "n[1-2]", "0:0")
    assert submission["nodes"] == 2 and Path(submission["spec"]) == whole / "job/spec.yaml"
    environment = json.loads((whole / "environment.json").read_text())
    assert (environment["ranks"], environment["ranks_per_node"], environment["backend"]) == (2, 1, "horovod")
    assert steps_of(whole) == list(range(1, 81))
    assert json.loads((whole / "eval.json").read_text())["videos"] == 41
    assert f"job {submission['id']}: done, {whole}" in slurm.output(submission["id"])


# The back end, and the keys of the site that choose it. Without PMIx srun's ranks find each other by the job's number,
# here at an address that is named: this machine does not know its nodes' names.
BACK_ENDS = {
    "horovod": ["launcher=mpirun", "launcher_options=[]"],
    "torch (gloo)": ["comm=torch", "launcher_options=[]", "setup=[export MASTER_ADDR=127.0.0.1]"],
}


@pytest.mark.parametrize("backend", BACK_ENDS)
def test_a_warned_job_is_requeued_and_ends_bit_equal(
    slurm: Slurm, site: Path, whole: Path, write_spec: WriteSpec, tmp_path: Path, backend: str
) -> None:
    """The signal is the one that Slurm sends before the walltime. Loader workers get it too. The run's name is such
    that a shell or Slurm would stumble over it, were it not quoted. The uninterrupted run was joined by Horovod."""
    name = "a b; $(touch x) \"' #&*~"
    spec = write_spec(name, **EPOCHS, data={"workers": 1})
    run = tmp_path / "runs" / name
    with slurm.closed():
        job = submit(slurm, site, spec, *(word for key in BACK_ENDS[backend] for word in ("--set", key)))
        again = slurm.program("submit", str(spec), "--site", str(site), "--nodes", "2")
    assert again.returncode == 2 and f"job {job} is " in again.stderr and "wait for it, or cancel it" in again.stderr
    wait_for_step(slurm, job, run, 3)
    with slurm.stopped(SLURM_JOB_ID=job):
        slurm.run("scancel", "--signal=USR2", "--batch", job)
    shown = slurm.wait(job, "COMPLETED")
    assert shown["Restarts"] == "1", slurm.output(job)
    assert steps_of(run) == list(range(1, 81))  # none was made twice
    output = slurm.output(job)
    assert "stopped by SIGUSR2" in output and "requeued, 1 of 20" in output and "goes on from" in output
    assert json.loads((run / "environment.json").read_text())["backend"] == backend
    assert_bit_equal(final_state(whole), final_state(run))


def test_a_walltime_that_is_always_too_short_still_gets_on(
    slurm: Slurm, site: Path, write_spec: WriteSpec, tmp_path: Path
) -> None:
    """Slurm's own warning, some seconds after each start: it may come while the ranks still load torch."""
    spec = write_spec("short", schedule={"epochs": 1000}, checkpoint={"every_epochs": 1000})
    job = submit(slurm, site, spec, "--walltime", "0:01", "--set", "warning_seconds=58", "--max-requeues", "1")
    shown = slurm.wait(job, "FAILED")
    output = slurm.output(job)
    assert shown["Restarts"] == "1" and output.count("stopped by SIGUSR2; goes on from") == 2, output
    assert "after 1 requeues, no more are allowed" in output
    newest = checkpoints(tmp_path / "runs/short")[-1]
    assert newest >= 4 and steps_of(tmp_path / "runs/short") == list(range(1, newest + 1))


def test_a_killed_rank_ends_the_job_and_a_resubmission_goes_on(
    slurm: Slurm, site: Path, whole: Path, write_spec: WriteSpec, tmp_path: Path
) -> None:
    """The message names no rank: who gets SIGKILL cannot speak. The ranks of the other node are ended by srun."""
    spec, run = write_spec("killed", **EPOCHS), tmp_path / "runs/killed"
    job = submit(slurm, site, spec)
    wait_for_step(slurm, job, run, 13)
    ranks = {node: slurm.processes(SLURM_JOB_ID=job, SLURMD_NODENAME=node, SLURM_STEP_ID="0") for node in ("n1", "n2")}
    assert ranks["n1"] and ranks["n2"]
    began = time.monotonic()
    for rank in ranks["n2"]:
        os.kill(rank, signal.SIGKILL)
    slurm.wait(job, "FAILED")
    print(f"failed {time.monotonic() - began:.1f} s after the rank was killed")
    slurm.wait_until(lambda: not slurm.processes(SLURM_JOB_ID=job), "the other ranks to end")
    assert slurm.show(job)["Restarts"] == "0" and "not started again" in slurm.output(job)
    kept = checkpoints(run)
    assert kept and kept[-1] < 80
    slurm.wait(submit(slurm, site, spec), "COMPLETED")
    assert steps_of(run)[-(80 - kept[-1]) :] == list(range(kept[-1] + 1, 81))
    assert_bit_equal(final_state(whole), final_state(run))


def test_a_job_that_made_no_step_is_not_requeued(
    slurm: Slurm, site: Path, write_spec: WriteSpec, tmp_path: Path
) -> None:
    """In place of the program one that leaves as if it were stopped, beside a checkpoint of an earlier job."""
    spec, run = load_spec(write_spec("stuck"), []), tmp_path / "runs/stuck"
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ntouch '{run}/stopped'\nexit 85\n")
    program.chmod(0o755)
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints/step_00000004.pt").touch()
    job = Job("stuck", (run,), nodes=2, walltime_minutes=30, workdir=tmp_path, python=str(program))
    script = write_job(load_site(str(site)), job, [spec])
    job_id = slurm.run("sbatch", "--parsable", f"--chdir={run}/job", str(script)).strip()
    shown = slurm.wait(job_id, "FAILED")
    assert shown["Restarts"] == "0"
    assert "stopped at step 4 without a new step or score since its start; not started again" in slurm.output(job_id)


def test_a_cancelled_job_stays_cancelled(slurm: Slurm, site: Path, write_spec: WriteSpec, tmp_path: Path) -> None:
    spec, run = write_spec("cancelled", **EPOCHS), tmp_path / "runs/cancelled"
    job = submit(slurm, site, spec)
    wait_for_step(slurm, job, run, 3)
    slurm.run("scancel", job)
    slurm.wait(job, "CANCELLED")
    slurm.wait_until(lambda: not slurm.processes(SLURM_JOB_ID=job), "its processes to end")
    time.sleep(1.5)  # the scheduler looks at its queue every second
    assert slurm.state(job) == "CANCELLED" and slurm.show(job)["Restarts"] == "0"


def test_a_run_below_which_slurm_cannot_write_is_refused(slurm: Slurm, site: Path, write_spec: WriteSpec) -> None:
    """Slurm replaces %j in the whole path of a job's output, and fails to start the job."""
    done = slurm.program("submit", str(write_spec("at 50%j")), "--site", str(site), "--nodes", "2")
    assert done.returncode == 2
    assert "runs/at 50%j/job: Slurm cannot write output below a name with % or \\; change it" in done.stderr


def test_what_slurm_refuses_is_said_in_one_line(
    slurm: Slurm, site: Path, write_spec: WriteSpec, tmp_path: Path
) -> None:
    done = slurm.program(
        "submit", str(write_spec("refused")), "--site", str(site), "--nodes", "2", "--set", "queue=nowhere"
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "sbatch refused (exit status 1): sbatch: error: invalid partition specified: nowhere" in done.stderr
    assert not (tmp_path / "runs/refused/job/submitted.jsonl").exists()
