"""The job scripts are run: launchers and trainer are stand-ins, bash and the signals are real."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from summit_train.cluster.job import Job, render
from summit_train.cluster.site import load_site
from tests.standins import Standins
from tests.worlds import PATIENCE_S

HOSTILE = [
    "a b; $(touch x) \"'",
    "`touch x`$(touch x)${HOME}",
    "-rf *",
    "--wrap=touch x",
    "%j%J%%x%",
    "a\n#BSUB -J other\n#SBATCH --job-name=other\ntouch x\n",
    "' || touch x #",
    '"; touch x; "',
    "\\'\\\n",
    "Größe 視頻\t!",
]
SITES = {
    "summit": ("summit", ()),
    "lsf": ("lsf_generic", ()),
    "srun": ("slurm_v100", ()),
    "mpirun": ("slurm_v100", ("launcher=mpirun", "launcher_options=[]")),
    "local": ("local", ()),
}
LAUNCHERS = {"summit": "jsrun", "lsf": "mpirun", "srun": "srun", "mpirun": "mpirun", "local": "mpirun"}
OPTIONS = {
    "summit": {"-n": "2", "-r": "1", "-g": "6", "-a": "6", "-c": "42", "-b": "packed:7", "--smpiargs": "-gpu"},
    "lsf": {"-np": "8", "--map-by": "ppr:4:node:PE=8", "--bind-to": "core", "--hostfile": "/hosts", "-x": "NCCL_DEBUG"},
    "srun": {
        "--nodes": "2", "--ntasks": "8", "--ntasks-per-node": "4", "--kill-on-bad-exit": "1", "--cpu-bind": "cores",
        "--mpi": "pmix",
    },
    "mpirun": {"-np": "8", "--map-by": "ppr:4:node:PE=10", "--bind-to": "core", "-x": "NCCL_DEBUG"},
    "local": {
        "-np": "2", "--map-by": "ppr:2:node", "--bind-to": "none", "--oversubscribe": "", "-x": "OMP_NUM_THREADS",
    },
}  # fmt: skip
ONE_A_NODE = {
    "jsrun": {"-n": "2", "-r": "1", "-a": "1"},
    "srun": {"--nodes": "2", "--ntasks": "2", "--ntasks-per-node": "1"},
    "mpirun": {"-np": "2", "--map-by": "ppr:1:node"},
}
SCHEDULERS = {"SLURM_JOB_ID": "7", "LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": "/hosts"}


@dataclass
class Done:
    """A script that ended: what it left and said."""

    status: int
    output: str
    run: Path


@pytest.fixture
def standins(tmp_path: Path) -> Standins:
    return Standins(tmp_path / "stand ins")


def _job(standins: Standins, site: str, run: Path, **more: object) -> tuple[str, Path]:
    """(script, run) of a job whose Python is the stand-in trainer."""
    (run / "job").mkdir(parents=True, exist_ok=True)
    python = standins.program("trainer", standins.folder / "a venv/bin/python")
    workdir = standins.folder / f"work {run.name}"
    workdir.mkdir(exist_ok=True)
    name, overrides = SITES[site]
    if site == "local":
        overrides = ("launcher_options=[{option: --oversubscribe, why: w}]",)
    nodes = 1 if site == "local" else 2
    job = Job(run.name, (run,), nodes, 60, workdir, str(python), **more)  # type: ignore[arg-type]
    return render(load_site(name, overrides), job), run


def _start(standins: Standins, script: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "-c", script],
        cwd=standins.folder,
        env=standins.environ | SCHEDULERS | environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="surrogateescape",
        start_new_session=True,
        # Tests that run in the background inherit an ignored SIGINT, which bash cannot trap; schedulers' jobs do not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _finish(process: subprocess.Popen[str], run: Path) -> Done:
    output, _ = process.communicate(timeout=PATIENCE_S)
    return Done(process.returncode, output, run)


def _wait_for_trainer(standins: Standins) -> None:
    """Until the trainer is there to be signalled."""
    deadline = time.monotonic() + PATIENCE_S
    while not standins.calls("trainer"):
        assert time.monotonic() < deadline, "the trainer was not started"
        time.sleep(0.02)


@pytest.mark.parametrize("site", SITES)
def test_the_launcher_gets_what_the_site_says(standins: Standins, tmp_path: Path, site: str) -> None:
    done = _finish(_start(standins, *_job(standins, site, tmp_path / "run")[:1]), tmp_path / "run")
    assert (done.status, done.output.count("\n")) == (0, 2), done.output
    assert done.output.endswith(f": done, {done.run}\n")
    assert (done.run / "job/done").exists()
    launched = standins.calls(LAUNCHERS[site])
    assert [call["options"] for call in launched] == [OPTIONS[site]]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("site", ["summit", "srun", "local"])
def test_hostile_names_break_and_run_nothing(standins: Standins, tmp_path: Path, site: str, name: str) -> None:
    script, run = _job(standins, site, tmp_path / "runs" / name)
    done = _finish(_start(standins, script), run)
    assert done.status == 0, done.output
    (call,) = standins.calls("trainer")
    assert call["words"] == ["-m", "summit_train", "train", f"{run}/job/spec.yaml"]
    assert call["folder"] == str(standins.folder / f"work {name}")
    assert (run / "job/done").exists()
    assert list(tmp_path.rglob("x")) == []
    # The scheduler sees directives as lines: those of a plain name, but for the job's own name.
    plain, _ = _job(standins, site, tmp_path / "runs/plain")
    assert _directives(script) == _directives(plain)


def _directives(script: str) -> list[str]:
    lines = [line for line in script.splitlines() if line.startswith(("#BSUB", "#SBATCH"))]
    return [line for line in lines if not re.fullmatch(r"#(BSUB -J |SBATCH --job-name=)[\w.-]+", line)]


@pytest.mark.parametrize("site", ["summit", "lsf", "srun", "mpirun"])
def test_staging_is_once_a_node_then_training_reads_there(standins: Standins, tmp_path: Path, site: str) -> None:
    packed = (Path("/packed/$(touch x) train"), Path("/packed/val"))
    script, run = _job(standins, site, tmp_path / "run", stage=packed)
    done = _finish(_start(standins, script, USER="me"), run)
    assert done.status == 0, done.output
    staged = {"summit": "/mnt/bb/me"}.get(site, "/tmp") + "/summit_train_7"
    assert [call["words"][2:] for call in standins.calls("trainer")] == [
        *(["data", "stage", str(path), staged] for path in packed),
        ["train", f"{run}/job/spec.yaml", f"data.stage='{staged}'"],
    ]
    each_node = standins.calls(LAUNCHERS[site])[0]["options"]
    assert each_node.items() >= ONE_A_NODE[LAUNCHERS[site]].items()
    # The copy is taken away again, on every node.
    assert standins.calls(LAUNCHERS[site])[-1]["command"] == ["rm", "-rf", "--", staged]


def test_staging_that_fails_starts_no_training(standins: Standins, tmp_path: Path) -> None:
    script, run = _job(standins, "srun", tmp_path / "run", stage=(Path("/packed"),))
    done = _finish(_start(standins, script, STAGING_ENDS="4"), run)
    assert done.status == 4
    assert done.output.endswith("staging ended with exit status 4; not started again\n")
    assert len(standins.calls("trainer")) == 1


def _stopped(standins: Standins, script: str, run: Path, number: int = signal.SIGUSR2, does: str = "stop") -> Done:
    """The script's end after a signal to the script alone."""
    before = len(standins.calls("trainer"))
    (standins.folder / "squeue").write_text("RUNNING\n")
    process = _start(standins, script, TRAINER=does)
    while len(standins.calls("trainer")) == before:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(number)
    return _finish(process, run)


# mpirun, srun and jsrun each pass the signal on in their own way, which tests with the real ones show; here the
# stand-ins of mpirun and srun become the trainer, so that the script's signal reaches it.
@pytest.mark.parametrize("site", ["lsf", "srun", "mpirun"])
def test_the_warning_reaches_the_ranks_and_the_job_is_requeued(standins: Standins, tmp_path: Path, site: str) -> None:
    script, run = _job(standins, site, tmp_path / "run")
    done = _stopped(standins, script, run)
    assert done.status == 85, done.output
    assert "SIGUSR2, the ranks are asked for a checkpoint" in done.output
    assert "stopped at step 8" in done.output and "1 of 20" in done.output
    assert (run / "job/requeues").read_text() == "7 step 8\n"
    if site != "lsf":
        assert [call["words"] for call in standins.calls("scontrol")] == [["requeue", "7"]]


def test_a_launcher_that_hides_the_status_hides_no_stop(standins: Standins, tmp_path: Path) -> None:
    script, run = _job(standins, "srun", tmp_path / "run")
    assert _stopped(standins, script, run, does="stop as another").status == 85


def test_a_job_without_a_new_step_is_not_requeued(standins: Standins, tmp_path: Path) -> None:
    script, run = _job(standins, "srun", tmp_path / "run")
    done = _stopped(standins, script, run, does="stop without a step")
    assert done.status == 1
    assert "stopped at step 0 without a new step or score since its start; not started again" in done.output
    assert standins.calls("scontrol") == []


def test_a_job_that_scored_videos_is_requeued_as_one_that_made_steps(standins: Standins, tmp_path: Path) -> None:
    """Twice: the second one finds scores of the first."""
    script, run = _job(standins, "srun", tmp_path / "run")
    for _ in range(2):
        assert _stopped(standins, script, run, does="stop in the evaluation").status == 85
    assert _stopped(standins, script, run, does="stop without a step").status == 1


def test_requeues_are_bounded(standins: Standins, tmp_path: Path) -> None:
    script, run = _job(standins, "lsf", tmp_path / "run", max_requeues=2)
    assert [_stopped(standins, script, run).status for _ in range(3)] == [85, 85, 1]
    assert (run / "job/requeues").read_text().splitlines() == ["7 step 8", "7 step 9"]
    assert _stopped(standins, script, run).output.endswith(
        "stopped at step 11 after 2 requeues, no more are allowed; submit it again to go on\n"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_cancels_gets_a_checkpoint_and_no_requeue(standins: Standins, tmp_path: Path, number: int) -> None:
    script, run = _job(standins, "srun", tmp_path / "run")
    done = _stopped(standins, script, run, number)
    assert done.status == 143
    assert "at step 8; submit it again to go on" in done.output
    assert standins.calls("scontrol") == [] and not (run / "job/requeues").exists()


def test_a_job_that_slurm_is_ending_is_not_requeued(standins: Standins, tmp_path: Path) -> None:
    script, run = _job(standins, "srun", tmp_path / "run")
    process = _start(standins, script, TRAINER="stop")
    _wait_for_trainer(standins)
    (standins.folder / "squeue").write_text("COMPLETING\n")
    process.send_signal(signal.SIGUSR2)
    done = _finish(process, run)
    assert (done.status, standins.calls("scontrol")) == (1, [])
    assert "Slurm calls it COMPLETING, so it is not requeued here" in done.output


def test_a_requeue_that_slurm_refuses_is_said(
    standins: Standins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, run = _job(standins, "srun", tmp_path / "run")
    monkeypatch.setenv("STANDIN_REFUSES", "Requested operation is presently disabled")
    done = _stopped(standins, script, run)
    assert done.status == 1
    assert done.output.endswith("Slurm did not take it back; submit it again to go on\n")
    assert len(standins.calls("scontrol")) == 1  # though squeue did not answer


def test_two_signals_are_one_wish(standins: Standins, tmp_path: Path) -> None:
    script, run = _job(standins, "lsf", tmp_path / "run")
    process = _start(standins, script, TRAINER="stop")
    _wait_for_trainer(standins)
    for _ in range(5):
        process.send_signal(signal.SIGUSR2)
    assert _finish(process, run).status == 85


def test_a_failure_is_left_alone(standins: Standins, tmp_path: Path) -> None:
    script, run = _job(standins, "summit", tmp_path / "run")
    done = _finish(_start(standins, script, TRAINER="fail"), run)
    assert done.status == 3
    assert done.output.endswith("failed with exit status 3; not started again\n")
    assert not (run / "job/done").exists()


@pytest.mark.parametrize(
    ("trainer", "starts", "status"), [("crash once", 2, 0), ("crash", 2, 139), ("crash after a step", 1, 139)]
)
def test_one_crash_before_the_first_checkpoint_is_forgiven(
    standins: Standins, tmp_path: Path, trainer: str, starts: int, status: int
) -> None:
    script, run = _job(standins, "srun", tmp_path / "run")
    done = _finish(_start(standins, script, TRAINER=trainer), run)
    assert done.status == status
    assert len(standins.calls("trainer")) == starts
    assert done.output.count("crashed at their start (exit status 139); started once more") == starts - 1


def test_a_run_that_is_done_is_not_run_again(standins: Standins, tmp_path: Path) -> None:
    script, run = _job(standins, "summit", tmp_path / "run")
    assert _finish(_start(standins, script), run).status == 0
    again = _finish(_start(standins, script), run)
    assert (again.status, len(standins.calls("trainer"))) == (0, 1)
    assert again.output.endswith(f"{run} is done already, there is nothing to do\n")


def test_only_the_last_job_of_a_chain_requeues_itself(standins: Standins, tmp_path: Path) -> None:
    script, run = _job(standins, "lsf", tmp_path / "run")
    (run / "job/last_job").write_text("8\n")
    done = _stopped(standins, script, run)
    assert (done.status, (run / "job/requeues").exists()) == (0, False)
    assert "stopped at step 8; the next job of the chain goes on" in done.output
    (run / "job/last_job").write_text("7\n")
    assert _stopped(standins, script, run).status == 85


@pytest.mark.parametrize("site", ["summit", "srun"])
def test_an_arrays_index_chooses_the_run(standins: Standins, tmp_path: Path, site: str) -> None:
    runs = tuple(tmp_path / f"runs/{name}" for name in ("a", HOSTILE[0], HOSTILE[5]))
    for run in runs:
        (run / "job").mkdir(parents=True)
    python = standins.program("trainer", standins.folder / "bin/python")
    script = render(load_site(SITES[site][0]), Job("array", runs, 2, 60, tmp_path, str(python)))
    for index, run in enumerate(runs, 1):
        ids = {"LSB_JOBINDEX": str(index), "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(index)}
        done = _finish(_start(standins, script, **ids), run)
        assert (done.status, done.output) == (0, "")
        assert standins.calls("trainer")[-1]["words"][3] == f"{run}/job/spec.yaml"
        assert (run / f"job/7_{index}.out").read_text().endswith(f": done, {run}\n")


@pytest.mark.parametrize(("site", "message"), [("summit", "for bsub"), ("srun", "for sbatch")])
def test_a_script_that_is_started_by_hand_says_so(standins: Standins, tmp_path: Path, site: str, message: str) -> None:
    script, run = _job(standins, site, tmp_path / "run")
    environ = {name: value for name, value in standins.environ.items() if name not in SCHEDULERS}
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"this is a job script, {message}" in done.stderr
    assert json.dumps(os.listdir(run)) == '["job"]'


@pytest.mark.parametrize(
    "words",
    [["jsrun", "-n", "2", "-z", "1", "true"], ["jsrun", "-n", "two", "true"], ["srun", "--mpi=pmi9", "true"],
     ["mpirun", "-np", "2"], ["bsub", "-W", "2h"], ["jskill", "all"], ["bjobs"]],
)  # fmt: skip
def test_the_stand_ins_do_check(standins: Standins, words: list[str]) -> None:
    done = subprocess.run(words, env=standins.environ, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 97, done.stdout
    assert done.stderr


def test_directives_outside_the_head_count_for_bsub(standins: Standins) -> None:
    """The stand-in reads #BSUB wherever it stands, as bsub does: else the hostile names would prove nothing."""
    script = "#!/bin/bash\n#BSUB -J a\nname='\n#BSUB -P other\n'\n"
    done = subprocess.run(["bsub"], env=standins.environ, input=script, capture_output=True, text=True)
    assert done.stdout == "Job <101> is submitted to queue <batch>.\n"
    assert standins.jobs()[0]["options"] == {"-J": "a", "-P": "other"}
