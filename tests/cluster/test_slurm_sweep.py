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
from tests.worlds import lines

pytestmark = [pytest.mark.slow]

SWEEP = """
name: batch_size
base: base.yaml
set: {schedule.epochs: 4, scale.clips_per_gpu: 2}
grid: {scale.gpus: [4, 2]}
nodes: 1
at_once: 2
"""


@pytest.fixture
def files(write_spec: WriteSpec, tmp_path: Path) -> tuple[str, str]:
    """(sweep, site): batches of 8 and 4 clips, each on one node of two ranks."""
    write_spec("base")
    (tmp_path / "sweep_file.yaml").write_text(SWEEP)
    (tmp_path / "site.yaml").write_text(SITE.replace("ranks_per_node: 1", "ranks_per_node: 2"))
    return str(tmp_path / "sweep_file.yaml"), str(tmp_path / "site.yaml")


def _sweep(slurm: Slurm, *words: str) -> str:
    status, said = slurm.program("sweep", *words)
    assert status == 0, said
    return said


def _states(slurm: Slurm, sweep: str) -> dict[str, str]:
    values = json.loads(lines(_sweep(slurm, sweep, "--status", "--json"))[-1])
    return {run["name"]: run["state"] for run in values["runs"]}


def test_an_array_with_one_run_killed_and_then_that_one_alone(
    slurm: Slurm, files: tuple[str, str], tmp_path: Path
) -> None:
    sweep, site = files
    folder = tmp_path / "runs/batch_size"
    killed, kept = folder / "gpus-4", folder / "gpus-2"
    words = (sweep, "--site", site, "--walltime", "0:30")
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
        ("gpus-4", "done", "8", "2"), ("gpus-2", "done", "4", "2"),
    ]  # fmt: skip
    assert all(0 <= float(row["top1"]) <= 100 and 0 < float(row["training_top1"]) <= 100 for row in rows)
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    # The sweep's folder knows its runs, without the file or the site.
    assert _states(slurm, str(folder)) == {"gpus-2": "done", "gpus-4": "done"}
