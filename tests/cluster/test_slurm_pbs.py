"""The script for PBS through Slurm's own qsub on a real Slurm of two nodes, with Open MPI's mpirun.

Slurm reads the script's #PBS lines itself. Its qsub takes scripts by name only and has no qselect, so the states of
PBS are not tested here; Slurm tells the hosts through generate_pbs_nodefile, as the site's set-up.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cluster.test_slurm_submit import EPOCHS, wait_for_step
from tests.conftest import WriteSpec
from tests.runs import assert_bit_equal, final_state, steps_of
from tests.slurm import Slurm
from tests.worlds import ROOT, train

WRAPPERS = ROOT / "build/slurm_torque/usr/bin"
SITE = f"""
name: pbs_on_slurm
extends: {ROOT}/configs/sites/pbs_generic.yaml
launcher: mpirun
gpus_per_node: 0
ranks_per_node: 1
cores_per_node: 1
bind: false
setup:
  - PATH=WRAPPERS:$PATH  # a login shell begins without them
  - PBS_NODEFILE=$(generate_pbs_nodefile)
  - export MASTER_ADDR=127.0.0.1
environment:
  OMP_NUM_THREADS: {{value: "1", why: both nodes are one machine}}
  OMPI_MCA_mpi_yield_when_idle: {{value: "1", why: a rank that waits leaves the core to the others}}
"""


@pytest.fixture
def pbs(slurm: Slurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Slurm:
    """Slurm with its wrappers beside the programs that they look for beside them."""
    if not WRAPPERS.is_dir():
        pytest.skip("needs slurm-wlm-torque in build/slurm_torque; as root on Debian tests/install_pbs.sh unpacks it")
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("qsub", "generate_pbs_nodefile"):
        shutil.copy(WRAPPERS / name, folder)
    (folder / "sbatch").symlink_to(shutil.which("sbatch", path="/usr/bin") or "")
    monkeypatch.setitem(slurm.environ, "PATH", f"{folder}:{slurm.environ['PATH']}")
    return slurm


@pytest.mark.slow
def test_a_pbs_job_hands_over_to_the_next_one(pbs: Slurm, write_spec: WriteSpec, tmp_path: Path) -> None:
    spec, run, site = write_spec(**EPOCHS), tmp_path / "runs/run", tmp_path / "site.yaml"
    site.write_text(SITE.replace("WRAPPERS", str(tmp_path / "bin")))
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
    assert f"stopped at step {stopped}; job {new} continues, 1 of 20\n" in text, text
    assert [json.loads(line)["id"] for line in (run / "job/submitted.jsonl").read_text().splitlines()] == [job, new]
    pbs.wait(new, "COMPLETED")
    assert f"from step {stopped} on 2 nodes, 2 ranks" in (run / f"job/{new}.out").read_text()
    whole = write_spec("whole", **EPOCHS)
    train(2, whole)
    assert_bit_equal(final_state(run), final_state(tmp_path / "runs/whole"))
