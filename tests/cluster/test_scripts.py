"""The job scripts are run: launchers and trainer are stand-ins, bash and the signals are real."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from summit_train.cluster.job import Job, facts, render
from summit_train.cluster.site import load_site
from summit_train.core.files import write_json
from tests.standins import Standins
from tests.worlds import PATIENCE_S, until

HOSTILE = [
    "a b; $(touch x) \"'",
    "`touch x`$(touch x)${HOME}",
    "-rf *",
    "--wrap=touch x",
    "%j%J%%x%",
    "a\n#BSUB -J other\n#SBATCH --job-name=other\n#PBS -N other\n# flux: -n 9\ntouch x\n",
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
    "hydra": ("pbs_generic", ()),
    "pals": ("aurora", ("modules=[]", "account=abc123")),
    "flux": ("flux_generic", ()),
    "local": ("local", ("launcher=mpirun", "launcher_options=[{option: --oversubscribe, why: w}]")),
    "ranks": ("local", ()),
}
LAUNCHERS = {
    "summit": "jsrun", "lsf": "mpirun", "srun": "srun", "mpirun": "mpirun", "local": "mpirun", "hydra": "hydra",
    "pals": "pals", "flux": "flux run",
}  # fmt: skip
NEW_JOBS = ("hydra", "pals", "flux")  # where a new job goes on
# What the job keeper fills in, or bash; the golden scripts have the other options.
FILLED = {
    "summit": {"-n": "2", "-a": "6"},
    "lsf": {"-np": "8", "--hostfile": "/hosts"},
    "srun": {"--nodes": "2", "--nodelist": "n1,n2", "--ntasks": "8"},
    "mpirun": {"-np": "8", "--hostfile": "{run}/job/hosts"},
    "local": {"-np": "2", "-x": "PATH SUMMIT_TRAIN_SECRET OMP_NUM_THREADS"},
    "hydra": {"-n": "8", "-f": "{run}/job/hosts"},
    "pals": {"-n": "24", "--hostfile": "{run}/job/hosts"},
    "flux": {"--nodes": "2", "--ntasks": "8", "--requires": "host:n1,n2"},
}
ONE_A_NODE = {
    "jsrun": {"-n": "2", "-r": "1", "-a": "1"},
    "srun": {"--nodes": "2", "--ntasks": "2", "--ntasks-per-node": "1"},
    "mpirun": {"-np": "2", "--map-by": "ppr:1:node"},
    "hydra": {"-n": "2", "-ppn": "1"},
    "flux run": {"--nodes": "2", "--ntasks": "2"},
}
SCHEDULERS = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1",
    "LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": "/hosts", "PBS_JOBID": "7", "STANDIN_FLUX_JOB": "f7",
}  # fmt: skip


def prepared(standins: Standins, site: str, run: Path, keys: tuple[str, ...] = (), **more: object) -> tuple[str, Path]:
    """(script, run) of a job whose Python is the stand-in trainer."""
    python = standins.program("trainer", standins.folder / "a venv/bin/python")
    workdir = standins.folder / f"work {run.name}"
    workdir.mkdir(exist_ok=True)
    name, overrides = SITES[site]
    if site in ("hydra", "pals"):
        standins.program(site, standins.bin / "mpiexec")
    nodes = 1 if name == "local" else 2
    values = {"runs": (run,), **more}
    job = Job(run.name, nodes=nodes, walltime_minutes=60, workdir=workdir, python=str(python), **values)  # type: ignore[arg-type]
    profile = load_site(name, (*overrides, *keys))
    script = render(profile, job)
    for one in job.runs:
        write_json(one / "job/job.json", asdict(facts(profile, job)))
        (one / "job/job.sh").write_text(script, errors="surrogateescape")
    return script, run


def started(standins: Standins, script: str, **environ: str) -> subprocess.Popen[str]:
    hosts = standins.folder / "hosts"
    if not hosts.exists():
        hosts.write_text("n1\nn2\n")
    pbs = {"PBS_NODEFILE": str(hosts), "PBS_O_WORKDIR": str(standins.folder)}
    return subprocess.Popen(
        ["bash", "-c", script],
        cwd=standins.folder,
        env=standins.environ | SCHEDULERS | pbs | environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="surrogateescape",
        start_new_session=True,
        # Tests that run in the background inherit an ignored SIGINT, which bash cannot trap; schedulers' jobs do not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run_to_end(standins: Standins, script: str, **environ: str) -> tuple[int, str]:
    """The script's exit status and output."""
    return ended_with(standins, started(standins, script, **environ))


def ended_with(standins: Standins, process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=PATIENCE_S)
    for path in standins.folder.parent.rglob("job/*7.out"):  # of scripts that open their output themselves
        output += path.read_text(errors="surrogateescape")
        path.unlink()
    return process.returncode, output


def wait_for_calls(standins: Standins, process: subprocess.Popen[str], program: str, number: int) -> None:
    """Wait until a program of a job that goes on was called so often."""
    until(lambda: len(standins.calls(program)) >= number or process.poll() is not None)
    assert process.poll() is None, process.communicate()


def stopped(
    standins: Standins, script: str, *numbers: int, does: str = "stop", state: str = "RUNNING"
) -> tuple[int, str]:
    """The script's end after signals to the script alone, in a job that squeue then calls `state`."""
    before = len(standins.calls("trainer"))
    process = started(standins, script, TRAINER=does)
    wait_for_calls(standins, process, "trainer", before + 1)
    (standins.folder / "squeue").write_text(f"{state}\n")
    for number in numbers or (signal.SIGUSR2,):
        process.send_signal(number)
    return ended_with(standins, process)


@pytest.mark.parametrize("site", LAUNCHERS)
def test_the_launcher_gets_what_the_site_says(standins, tmp_path, site):
    script, run = prepared(standins, site, tmp_path / "run")
    status, output = run_to_end(standins, script)
    assert (status, output.count("\n")) == (0, 2) and output.endswith(f": done, {run}\n"), output
    assert (run / "job/done").exists()
    (call,) = standins.calls(LAUNCHERS[site])
    assert call["options"].items() >= {name: value.format(run=run) for name, value in FILLED[site].items()}.items()
    status, output = run_to_end(standins, script)  # a run that is done is not run again
    assert (status, len(standins.calls("trainer"))) == (0, 1)
    assert output.endswith(f"{run} is done already\n")


@pytest.mark.parametrize(
    ("site", "name"),
    [
        *itertools.product(("summit", "srun", "hydra"), HOSTILE),
        *itertools.product(("local", "flux"), (HOSTILE[0], HOSTILE[5])),
    ],
)
def test_hostile_names_break_and_run_nothing(standins, tmp_path, site, name):
    script, run = prepared(standins, site, tmp_path / "runs" / name)
    status, output = run_to_end(standins, script)
    assert status == 0, output
    (call,) = standins.calls("trainer")
    assert call["words"] == ["-m", "summit_train", "train", f"{run}/job/spec.yaml"]
    assert call["folder"] == str(standins.folder / f"work {name}")
    assert (run / "job/done").exists() and list(tmp_path.rglob("x")) == []
    # The scheduler sees directives as lines: those of a plain name, but for the job's own name.
    plain, _ = prepared(standins, site, tmp_path / "runs/plain")
    assert _directives(script) == _directives(plain)


def _directives(script: str) -> list[str]:
    name = r"#(BSUB -J |SBATCH --job-name=|PBS -N | flux: --job-name=)[\w.-]+"
    starts = ("#BSUB", "#SBATCH", "#PBS", "# flux:")
    return [line for line in script.splitlines() if line.startswith(starts) and not re.fullmatch(name, line)]


@pytest.mark.parametrize("site", ["summit", "lsf", "srun", "mpirun", "hydra", "flux"])
def test_staging_is_once_a_node_then_training_reads_there(standins, tmp_path, site):
    packed = (Path("/packed/$(touch x) train"), Path("/packed/val"))
    script, run = prepared(standins, site, tmp_path / "run", stage=packed)
    status, output = run_to_end(standins, script, USER="me")
    assert status == 0, output
    staged = {"summit": "/mnt/bb/me"}.get(site, "/tmp") + "/summit_train_" + ("f7" if site == "flux" else "7")
    assert [call["words"][2:] for call in standins.calls("trainer")] == [
        *(["data", "stage", str(path), staged] for path in packed),
        ["train", f"{run}/job/spec.yaml", f"data.stage='{staged}'"],
    ]
    launcher = "srun" if site == "mpirun" else LAUNCHERS[site]
    first, *_, last = standins.calls(launcher)
    assert first["options"].items() >= ONE_A_NODE[launcher].items()
    assert last["command"] == ["rm", "-rf", "--", staged]


@pytest.mark.parametrize(
    ("site", "stage", "environ", "status"),
    [("srun", (Path("/packed"),), {"STAGING_ENDS": "4"}, 4), ("summit", (), {"TRAINER": "fail"}, 3)],
)
def test_staging_or_training_that_fails_twice_ends_the_job(standins, tmp_path, site, stage, environ, status):
    script, run = prepared(standins, site, tmp_path / "run", stage=stage)
    ended, output = run_to_end(standins, script, **environ)
    assert ended == status and output.endswith(f"failed with exit status {status}; not started again\n")
    assert len(standins.calls("trainer")) == 2 and not (run / "job/done").exists()


def test_a_job_of_this_machine_starts_its_ranks_itself(standins, tmp_path):
    packed = Path("/packed/$(touch x)")
    script, run = prepared(standins, "ranks", tmp_path / "$(touch x)", ("node_local=/tmp",), stage=(packed,))
    status, output = run_to_end(standins, script)
    assert status == 0, output
    staging, training = standins.calls("trainer")
    assert staging["words"][2:5] == ["data", "stage", str(packed)]
    words = ["train", f"{run}/job/spec.yaml", f"data.stage='{staging['words'][5]}'", "--ranks", "2"]
    assert training["words"][2:] == words


# mpirun, srun and jsrun each pass the signal on in their own way, which tests with the real ones show; here the
# stand-ins of mpirun and srun become the trainer, so that the script's signal reaches it.
@pytest.mark.parametrize("site", ["lsf", "srun", "mpirun"])
def test_the_warning_reaches_the_ranks_and_the_job_is_requeued(standins, tmp_path, site):
    """However often the signal comes."""
    script, run = prepared(standins, site, tmp_path / "run")
    status, output = stopped(standins, script, *[signal.SIGUSR2] * 5)
    assert status == 85 and "SIGUSR2: the ranks must stop, with a checkpoint" in output, output
    assert output.endswith("stopped at step 8; requeued, 1 of 20 requeues\n")
    assert (run / "job/requeues").read_text() == "7 step 8\n"
    if site != "lsf":
        assert [call["words"] for call in standins.calls("scontrol")] == [["requeue", "7"]]


RECORD = "stand ins/record"
AGAIN = "at step 8; the scheduler has requeued it, and starts it again\n"
CANCELLED = "at step 8; submit it again to continue\n"
USR2 = signal.SIGUSR2
TERM = signal.SIGTERM


@pytest.mark.parametrize(
    ("site", "does", "number", "files", "status", "last"),
    [
        ("srun", "stop as another", USR2, {}, 85, "stopped at step 8; requeued, 1 of 20 requeues\n"),
        ("srun", "stop without a step", USR2, {}, 1, "at step 0 without a new step or score since its start; not st"),
        ("srun", "stop without a step", USR2, {"run/eval.json": "{}"}, 85, "1 of 20 requeues\n"),  # the report is left
        ("srun", "stop after the result", USR2, {}, 0, "job 7: done, "),
        ("srun", "stop", TERM, {}, 143, CANCELLED),
        ("srun", "stop", signal.SIGINT, {}, 143, CANCELLED),
        ("srun", "stop", TERM, {RECORD: "JobId=7 Restarts=0 PreemptTime=None\n"}, 143, CANCELLED),
        # Without a grace time, Slurm counts the restart before it ends the job; later versions set both.
        ("srun", "stop", TERM, {RECORD: "JobId=7 Restarts=1 PreemptTime=None\n"}, 143, AGAIN),
        ("srun", "stop", TERM, {RECORD: "JobId=7 Restarts=1 PreemptTime=2026-11-28T07:09:20\n"}, 143, AGAIN),
        ("lsf", "stop", USR2, {"run/job/last_job": "8\n"}, 0, "at step 8; the next job of the chain goes on\n"),
        ("lsf", "stop", USR2, {"run/job/last_job": "7\n"}, 85, "1 of 20 requeues\n"),
        ("ranks", "stop", USR2, {}, 85, "stopped at step 8; submit it again to continue\n"),
    ],
)
def test_how_a_job_that_is_stopped_ends(standins, tmp_path, site, does, number, files, status, last):
    script, run = prepared(standins, site, tmp_path / "run")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    ended, output = stopped(standins, script, number, does=does)
    assert ended == status and last in output.splitlines(keepends=True)[-1], output
    is_requeued = last.endswith("requeues\n")
    assert (run / "job/requeues").exists() == is_requeued
    assert bool(standins.calls("scontrol")) == (is_requeued and site == "srun")


def test_a_job_that_is_ending_is_not_requeued(standins, tmp_path):
    script, _ = prepared(standins, "srun", tmp_path / "run")
    status, output = stopped(standins, script, state="COMPLETING")
    assert status == 1 and "Slurm calls it COMPLETING, so it is not requeued here" in output
    assert not standins.calls("scontrol")


def test_a_job_that_scored_videos_is_requeued_as_one_that_made_steps(standins, tmp_path):
    """Twice: the second one finds scores of the first."""
    script, _ = prepared(standins, "srun", tmp_path / "run")
    for does, status in (("stop in the evaluation", 85),) * 2 + (("stop without a step", 1),):
        assert stopped(standins, script, does=does)[0] == status


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_preemptions_are_counted_apart_from_requeues(standins, tmp_path, number):
    """Within the grace time, as a real Slurm 22.05 was seen to say it."""
    script, run = prepared(standins, "srun", tmp_path / "run", max_requeues=1)
    others = "JobId=8 Restarts=0 PreemptTime=None\n"
    (standins.folder / "record").write_text(f"{others}JobId=7 Restarts=0 PreemptTime=2026-11-28T07:09:20\n")
    for former, ended, said in (
        (0, 85, "stopped at step 8; requeued, 1 of 10 preemptions\n"),
        (9, 85, "; requeued, 10 of 10 preemptions\n"),
        (10, 1, "after 10 preemptions, no more are allowed"),
    ):
        (run / "job/preemptions").write_text("7 step 1\n" * former)
        status, output = stopped(standins, script, number)
        assert status == ended and said in output
        assert len((run / "job/preemptions").read_text().splitlines()) == former + (ended == 85)
    assert not (run / "job/requeues").exists()


def test_requeues_are_bounded(standins, tmp_path):
    script, run = prepared(standins, "lsf", tmp_path / "run", max_requeues=2)
    ends = [stopped(standins, script) for _ in range(3)]
    assert [status for status, _ in ends] == [85, 85, 1]
    assert (run / "job/requeues").read_text().splitlines() == ["7 step 8", "7 step 9"]
    last = "stopped at step 10 after 2 requeues, no more are allowed; submit it again to continue\n"
    assert ends[2][1].endswith(last)


def test_a_requeue_that_ends_the_jobs_processes_counts(standins, tmp_path):
    """Slurm ends them at once, `scontrol` and the script among them."""
    (standins.bin / "scontrol").write_text(
        '#!/bin/sh\n[ "$1" != show ] || exec echo n1 n2\n[ "$1" = requeue ] || exit 0\nkill -TERM $$ $PPID\nsleep 0.1\n'
    )
    script, run = prepared(standins, "srun", tmp_path / "run")
    status, output = stopped(standins, script)
    assert status == 85 and output.endswith("stopped at step 8; requeued, 1 of 20 requeues\n"), output
    assert (run / "job/requeues").read_text() == "7 step 8\n"


@pytest.mark.parametrize("site", ["srun", *NEW_JOBS])
def test_a_requeue_that_is_refused_is_named(standins, tmp_path, monkeypatch, site):
    """Though squeue did not answer either."""
    script, run = prepared(standins, site, tmp_path / "run")
    monkeypatch.setenv("STANDIN_REFUSES", "would exceed the queue's limit")
    status, output = stopped(standins, script)
    why = "refused (exit status 97): would exceed the queue's limit; submit it again to continue\n"
    assert status == 1 and output.endswith(why) and "not requeued: " in output
    assert not (run / "job/requeues").read_text()
    assert len(standins.calls("scontrol")) == (site == "srun")


@pytest.mark.parametrize("site", ["summit", "srun"])
def test_an_arrays_index_chooses_the_run(standins, tmp_path, site):
    runs = tuple(tmp_path / f"runs/{name}" for name in ("a", HOSTILE[0], HOSTILE[5]))
    script, _ = prepared(standins, site, tmp_path / "array", runs=runs)
    for index, run in enumerate(runs, 1):
        ids = {"LSB_JOBINDEX": str(index), "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(index)}
        assert run_to_end(standins, script, **ids) == (0, "")
        assert standins.calls("trainer")[-1]["words"][3] == f"{run}/job/spec.yaml"
        assert (run / f"job/7_{index}.out").read_text().endswith(f": done, {run}\n")


@pytest.mark.parametrize("site", NEW_JOBS)
def test_a_job_that_is_warned_hands_over_to_a_new_one(standins, tmp_path, site):
    """PBS and Flux requeue nothing for a user. The new job is recorded in the place of the old one."""
    script, run = prepared(standins, site, tmp_path / "run", max_requeues=1)
    own, new = ("f7", "fA101") if site == "flux" else ("7", "101.pbs")
    (run / "job/submitted.jsonl").write_text(f'{{"id": "6"}}\n{{"id": "{own}", "nodes": 2}}\n')
    (run / "job/last_job").write_text(f"{own}\n")
    status, output = stopped(standins, script)
    assert status == 85 and output.endswith(f"job {new} continues\n"), output
    (job,) = standins.jobs()
    assert job["script"] == script and f"afterany:{own}" in " ".join(job["options"].values())
    assert (run / "job/submitted.jsonl").read_text().endswith(f'{{"id": "{new}", "nodes": 2}}\n')
    assert (run / "job/last_job").read_text() == f"{new}\n"
    # By its name a job knows whether it is the chain's last: it goes on after itself, or may not.
    (run / "job/last_job").write_text(f"{own}\n")
    status, output = stopped(standins, script)
    assert status == 1 and "after 1 requeues, no more are allowed" in output and len(standins.jobs()) == 1


def test_a_pbs_job_warns_itself_before_its_walltime(standins, tmp_path):
    script, _ = prepared(standins, "hydra", tmp_path / "run", keys=("warning_seconds=3597",))
    status, output = run_to_end(standins, script, TRAINER="stop")
    assert status in (1, 85)  # 1: on a busy machine, before the ranks could hear it
    assert "job 7: SIGUSR2: the ranks must stop, with a checkpoint" in output


@pytest.mark.parametrize(
    ("site", "command"), [("summit", "bsub"), ("srun", "sbatch"), ("hydra", "qsub"), ("flux", "flux batch")]
)
def test_a_script_that_is_started_by_hand_says_so(standins, tmp_path, site, command):
    script, run = prepared(standins, site, tmp_path / "run")
    done = subprocess.run(["bash", "-c", script], env=standins.environ, capture_output=True, text=True)
    assert done.returncode != 0 and f"this is a job script, for {command}" in done.stderr
    assert os.listdir(run) == ["job"] and sorted(os.listdir(run / "job")) == ["job.json", "job.sh"]


@pytest.mark.parametrize(
    "line",
    [
        "jsrun -n 2 -z 1 true", "jsrun -n two true", "srun --mpi=pmi9 true", "mpirun -np 2", "bsub -W 2h",
        "jskill all", "bjobs", "qselect -u me", "qsub -l nodes=2", "qsub -J 1-2 job.sh",
        "qsub -W depend=afterany:7[2].pbs job.sh", "flux run -z true", "flux batch --setattr",
        "flux --parent batch job.sh",
    ],
)  # fmt: skip
def test_the_stand_ins_do_check(standins, line):
    done = subprocess.run(line.split(), env=standins.environ, capture_output=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 97 and done.stderr, done.stdout


def test_directives_outside_the_head_count_for_bsub(standins):
    """The stand-in reads #BSUB wherever it stands, as bsub does: else the hostile names would prove nothing."""
    script = "#!/bin/bash\n#BSUB -J a\nname='\n#BSUB -P other\n'\n"
    done = subprocess.run(["bsub"], env=standins.environ, input=script, capture_output=True, text=True)
    assert done.stdout == "Job <101> is submitted to queue <batch>.\n"
    assert standins.jobs()[0]["options"] == {"-J": "a", "-P": "other"}
