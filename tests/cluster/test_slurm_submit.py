"""`summit-train submit` on a real Slurm: two nodes; a run that is warned, killed, cancelled or refused, and resumes."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from summit_train.cluster.job import Job
from summit_train.cluster.site import load_site
from summit_train.cluster.submit import write_job
from summit_train.spec import load_spec
from tests.conftest import WriteSpec, spec_writer
from tests.runs import assert_bit_equal, final_state, steps_of
from tests.slurm import Slurm, running_slurm
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
# Without PMIx srun's ranks find each other by the job's number, here at an address that is named: this machine does not
# know its nodes' names.
BY_TORCH = ("comm=torch", "launcher_options=[]", "setup=[export MASTER_ADDR=127.0.0.1]")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of the test's cluster."""
    path = tmp_path_factory.mktemp("site") / "two_nodes.yaml"
    path.write_text(SITE)
    return path


@pytest.fixture(scope="module")
def whole(slurm: Slurm, site: Path, motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted, joined by Horovod."""
    folder = tmp_path_factory.mktemp("whole")
    slurm.wait(submit(slurm, site, spec_writer(motion_set, folder)("whole", **EPOCHS)), "COMPLETED")
    return folder / "runs/whole"


def set_words(keys: Iterable[str]) -> list[str]:
    return [word for key in keys for word in ("--set", key)]


def submit(slurm: Slurm, site: Path, spec: Path, *keys: str, status: int = 0) -> str:
    """Submit to both nodes; the job's id, as the run folder has it, or what is said where it is refused."""
    words = ["submit", str(spec), "--site", str(site), "--nodes", "2", "--walltime", "0:30"]
    ended, said = slurm.program(*words, *set_words(keys))
    assert ended == status and "Traceback" not in said, said
    submitted = load_spec(spec, []).run_path / "job/submitted.jsonl"
    return said if status else str(json.loads(submitted.read_text().splitlines()[-1])["id"])


def wait_for_step(slurm: Slurm, job: str, run: Path, step: int) -> None:
    """Wait until the job, which must not end before, has written down a step."""
    running = ("PENDING", "RUNNING", "COMPLETING")
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


def test_a_job_that_is_warned_then_killed_then_resubmitted_ends_bit_equal(
    slurm: Slurm, site: Path, whole: Path, write_spec: WriteSpec, tmp_path: Path
) -> None:
    """The warning is the signal that Slurm sends before the walltime; loader workers get it too, and the job is
    requeued. A killed rank ends the job for good. The run's name would break a shell or Slurm that did not quote it."""
    name = "a b; $(touch x) \"' #&*~"
    spec, run = write_spec(name, **EPOCHS, data={"workers": 1}), tmp_path / "runs" / name
    with slurm.closed():
        job = submit(slurm, site, spec, *BY_TORCH)
        again = submit(slurm, site, spec, status=2)
    assert f"job {job} is " in again and "wait for it, or cancel it" in again
    wait_for_step(slurm, job, run, 3)
    with slurm.stopped(SLURM_JOB_ID=job):
        slurm.run("scancel", "--signal=USR2", "--batch", job)
    slurm.wait_until(lambda: slurm.show(job)["Restarts"] == "1", "the requeue")
    stopped = max(steps_of(run))
    output = slurm.output(job)
    assert "stopped by SIGUSR2" in output and "requeued, 1 of 20" in output and stopped < 60

    wait_for_step(slurm, job, run, stopped + 11)
    assert f"goes on from step {stopped}" in slurm.output(job) or f"from step {stopped}" in slurm.output(job)
    ranks = {node: slurm.processes(SLURM_JOB_ID=job, SLURMD_NODENAME=node, SLURM_STEP_ID="0") for node in ("n1", "n2")}
    assert ranks["n1"] and ranks["n2"]
    for rank in ranks["n2"]:
        os.kill(rank, signal.SIGKILL)
    slurm.wait(job, "FAILED")
    slurm.wait_until(lambda: not slurm.processes(SLURM_JOB_ID=job), "the other ranks to end")
    assert slurm.show(job)["Restarts"] == "1" and "not started again" in slurm.output(job)
    assert stopped <= (kept := checkpoints(run)[-1]) < 80

    slurm.wait(submit(slurm, site, spec, *BY_TORCH), "COMPLETED")
    steps = steps_of(run)
    assert steps[-(80 - kept) :] == list(range(kept + 1, 81)) and steps[: stopped + 1] == list(range(1, stopped + 2))
    assert json.loads((run / "environment.json").read_text())["backend"] == "torch (gloo)"
    assert_bit_equal(final_state(whole), final_state(run))


def test_the_line_of_a_job_that_was_written_submits_it(
    slurm: Slurm, site: Path, write_spec: WriteSpec, tmp_path: Path
) -> None:
    """A dry run's script lacks what it reads; this one has it, and its output is where it was said to go."""
    spec, run = write_spec("by 'hand'", schedule={"epochs": 1}), tmp_path / "runs/by 'hand'"
    words = ["submit", str(spec), "--site", str(site), "--nodes", "2", "--walltime", "0:30", "--write"]
    status, said = slurm.program(*words, *set_words(BY_TORCH))
    assert status == 0 and f"\n  output    {run}/job/*.out\n" in said, said
    job = slurm.run("bash", "-c", said.splitlines()[-1]).strip()
    slurm.wait(job, "COMPLETED")
    assert (run / f"job/{job}.out").read_text().endswith(f"job {job}: done, {run}\n")


def submit_stand_in(slurm: Slurm, site: Path, spec: Path, folder: Path, program: str, **more: int) -> str:
    """Submit a job with a shell's program in the place of Python; its id."""
    python, run = folder / "python", folder / "runs" / spec.stem
    python.write_text(f"#!/bin/sh\ncd '{run}'\n{program}\n")
    python.chmod(0o755)
    job = Job(spec.stem, (run,), 2, **({"walltime_minutes": 30} | more), workdir=folder, python=str(python))
    script = write_job(load_site(str(site), ["warning_seconds=58"]), job, [load_spec(spec, [])])
    return slurm.run("sbatch", "--parsable", f"--chdir={run}/job", str(script)).strip()


def test_slurms_own_warning_requeues_a_job_as_often_as_it_may(
    slurm: Slurm, site: Path, write_spec: WriteSpec, tmp_path: Path
) -> None:
    """Two seconds after each start. In place of the program one that then leaves with a new checkpoint."""
    step = "$(($(wc -l < job/requeues || echo 0) + 1))"
    program = f"trap 'touch checkpoints/step_0000000{step}.pt stopped; exit 85' USR2\nwhile :; do sleep 0.1; done"
    folder = tmp_path / "runs/short/checkpoints"
    folder.mkdir(parents=True)
    spec = write_spec("short")
    job = submit_stand_in(slurm, site, spec, tmp_path, program, walltime_minutes=1, max_requeues=1)
    shown, output = slurm.wait(job, "FAILED"), slurm.output(job)
    assert shown["Restarts"] == "1" and "after 1 requeues, no more are allowed" in output, output
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000001.pt", "step_00000002.pt"]


def test_a_cancelled_job_stays_cancelled(slurm: Slurm, site: Path, write_spec: WriteSpec, tmp_path: Path) -> None:
    job = submit_stand_in(slurm, site, write_spec("cancelled"), tmp_path, "touch here\nexec sleep 600")
    slurm.wait_until((tmp_path / "runs/cancelled/here").exists, "the program")
    slurm.run("scancel", job)
    slurm.wait(job, "CANCELLED")
    slurm.wait_until(lambda: not slurm.processes(SLURM_JOB_ID=job), "its processes to end")
    time.sleep(1.5)  # the scheduler looks at its queue every second
    assert slurm.state(job) == "CANCELLED" and slurm.show(job)["Restarts"] == "0"


@pytest.mark.parametrize(
    ("name", "keys", "status", "said"),
    [
        # Slurm replaces %j in the whole path of a job's output, and fails to start the job.
        ("at 50%j", (), 2, "runs/at 50%j/job: Slurm cannot write output below a name with % or \\; change it"),
        ("refused", ("queue=nowhere",), 1,
         "sbatch refused (exit status 1): sbatch: error: invalid partition specified: nowhere"),
    ],
)  # fmt: skip
def test_what_slurm_does_not_take_is_refused_in_one_line(
    slurm: Slurm, site: Path, write_spec: WriteSpec, tmp_path: Path,
    name: str, keys: tuple[str, ...], status: int, said: str,
) -> None:  # fmt: skip
    assert said in submit(slurm, site, write_spec(name), *keys, status=status)
    assert not (tmp_path / "runs" / name / "job/submitted.jsonl").exists()


def test_the_doctor_checks_the_nodes_of_a_site_in_a_job(slurm: Slurm, site: Path, tmp_path: Path) -> None:
    caps, words = "walltime_caps=[{nodes: 2, walltime: 1:00}]", ("--submit", "--nodes", "2", "--run-dir", str(tmp_path))
    status, said = slurm.program("doctor", "--site", str(site), *words, "--set", caps, *set_words(BY_TORCH))
    found = dict(re.findall(r"^\w+ +(\S.*?)  +(\S.*)$", said, re.M))
    assert status == 0, said
    assert found["queue"] == "the default: 1:00 on 2 nodes" and found["account"].startswith("none, not checked: sacctm")
    assert found["trial job"].endswith(f" has ended; {tmp_path}/doctor_two_nodes/job has its script and output")
    assert found["node: launch"] == "2 ranks on 2 nodes by srun, torch (gloo): the sum is 3"
    assert found["node: ranks"] == "2; the profile says 2" and found["node: node-local disk"].endswith(" at /tmp")
    assert "node: torch" in found and "node: allreduce, 2 ranks" not in found


# --- the ranks and the processes of a cluster


WORLD = """
import os
from summit_train.core.comm.launch import find_launch
from summit_train.core.comm import open_world
launch = find_launch(os.environ)
world = open_world(launch)
mine = (world.rank, world.local_rank, world.local_size, launch.launcher, os.environ["SLURMD_NODENAME"], world.backend)
for words in world.gather(mine) or ():
    print(*words, flush=True)
world.close()
"""


@pytest.mark.parametrize(
    ("launcher", "name", "backend"),
    [
        ("srun --mpi=pmix", "srun", "horovod"),
        # srun's ranks find each other by the job's number. This machine does not know its nodes' names.
        ("export MASTER_ADDR=127.0.0.1\nsrun", "srun", "torch (gloo)"),
        ("mpirun --bind-to none", "mpirun (Open MPI)", "horovod"),
    ],
)
def test_ranks_on_two_nodes_are_local_rank_0_of_1_on_both(
    slurm: Slurm, tmp_path: Path, launcher: str, name: str, backend: str
) -> None:
    """Nobody names the back end: without PMIx it is torch.distributed."""
    (tmp_path / "world.py").write_text(WORLD)
    job = slurm.submit(
        f"#!/bin/bash\n{launcher} '{sys.executable}' '{tmp_path}/world.py'\n",
        "--nodes=2",
        "--ntasks-per-node=1",
    )
    slurm.wait(job, "COMPLETED")
    assert slurm.output(job).splitlines() == [f"0 0 1 {name} n1 {backend}", f"1 0 1 {name} n2 {backend}"]


def test_a_stopped_cluster_leaves_no_process(slurm: Slurm, tmp_path: Path) -> None:
    """Stopped in the middle of a job whose script and step ignore what asks them to end."""
    script = "#!/bin/bash\ntrap '' TERM\nsrun -N2 bash -c 'trap \"\" TERM; echo here; while :; do sleep 1; done'\n"
    with running_slurm(tmp_path) as second:
        job = second.submit(script, "--nodes=2")
        second.wait_until(lambda: second.state(job) == "RUNNING" and second.output(job).count("here") == 2, "the steps")
        assert len(second.processes()) >= 8
    assert second.processes() == []
    assert slurm.run("sinfo", "-h", "-o", "%D").strip() == "2"
