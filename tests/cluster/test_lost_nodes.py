"""Nodes of a real Slurm that are lost, all their processes at once, in the middle of a job: the ranks start again in
the same job, on a spare node or on what is left. test_restarts.py has the quick tests, on stand-ins."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import spec_writer
from tests.runs import assert_bit_equal, difference, final_state, records, steps_of
from tests.slurm import BY_TORCH, Slurm, running_slurm, submit, wait_for_step

pytestmark = [pytest.mark.nightly]
KEYS = {
    "precision": "fp64",
    "scale": {"gpus": 5, "clips_per_gpu": 2},  # which neither two nor three ranks divide
    "schedule": {"epochs": 6, "warmup_epochs": 1},
    "checkpoint": {"every_minutes": 0.02},
}


@pytest.fixture(scope="module")
def cluster(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """One whose controller gives a silent node up after seconds. (`slurm` says whether there can be any.)"""
    with running_slurm(tmp_path_factory.mktemp("cluster"), node_lost_after_s=4) as found:
        yield found


@pytest.fixture(autouse=True)
def all_nodes(cluster: Slurm) -> Iterator[None]:
    yield
    cluster.run("scancel", "--state=RUNNING", "--full", "--signal=KILL", "--user=root", check=False)
    cluster.bring_back()
    cluster.wait_until(cluster.is_idle, "all nodes idle")


@pytest.fixture(scope="module")
def whole(cluster: Slurm, site: Path, motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two nodes that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    cluster.wait(submit(cluster, site, spec_writer(motion_set, folder)("whole", **KEYS), *BY_TORCH), "COMPLETED")
    return folder / "runs/whole"


@pytest.mark.parametrize(
    "nodes, keys, now",
    [(3, "min_nodes=2", "n1 n3"), (2, "spare_nodes=1", "n1 n3"), (2, "spare_nodes=1 launcher=mpirun", "n1 n3")],
)
def test_a_lost_node_costs_seconds_and_nothing_else(cluster, site, whole, write_spec, tmp_path, nodes, keys, now):
    spec, run = write_spec(**KEYS), tmp_path / "runs/run"
    job = submit(cluster, site, spec, *BY_TORCH, *keys.split(), nodes=nodes)
    wait_for_step(cluster, job, run, 15)
    cluster.lose("n2")
    lost = time.time()
    if nodes == 2:  # and the newest checkpoint is torn
        os.truncate(max((run / "checkpoints").glob("step_*.pt")), 1000)
    assert cluster.wait(job, "COMPLETED")["Restarts"] == "0"
    (line,) = (run / "job/restarts").read_text().splitlines()
    step = int(re.search(r"from step (\d+) on 2 nodes, 2 ranks: (.*)", line)[1])  # type: ignore[index]
    assert ", without n2; " in line and line.endswith(now) and 0 < step <= 15 + 60, line
    again = next(
        record["time"] for record in records(run, "step") if record["time"] > lost and record["step"] == step + 1
    )
    print(f"{nodes} nodes, {keys}: {again - lost:.1f} s from the loss to the next step\n{line}\n{cluster.output(job)}")
    assert steps_of(run)[-1] == steps_of(whole)[-1]
    one, other = final_state(whole), final_state(run)
    if nodes == 2:
        assert_bit_equal(one, other)
    assert difference(one, other) <= 1e-12


def test_a_job_that_loses_its_script_is_requeued(cluster, site, whole, write_spec, tmp_path):
    """n1 runs the script: from n2 a step sees that it is lost."""
    spec, run = write_spec(**KEYS), tmp_path / "runs/run"
    job = submit(cluster, site, spec, *BY_TORCH, "spare_nodes=1")
    wait_for_step(cluster, job, run, 15)
    cluster.lose("n1")
    cluster.wait_until(lambda: cluster.show(job)["Restarts"] == "1", "the requeue")
    cluster.bring_back()
    cluster.wait(job, "COMPLETED")
    line = f" job {job}: requeued, as n1, where its script ran, is lost\n"
    assert (run / "job/restarts").read_text().endswith(line) and line in cluster.output(job)
    assert_bit_equal(final_state(whole), final_state(run))
