"""The whole way of an LSF job, with real training: submit, bsub, jsrun, the warning, a checkpoint, requeue, the end.

There is no LSF and no jsrun here. bsub, jsrun and jskill are stand-ins (tests/standin_programs.py) that check what they
are given; jsrun's ranks are started by mpirun; what LSF does with a job is done by the test.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import WriteSpec
from tests.standins import Standins, requeues, start_lsf_job, warn
from tests.worlds import PATIENCE_S, ROOT, mpirun, needs_ranks

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


def _site(tmp_path: Path, name: str) -> str:
    path = tmp_path / "site.yaml"
    extends = f"extends: {ROOT}/configs/sites/{name}.yaml\n"
    path.write_text(f"name: small\n{extends}gpus_per_node: 0\n{SITES[name]}")
    return str(path)


def _submit(lsf: Standins, *words: str) -> None:
    command = [sys.executable, "-m", "summit_train", "submit", *words]
    done = subprocess.run(command, cwd=ROOT, env=lsf.environ, capture_output=True, text=True)
    assert (done.returncode, ": job 101 submitted" in done.stdout) == (0, True), done.stderr


def _steps(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [record["step"] for record in records if record["kind"] == "step"]


def _wait_for_steps(run: Path, steps: int, process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(_steps(run)) < steps:
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.02)


@needs_ranks
@pytest.mark.slow
@pytest.mark.parametrize("site", SITES)
def test_a_job_that_the_walltime_ends_goes_on(lsf: Standins, write_spec: WriteSpec, tmp_path: Path, site: str) -> None:
    spec, run = write_spec("a b; $(touch x)", schedule={"epochs": 6}), tmp_path / "runs/a b; $(touch x)"
    nodes = str(NODES[site])
    _submit(lsf, str(spec), "--site", _site(tmp_path, site), "--nodes", nodes, "--walltime", "0:10")
    (job,) = lsf.jobs()
    assert (job["folder"], job["named"]) == (str(run / "job"), site == "summit")  # bsub job.sh; bsub < job.sh
    assert job["options"].items() >= {"-W": "0:10", "-wa": "USR2", "-wt": "5", "-Q": "85", "-r": ""}.items()
    assert job["options"].get("-nnodes" if site == "summit" else "-n") == "2"
    environ = AS_ROOT | {"STANDIN_MPIRUN": mpirun() or ""}
    output = run / "job/101.out"

    process = start_lsf_job(lsf, job, **environ)
    _wait_for_steps(run, 3, process, output)
    warn(process)  # as -wa and -wt want it
    status = process.wait(timeout=PATIENCE_S)
    assert (status, requeues(job, status)) == (85, True), output.read_text()
    assert [call["options"] for call in lsf.calls("jskill")] == ([{"-s": "12"}] if site == "summit" else [])
    stopped = int(sorted((run / "checkpoints").glob("*.pt"))[-1].stem[5:])
    assert 3 <= stopped < 60
    assert (run / "job/requeues").read_text() == f"101 step {stopped}\n"

    assert start_lsf_job(lsf, job, **environ).wait(timeout=PATIENCE_S) == 0, output.read_text()
    text = output.read_text()
    assert f"from step {stopped} on {nodes} nodes, 2 ranks" in text and text.endswith(f"job 101: done, {run}\n")
    assert _steps(run) == list(range(1, 61))  # none twice, none left out
    assert json.loads((run / "eval.json").read_text())["videos"] == 41
    assert not (ROOT / "x").exists() and not (run / "job/x").exists()
