"""A real Slurm: `submit` (a run that is warned, killed, cancelled or refused, and resumes), `sweep` as a
job array, and the script for PBS through Slurm's own qsub, with Open MPI's mpirun.

Slurm reads the script's #PBS lines itself. Its qsub takes scripts by name only and has no qselect, so the states of
PBS are not tested here; Slurm tells the hosts through generate_pbs_nodefile, as the site's set-up.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from summit_train.cluster.job import Job, render
from summit_train.cluster.site import load_site
from summit_train.cluster.submit import submissions, write_job
from summit_train.spec import load_spec
from tests.conftest import WriteSpec, spec_writer
from tests.runs import assert_bit_equal, final_state, steps_of
from tests.slurm import BY_TORCH, Slurm, checkpoints, set_words, submit, wait_for_step
from tests.worlds import ROOT, lines

pytestmark = [pytest.mark.slow]

# Enough steps that a run is still at it when a signal arrives.
EPOCHS = {"schedule": {"epochs": 8, "warmup_epochs": 1}}
# In a shell's program in the place of Python: the job keeper is the real one.
KEEPER = f'[ "$2" != summit_train.cluster.keeper ] || exec {sys.executable} "$@"\n'


@pytest.fixture(scope="module")
def whole(slurm: Slurm, site: Path, motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted, joined by Horovod."""
    folder = tmp_path_factory.mktemp("whole")
    slurm.wait(submit(slurm, site, spec_writer(motion_set, folder)("whole", **EPOCHS)), "COMPLETED")
    return folder / "runs/whole"


def test_a_run_is_trained_over_both_nodes(slurm, whole):
    (submission,) = map(json.loads, (whole / "job/submitted.jsonl").read_text().splitlines())
    shown = slurm.show(submission["id"])
    assert (shown["JobState"], shown["NodeList"], shown["ExitCode"]) == ("COMPLETED", "n[1-2]", "0:0")
    assert submission["nodes"] == 2 and Path(submission["spec"]) == whole / "job/spec.yaml"
    environment = json.loads((whole / "environment.json").read_text())
    assert (environment["ranks"], environment["ranks_per_node"], environment["backend"]) == (2, 1, "horovod")
    assert steps_of(whole) == list(range(1, 81))
    assert json.loads((whole / "eval.json").read_text())["videos"] == 11
    assert f"job {submission['id']}: done, {whole}" in slurm.output(submission["id"])


@pytest.mark.nightly
def test_a_job_that_is_warned_then_killed_then_resubmitted_ends_bit_equal(slurm, site, whole, write_spec, tmp_path):
    """The warning is the signal that Slurm sends before the walltime; loader workers get it too, and the job is
    requeued. A killed rank ends the job for good, without restarts. The run's name would break a shell or Slurm that
    did not quote it."""
    name = "a b; $(touch x) \"' #&*~"
    spec, run = write_spec(name, **EPOCHS, data={"workers": 1}), tmp_path / "runs" / name
    with slurm.closed():
        job = submit(slurm, site, spec, "restarts=0", *BY_TORCH)
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
    its = {"SLURM_JOB_ID": job, "SLURM_STEP_NUM_TASKS": "2"}
    ranks = {node: slurm.processes(SLURMD_NODENAME=node, **its) for node in ("n1", "n2")}
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


def test_the_line_of_a_job_that_was_written_submits_it(slurm, site, write_spec, tmp_path):
    """A dry run's script lacks what it reads; this one has it, and its output is where it was said to go.

    A shell's program takes the place of Python.
    """
    spec, run, python = write_spec("by 'hand'"), tmp_path / "runs/by 'hand'", tmp_path / "python"
    python.write_text(f'#!/bin/sh\n{KEEPER}[ $3 = doctor ] || [ -e "$4" ]\n')
    python.chmod(0o755)
    words = ["submit", str(spec), "--site", str(site), "--nodes", "1", "--walltime", "0:30", "--write"]
    status, said = slurm.program(*words, *set_words(BY_TORCH))
    assert status == 0 and f"\n  output    {run}/job/*.out\n" in said, said
    script = run / "job/job.sh"
    script.write_text(script.read_text().replace(f"\npython={sys.executable}\n", f"\npython={python}\n"))
    job = slurm.run("bash", "-c", said.splitlines()[-1]).strip()
    slurm.wait(job, "COMPLETED")
    assert (run / f"job/{job}.out").read_text().endswith(f"job {job}: done, {run}\n")


def submit_stand_in(slurm: Slurm, site: Path, spec: Path, folder: Path, program: str, **more: int) -> str:
    """Submit a job with a shell's program in the place of Python; its id."""
    python, run = folder / "python", folder / "runs" / spec.stem
    python.write_text(f"#!/bin/sh\n{KEEPER}[ $3 != doctor ] || exit 0 # a node is asked\ncd '{run}'\n{program}\n")
    python.chmod(0o755)
    job = Job(spec.stem, (run,), 2, **({"walltime_minutes": 30} | more), workdir=folder, python=str(python))
    profile = load_site(str(site), ["warning_seconds=54"])
    script = write_job(profile, job, render(profile, job), [load_spec(spec, [])])
    return slurm.run("sbatch", "--parsable", f"--chdir={run}/job", str(script)).strip()


@pytest.mark.nightly
def test_slurms_own_warning_requeues_a_job_as_often_as_it_may(slurm, site, write_spec, tmp_path):
    """Six seconds after each start. In place of the program one that then leaves with a new checkpoint."""
    step = "$(($(wc -l < job/requeues || echo 0) + 1))"
    program = f"trap 'touch checkpoints/step_0000000{step}.pt stopped; exit 85' USR2\nwhile :; do sleep 0.1; done"
    folder = tmp_path / "runs/short/checkpoints"
    folder.mkdir(parents=True)
    spec = write_spec("short")
    job = submit_stand_in(slurm, site, spec, tmp_path, program, walltime_minutes=1, max_requeues=1)
    shown, output = slurm.wait(job, "FAILED"), slurm.output(job)
    assert shown["Restarts"] == "1" and "after 1 requeues, no more are allowed" in output, output
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000001.pt", "step_00000002.pt"]


def test_a_cancelled_job_stays_cancelled(slurm, site, write_spec, tmp_path):
    job = submit_stand_in(slurm, site, write_spec("cancelled"), tmp_path, "touch here\nexec sleep 600")
    slurm.wait_until((tmp_path / "runs/cancelled/here").exists, "the program")
    slurm.run("scancel", job)
    slurm.wait(job, "CANCELLED")
    slurm.wait_until(lambda: not slurm.processes(SLURM_JOB_ID=job), "its processes to end")
    time.sleep(1.5)  # the scheduler looks at its queue every second
    assert slurm.state(job) == "CANCELLED" and slurm.show(job)["Restarts"] == "0"


def test_what_slurm_refuses_is_named(slurm, site, write_spec, tmp_path):
    message = "sbatch refused (exit status 1): sbatch: error: invalid partition specified: nowhere"
    assert message in submit(slurm, site, write_spec(), "queue=nowhere", status=1)
    assert not (tmp_path / "runs/run/job/submitted.jsonl").exists()


@pytest.mark.nightly
def test_the_doctor_checks_the_nodes_of_a_site_in_a_job(slurm, site, tmp_path):
    caps, words = "walltime_caps=[{nodes: 3, walltime: 1:00}]", ("--submit", "--nodes", "2", "--run-dir", str(tmp_path))
    keys = (*BY_TORCH, "check_nodes=true")
    status, said = slurm.program("doctor", "--site", str(site), *words, "--set", caps, *set_words(keys))
    found = dict(re.findall(r"^\w+ +(\S.*?)  +(\S.*)$", said, re.M))
    assert status == 0, said
    assert found["queue"] == "the default: 1:00 on 3 nodes" and found["account"].startswith("none, not checked: sacctm")
    assert found["trial job"].endswith(f" has ended; {tmp_path}/doctor_two_nodes/job has its script and output")
    assert found["node: launch"] == "2 ranks on 2 nodes by srun, torch (gloo): the sum is 3"
    assert found["node: ranks"] == "2; the profile says 2" and found["node: node-local disk"].endswith(" at /tmp")
    assert "node: torch" in found and "node: allreduce, 2 ranks" not in found
    assert found["node: speeds"].startswith("2 nodes, the median of each one's slowest rank: matrix products ")


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
    ("launcher", "nodes", "each", "name", "backend"),
    [
        # Not on both nodes: as these are one machine, Open MPI would give all ranks one shared memory.
        ("srun --mpi=pmix", 1, 2, "srun", "horovod"),
        # srun's ranks find each other by the job's number. This machine does not know its nodes' names.
        pytest.param("export MASTER_ADDR=127.0.0.1\nsrun", 2, 2, "srun", "torch (gloo)", marks=pytest.mark.nightly),
        pytest.param("mpirun --bind-to none", 2, 1, "mpirun (Open MPI)", "horovod", marks=pytest.mark.nightly),
    ],
)
def test_ranks_know_their_places_on_their_nodes(slurm, tmp_path, launcher, nodes, each, name, backend):
    """Nobody names the back end: without PMIx it is torch.distributed."""
    (tmp_path / "world.py").write_text(WORLD)
    job = slurm.submit(
        f"#!/bin/bash\n{launcher} '{sys.executable}' '{tmp_path}/world.py'\n",
        f"--nodes={nodes}",
        f"--ntasks-per-node={each}",
    )
    slurm.wait(job, "COMPLETED")
    assert slurm.output(job).splitlines() == [
        f"{rank} {rank % each} {each} {name} n{1 + rank // each} {backend}" for rank in range(nodes * each)
    ]


# --- a sweep as a job array


SWEEP = """
name: batch_size
base: base.yaml
set: {schedule.epochs: 4, scale.clips_per_gpu: 2}
grid: {scale.gpus: [4, 2]}
nodes: 1
at_once: 2
"""


@pytest.fixture
def sweep(write_spec: WriteSpec, tmp_path: Path) -> str:
    """Batches of 8 and 4 clips, each on one node."""
    write_spec("base")
    (tmp_path / "sweep_file.yaml").write_text(SWEEP)
    return str(tmp_path / "sweep_file.yaml")


def _sweep(slurm: Slurm, *words: str) -> str:
    status, said = slurm.program("sweep", *words)
    assert status == 0, said
    return said


def _states(slurm: Slurm, sweep: str) -> dict[str, str]:
    values = json.loads(lines(_sweep(slurm, sweep, "--status", "--json"))[-1])
    return {run["name"]: run["state"] for run in values["runs"]}


@pytest.mark.nightly
def test_an_array_with_one_run_killed_and_then_that_one_alone(slurm, sweep, site, tmp_path):
    folder = tmp_path / "runs/batch_size"
    killed, kept = folder / "gpus-4", folder / "gpus-2"
    words = (sweep, "--site", str(site), "--walltime", "0:30")
    with slurm.closed():
        assert "of 2 runs, 2 at once" in _sweep(slurm, *words)
        (first,), (second,) = ([line["id"] for line in submissions(run)] for run in (killed, kept))
        array = first.removesuffix("_1")
        assert second == f"{array}_2"

        # While the array waits the sweep is asked for again, and starts nothing.
        again = _sweep(slurm, *words)
        assert "not started again: " in again and "job" not in again.split("not started again")[1].split("\n")[1]
        assert len(submissions(killed)) == len(submissions(kept)) == 1

    # One run is killed in the middle.
    slurm.wait_until(lambda: bool(steps_of(killed)), "a step of the first run")
    with slurm.stopped(SLURM_ARRAY_JOB_ID=array, SLURM_ARRAY_TASK_ID="1"):
        slurm.run("scancel", "--signal=KILL", "--full", first)
    slurm.wait(second, "COMPLETED")
    slurm.wait_until(lambda: slurm.state(first) not in ("RUNNING", "COMPLETING"), "the end of the first run")
    assert _states(slurm, sweep) == {"gpus-2": "done", "gpus-4": "failed"}
    assert 0 < max(steps_of(killed)) < 40

    # Started again: that one alone, from its checkpoint on.
    before = (kept / "metrics.jsonl").read_bytes()
    assert "not started again: gpus-2 (done)\n" in _sweep(slurm, *words)
    (job,) = [line["id"] for line in submissions(killed)][1:]
    assert len(submissions(kept)) == 1
    slurm.wait(job, "COMPLETED")
    assert (kept / "metrics.jsonl").read_bytes() == before

    # The last run that ended wrote the table and the figure: nobody asked for a status since.
    with open(folder / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["state"], row["global_batch"], row["ranks"]) for row in rows] == [
        ("gpus-4", "done", "8", "1"), ("gpus-2", "done", "4", "1"),
    ]  # fmt: skip
    assert all(0 <= float(row["top1"]) <= 100 and 0 < float(row["training_top1"]) <= 100 for row in rows)
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    # The sweep's folder knows its runs, without the file or the site.
    assert _states(slurm, str(folder)) == {"gpus-2": "done", "gpus-4": "done"}


# --- PBS


WRAPPERS = ROOT / "build/slurm_torque/usr/bin"
PBS_SITE = f"""
name: pbs_on_slurm
extends: {ROOT}/configs/sites/pbs_generic.yaml
launcher: mpirun
gpus_per_node: 0
ranks_per_node: 1
cores_per_node: 1
bind: false
setup:
  - PATH=WRAPPERS:$PATH  # a login shell begins without them
  - export PBS_NODEFILE=$(generate_pbs_nodefile)  # as PBS does
  - export MASTER_ADDR=127.0.0.1
environment:
  OMP_NUM_THREADS: {{value: "1", why: both nodes are one machine}}
  OMPI_MCA_mpi_yield_when_idle: {{value: "1", why: a rank that waits leaves the core to the others}}
"""


@pytest.fixture
def pbs(slurm: Slurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Slurm:
    """Slurm with its wrappers beside the programs that they look for beside them."""
    if not WRAPPERS.is_dir():
        pytest.skip("needs slurm-wlm-torque in build/slurm_torque; as root on Debian `make test-all` unpacks it")
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("qsub", "generate_pbs_nodefile"):
        shutil.copy(WRAPPERS / name, folder)
    (folder / "sbatch").symlink_to(shutil.which("sbatch", path="/usr/bin") or "")
    monkeypatch.setitem(slurm.environ, "PATH", f"{folder}:{slurm.environ['PATH']}")
    return slurm


@pytest.mark.nightly
def test_a_pbs_job_hands_over_to_the_next_one(pbs, whole, write_spec, tmp_path):
    spec, run, site = write_spec(**EPOCHS), tmp_path / "runs/run", tmp_path / "site.yaml"
    site.write_text(PBS_SITE.replace("WRAPPERS", str(tmp_path / "bin")))
    status, said = pbs.program("submit", str(spec), "--site", str(site), "--nodes", "2", "--walltime", "0:30")
    assert status == 0, said
    (line,) = (run / "job/submitted.jsonl").read_text().splitlines()
    job = json.loads(line)["id"]
    output = run / f"job/{job}.out"
    wait_for_step(pbs, job, run, 3)
    shown = pbs.show(job)
    assert (shown["JobName"], shown["TimeLimit"], shown["NumNodes"]) == ("run", "00:30:00", "2")
    pbs.run("scancel", "--signal=USR2", "--batch", job)
    pbs.wait_until(lambda: pbs.state(job) == "FAILED", "the end of the warned job")
    text = output.read_text()
    stopped, new = steps_of(run)[-1], str(int(job) + 1)
    assert f"job {job}: stopped at step {stopped}; requeued, 1 of 20 requeues\n" in text, text
    assert f"job {job}: job {new} continues\n" in text, text
    assert [json.loads(line)["id"] for line in (run / "job/submitted.jsonl").read_text().splitlines()] == [job, new]
    pbs.wait(new, "COMPLETED")
    assert f"from step {stopped} on 2 nodes, 2 ranks" in (run / f"job/{new}.out").read_text()
    assert_bit_equal(final_state(run), final_state(whole))
