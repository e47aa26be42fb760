"""The whole way of a job on LSF, PBS and Flux, with real training: submit, the warning, a checkpoint, the job that
continues, the end.

There is no LSF, PBS or Flux here. Their programs are stand-ins (tests/standin_programs.py) that check what they are
given and start the ranks with the variables of the real launchers; jsrun's ranks are started by mpirun. What a
scheduler does with a job is done by the test.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from summit_train.__main__ import main
from summit_train.core.processes import find_mpirun
from summit_train.core.text import counted
from tests.conftest import made_once, spec_writer
from tests.runs import assert_bit_equal, final_state, steps_of
from tests.slurm import first_job
from tests.standins import Standins, requeues, start_flux_job, start_lsf_job, start_pbs_job, warn
from tests.worlds import PATIENCE_S, ROOT, forked, needs_ranks, train

NAME = "a b; $(touch x)"
EPOCHS = {"epochs": 6}
IDS = {"pbs": "{}.pbs", "flux": "fA{}"}
START = {"pbs": start_pbs_job, "flux": start_flux_job}
STATES = {"pbs": ("qselect", "{} Q\n"), "flux": ("jobs", "{} DEPEND\n")}
# LSF's shipped sites with nodes of CPUs: Summit's with one rank each, the other with two ranks on one.
SITES = {
    "summit": "ranks_per_node: 1\ncores_per_node: 1\n",
    "lsf_generic": "ranks_per_node: 2\nbind: false\nlauncher_options: [{option: --oversubscribe, why: few cores}]\n",
}
NODES = {"summit": 2, "lsf_generic": 1}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
pytestmark = [pytest.mark.slow]


def _submitted(standins: Standins, spec: Path, site: str, keys: str, *words: str) -> tuple[int, str]:
    """Submit to a profile that extends a shipped one by these keys: (exit status, output)."""
    profile = standins.folder / "site.yaml"
    profile.write_text(f"name: small\nextends: {ROOT}/configs/sites/{site}.yaml\ngpus_per_node: 0\n{keys}")

    def work() -> int:
        os.environ.update(standins.environ)
        return main(["submit", str(spec), "--site", str(profile), *words])

    return forked(0, work)


def _wait_for_step(process: subprocess.Popen[bytes], run: Path, output: Path) -> None:
    """Wait until the job, which must not end before, has made three steps."""
    deadline = time.monotonic() + PATIENCE_S
    while len(steps_of(run)) < 3:
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.02)


def _stopped_at(run: Path, job: str) -> int:
    """The step of the checkpoint at which the job with this number stopped and asked for its continuation."""
    stopped = int(sorted((run / "checkpoints").glob("*.pt"))[-1].stem[5:])
    assert 3 <= stopped < 60
    assert (run / "job/requeues").read_text() == f"{job} step {stopped}\n"
    assert not (ROOT / "x").exists() and not (run / "job/x").exists()
    return stopped


def _continued(run: Path, job: str, stopped: int, nodes: str) -> None:
    text = (run / f"job/{job}.out").read_text()
    assert f"from step {stopped} on {counted(int(nodes), 'node')}, 2 ranks" in text
    assert text.endswith(f"job {job}: done, {run}\n")
    assert steps_of(run) == list(range(1, 61))  # none twice, none left out


@pytest.fixture(scope="module")
def whole(motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""

    def make(folder: Path) -> None:
        train(2, spec_writer(motion_set, folder)("whole", schedule=EPOCHS))

    return made_once(tmp_path_factory, "resubmitted", make) / "runs/whole"


@needs_ranks
@pytest.mark.parametrize("site", ["summit", "lsf_generic"])
@pytest.mark.nightly
def test_lsf_requeues_a_job_that_the_walltime_ends(write_spec, tmp_path, whole, site):
    lsf, nodes = Standins(tmp_path / "lsf", "bsub", "bjobs", "jsrun", "jskill"), str(NODES[site])
    spec, run = write_spec(NAME, schedule=EPOCHS), tmp_path / "runs" / NAME
    status, said = _submitted(lsf, spec, site, SITES[site], "--nodes", nodes, "--walltime", "0:10")
    assert (status, ": job 101 submitted" in said) == (0, True), said
    (job,) = lsf.jobs()
    assert (job["folder"], job["named"]) == (str(run / "job"), site == "summit")  # bsub job.sh; bsub < job.sh
    assert job["options"].items() >= {"-W": "0:10", "-wa": "USR2", "-wt": "5", "-Q": "85", "-r": ""}.items()
    assert job["options"].get("-nnodes" if site == "summit" else "-n") == "2"
    environ = AS_ROOT | {"STANDIN_MPIRUN": find_mpirun() or ""}
    output = run / "job/101.out"

    process = start_lsf_job(lsf, job, **environ)
    _wait_for_step(process, run, output)
    warn(process)  # as -wa and -wt want it
    status = process.wait(timeout=PATIENCE_S)
    assert (status, requeues(job, status)) == (85, True), output.read_text()
    assert [call["options"] for call in lsf.calls("jskill")] == ([{"-s": "12"}] if site == "summit" else [])
    stopped = _stopped_at(run, "101")
    if site == "summit":
        return  # the second start is the same for both sites

    assert start_lsf_job(lsf, job, **environ).wait(timeout=PATIENCE_S) == 0, output.read_text()
    _continued(run, "101", stopped, nodes)
    assert_bit_equal(final_state(run), final_state(whole))
    assert json.loads((run / "eval.json").read_text())["videos"] == 11


def _standins(folder: Path, scheduler: str, launcher: str) -> Standins:
    standins = Standins(folder, *(("flux",) if scheduler == "flux" else ("qsub", "qselect", "pbsnodes")))
    if scheduler == "pbs":
        standins.program({"mpiexec": "hydra"}.get(launcher, launcher), standins.bin / "mpiexec")
    # The ranks meet at a port made from the job's number: one that no test beside this one has.
    (standins.folder / "first_job").write_text(str(first_job()))
    return standins


@pytest.mark.nightly
@pytest.mark.parametrize(("scheduler", "launcher"), [("pbs", "mpiexec"), ("pbs", "pals"), ("flux", "flux")])
def test_a_job_that_the_walltime_ends_goes_on_as_a_new_one(write_spec, tmp_path, whole, scheduler, launcher):
    standins = _standins(tmp_path / "standins", scheduler, launcher)
    spec, run = write_spec(NAME, schedule=EPOCHS), tmp_path / "runs" / NAME
    keys = f"launcher: {launcher}\nranks_per_node: 2\ncores_per_node: 2\n"
    words = ("--nodes", "1", "--walltime", "1:00")
    submit = partial(_submitted, standins, spec, f"{scheduler}_generic", keys, *words)
    first, second = (IDS[scheduler].format(number) for number in (first_job(), first_job() + 1))
    status, said = submit()
    assert (status, f": job {first} submitted" in said) == (0, True), said
    (job,) = standins.jobs()
    assert job["folder"] == str(run / "job")
    output = run / f"job/{first}.out"

    process = START[scheduler](standins, job, STANDIN_RANKS="yes")
    _wait_for_step(process, run, output)
    if scheduler == "flux":
        warn(process)  # as --signal wants it
    else:
        os.kill(process.pid, 12)  # as the script's own timer does
    assert process.wait(timeout=PATIENCE_S) == 85, output.read_text()
    stopped = _stopped_at(run, first)
    _, again = standins.jobs()
    waits = {"pbs": ("-W", f"depend=afterany:{first}"), "flux": ("--dependency", f"afterany:{first}")}[scheduler]
    assert dict([waits]).items() <= again["options"].items() and again["script"] == job["script"]
    assert again["folder"] == job["folder"]

    if launcher == "pals":
        return  # the second start is the same for both launchers of PBS

    # The new job is known: nobody submits the run twice.
    lines = [json.loads(line) for line in (run / "job/submitted.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [first, second]
    file, form = STATES[scheduler]
    (standins.folder / file).write_text(form.format(second))
    status, said = submit()
    assert (status, f"job {second} is queued; wait for it" in said) == (2, True), said

    assert START[scheduler](standins, again, STANDIN_RANKS="yes").wait(timeout=PATIENCE_S) == 0
    _continued(run, second, stopped, "1")
    assert_bit_equal(final_state(run), final_state(whole))
