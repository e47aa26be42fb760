"""The whole way of a job on PBS and Flux, with real training: submit, the warning, a checkpoint, a new job, the end.

There is no PBS and no Flux here. Their programs are stand-ins (tests/standin_programs.py) that check what they are
given and start the ranks with the variables of the real launchers. What a scheduler does with a job is done by the
test.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from summit_train.__main__ import main
from tests.conftest import WriteSpec, made_once, spec_writer
from tests.runs import assert_bit_equal, final_state, steps_of
from tests.slurm import first_job
from tests.standins import Standins, start_flux_job, start_pbs_job, warn
from tests.worlds import PATIENCE_S, ROOT, forked, train

NAME = "a b; $(touch x)"
IDS = {"pbs": "{}.pbs", "flux": "fA{}"}
START = {"pbs": start_pbs_job, "flux": start_flux_job}
STATES = {"pbs": ("qselect", "{} Q\n"), "flux": ("jobs", "{} DEPEND\n")}


def _standins(folder: Path, scheduler: str, launcher: str) -> Standins:
    standins = Standins(folder, *(("flux",) if scheduler == "flux" else ("qsub", "qselect", "pbsnodes")))
    if scheduler == "pbs":
        standins.program({"mpiexec": "hydra"}.get(launcher, launcher), standins.bin / "mpiexec")
    # The ranks meet at a port made from the job's number: one that no test beside this one has.
    (standins.folder / "first_job").write_text(str(first_job()))
    return standins


@pytest.fixture(scope="module")
def whole(motion_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""

    def make(folder: Path) -> None:
        train(2, spec_writer(motion_set, folder)("whole", schedule={"epochs": 6}))

    return made_once(tmp_path_factory, "resubmitted", make) / "runs/whole"


@pytest.mark.slow
@pytest.mark.parametrize(("scheduler", "launcher"), [("pbs", "pals"), ("pbs", "mpiexec"), ("flux", "flux")])
def test_a_job_that_the_walltime_ends_goes_on_as_a_new_one(
    write_spec: WriteSpec, tmp_path: Path, whole: Path, scheduler: str, launcher: str
) -> None:
    standins = _standins(tmp_path / "standins", scheduler, launcher)
    spec, run = write_spec(NAME, schedule={"epochs": 6}), tmp_path / "runs" / NAME
    profile = tmp_path / "site.yaml"
    profile.write_text(
        f"name: small\nextends: {ROOT}/configs/sites/{scheduler}_generic.yaml\nlauncher: {launcher}\n"
        "gpus_per_node: 0\nranks_per_node: 2\ncores_per_node: 2\n"
    )

    def work() -> int:
        os.environ.update(standins.environ)
        return main(["submit", str(spec), "--site", str(profile), "--nodes", "1", "--walltime", "1:00"])

    first, second = (IDS[scheduler].format(number) for number in (first_job(), first_job() + 1))
    status, said = forked(0, work)
    assert (status, f": job {first} submitted" in said) == (0, True), said
    (job,) = standins.jobs()
    assert job["folder"] == str(run / "job")
    output = run / f"job/{first}.out"

    process = START[scheduler](standins, job, STANDIN_RANKS="yes")
    deadline = time.monotonic() + PATIENCE_S
    while len(steps_of(run)) < 3:
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.02)
    if scheduler == "flux":
        warn(process)  # as --signal wants it
    else:
        os.kill(process.pid, 12)  # as the script's own timer does
    assert process.wait(timeout=PATIENCE_S) == 85, output.read_text()
    stopped = int(sorted((run / "checkpoints").glob("*.pt"))[-1].stem[5:])
    assert 3 <= stopped < 60
    assert (run / "job/requeues").read_text() == f"{first} step {stopped}\n"
    _, again = standins.jobs()
    waits = {"pbs": ("-W", f"depend=afterany:{first}"), "flux": ("--dependency", f"afterany:{first}")}[scheduler]
    assert dict([waits]).items() <= again["options"].items() and again["script"] == job["script"]
    assert again["folder"] == job["folder"]
    assert not (ROOT / "x").exists() and not (run / "job/x").exists()

    # The new job is known: nobody submits the run twice.
    lines = [json.loads(line) for line in (run / "job/submitted.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [first, second]
    file, form = STATES[scheduler]
    (standins.folder / file).write_text(form.format(second))
    status, said = forked(0, work)
    assert (status, f"job {second} is queued; wait for it" in said) == (2, True), said

    assert START[scheduler](standins, again, STANDIN_RANKS="yes").wait(timeout=PATIENCE_S) == 0
    text = (run / f"job/{second}.out").read_text()
    assert f"from step {stopped} on 1 node, 2 ranks" in text and text.endswith(f"job {second}: done, {run}\n")
    assert steps_of(run) == list(range(1, 61))  # none twice, none left out
    assert_bit_equal(final_state(run), final_state(whole))
