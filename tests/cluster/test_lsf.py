"""The whole way of an LSF job, with real training: submit, bsub, jsrun, the warning, a checkpoint, requeue, the end.

There is no LSF and no jsrun here. bsub, jsrun and jskill are stand-ins (tests/standin_programs.py) that check what they
are given; jsrun's ranks are started by mpirun; what LSF does with a job is done by the test.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from summit_train.__main__ import main
from summit_train.core.processes import find_mpirun
from tests.conftest import WriteSpec
from tests.runs import steps_of
from tests.standins import Standins, requeues, start_lsf_job, warn
from tests.worlds import PATIENCE_S, ROOT, forked, needs_ranks

# The shipped sites with nodes of CPUs: Summit's with one rank each, the other with two ranks on one.
SITES = {
    "summit": "ranks_per_node: 1\ncores_per_node: 1\n",
    "lsf_generic": "ranks_per_node: 2\nbind: false\nlauncher_options: [{option: --oversubscribe, why: few cores}]\n",
}
NODES = {"summit": 2, "lsf_generic": 1}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture
def lsf(tmp_path: Path) -> Standins:
    return Standins(tmp_path / "lsf", "bsub", "bjobs", "jsrun", "jskill")


@needs_ranks
@pytest.mark.slow
@pytest.mark.parametrize("site", SITES)
def test_a_job_that_the_walltime_ends_goes_on(lsf: Standins, write_spec: WriteSpec, tmp_path: Path, site: str) -> None:
    spec, run = write_spec("a b; $(touch x)", schedule={"epochs": 6}), tmp_path / "runs/a b; $(touch x)"
    nodes, profile = str(NODES[site]), tmp_path / "site.yaml"
    profile.write_text(f"name: small\nextends: {ROOT}/configs/sites/{site}.yaml\ngpus_per_node: 0\n{SITES[site]}")

    def work() -> int:
        os.environ.update(lsf.environ)
        return main(["submit", str(spec), "--site", str(profile), "--nodes", nodes, "--walltime", "0:10"])

    status, said = forked(0, work)
    assert (status, ": job 101 submitted" in said) == (0, True), said
    (job,) = lsf.jobs()
    assert (job["folder"], job["named"]) == (str(run / "job"), site == "summit")  # bsub job.sh; bsub < job.sh
    assert job["options"].items() >= {"-W": "0:10", "-wa": "USR2", "-wt": "5", "-Q": "85", "-r": ""}.items()
    assert job["options"].get("-nnodes" if site == "summit" else "-n") == "2"
    environ = AS_ROOT | {"STANDIN_MPIRUN": find_mpirun() or ""}
    output = run / "job/101.out"

    process = start_lsf_job(lsf, job, **environ)
    deadline = time.monotonic() + PATIENCE_S
    while len(steps_of(run)) < 3:
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.02)
    warn(process)  # as -wa and -wt want it
    status = process.wait(timeout=PATIENCE_S)
    assert (status, requeues(job, status)) == (85, True), output.read_text()
    assert [call["options"] for call in lsf.calls("jskill")] == ([{"-s": "12"}] if site == "summit" else [])
    stopped = int(sorted((run / "checkpoints").glob("*.pt"))[-1].stem[5:])
    assert 3 <= stopped < 60
    assert (run / "job/requeues").read_text() == f"101 step {stopped}\n"
    assert not (ROOT / "x").exists() and not (run / "job/x").exists()
    if site == "summit":
        return  # the second start is the same for both sites

    assert start_lsf_job(lsf, job, **environ).wait(timeout=PATIENCE_S) == 0, output.read_text()
    text = output.read_text()
    assert f"from step {stopped} on {nodes} nodes, 2 ranks" in text and text.endswith(f"job 101: done, {run}\n")
    assert steps_of(run) == list(range(1, 61))  # none twice, none left out
    assert json.loads((run / "eval.json").read_text())["videos"] == 41
