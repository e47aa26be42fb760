"""`summit-train sweep` as a job array on a real Slurm: every run, the table, and what starts the second time."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from summit_train.cluster.submit import submissions
from tests.cluster.test_slurm_submit import SITE
from tests.conftest import WriteSpec
from tests.runs import steps_of
from tests.slurm import Slurm

pytestmark = [pytest.mark.slow]

SWEEP = """
name: batch_size
base: base.yaml
set: {schedule.epochs: 4, scale.clips_per_gpu: 2}
grid: {scale.gpus: [2, 4, 8]}
nodes: 1
at_once: 2
"""


@pytest.fixture
def files(write_spec: WriteSpec, tmp_path: Path) -> tuple[str, str]:
    """(sweep, site): batches of 4, 8 and 16 clips, each on one node of two ranks."""
    write_spec("base")
    (tmp_path / "sweep_file.yaml").write_text(SWEEP)
    (tmp_path / "site.yaml").write_text(SITE.replace("ranks_per_node: 1", "ranks_per_node: 2"))
    return str(tmp_path / "sweep_file.yaml"), str(tmp_path / "site.yaml")


def _sweep(slurm: Slurm, *words: str) -> str:
    done = slurm.program("sweep", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _states(slurm: Slurm, sweep: str) -> dict[str, str]:
    values = json.loads(_sweep(slurm, sweep, "--status", "--json"))
    return {run["name"]: run["state"] for run in values["runs"]}


def _ended(slurm: Slurm, sweep: str) -> bool:
    return not {"queued", "running"} & set(_states(slurm, sweep).values())


def test_an_array_with_one_run_killed_and_then_that_one_alone(
    slurm: Slurm, files: tuple[str, str], tmp_path: Path
) -> None:
    sweep, site = files
    folder = tmp_path / "runs/batch_size"
    runs = {gpus: folder / f"gpus-{gpus}" for gpus in (2, 4, 8)}
    words = (sweep, "--site", site, "--walltime", "0:30")
    with slurm.closed():
        assert "of 3 runs, 2 at once" in _sweep(slurm, *words)
        ids = {gpus: [line["id"] for line in submissions(run)] for gpus, run in runs.items()}
        array = ids[2][0].removesuffix("_1")
        assert ids == {2: [f"{array}_1"], 4: [f"{array}_2"], 8: [f"{array}_3"]}

        # While the array waits the sweep is asked for again, and starts nothing.
        again = _sweep(slurm, *words)
        assert "not started again: " in again and "job" not in again.split("not started again")[1].split("\n")[1]
        assert {len(submissions(run)) for run in runs.values()} == {1}

    # One run is killed in the middle.
    slurm.wait_until(lambda: bool(steps_of(runs[4])), "a step of the second run")
    with slurm.stopped(SLURM_ARRAY_JOB_ID=array, SLURM_ARRAY_TASK_ID="2"):
        slurm.run("scancel", "--signal=KILL", "--full", f"{array}_2")
    slurm.wait_until(lambda: _ended(slurm, sweep), "the array")
    assert _states(slurm, sweep) == {"gpus-2": "done", "gpus-4": "failed", "gpus-8": "done"}
    at = max(steps_of(runs[4]))
    assert 0 < at < 40

    # Started again: that one alone, from its checkpoint on.
    before = {gpus: (runs[gpus] / "metrics.jsonl").read_bytes() for gpus in (2, 8)}
    assert "not started again: gpus-2 (done), gpus-8 (done)\n" in _sweep(slurm, *words)
    (job,) = [line["id"] for line in submissions(runs[4])][1:]
    assert [len(submissions(runs[gpus])) for gpus in (2, 8)] == [1, 1]
    slurm.wait(job, "COMPLETED")
    assert {gpus: (runs[gpus] / "metrics.jsonl").read_bytes() for gpus in (2, 8)} == before

    # The last run that ended wrote the table and the figure: nobody asked for a status since.
    with open(folder / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["state"], row["global_batch"], row["ranks"]) for row in rows] == [
        ("gpus-2", "done", "4", "2"), ("gpus-4", "done", "8", "2"), ("gpus-8", "done", "16", "2"),
    ]  # fmt: skip
    assert all(0 <= float(row["top1"]) <= 100 and 0 < float(row["training_top1"]) <= 100 for row in rows)
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    # The sweep's folder knows its runs, without the file or the site.
    assert _states(slurm, str(folder)) == dict.fromkeys(("gpus-2", "gpus-4", "gpus-8"), "done")
