"""Handing jobs to a scheduler, and asking it about them; sbatch, squeue, bsub and bjobs are stand-ins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from summit_train.cluster.job import Job, render
from summit_train.cluster.scheduler import environment_outside
from summit_train.cluster.site import Site, load_site
from summit_train.cluster.submit import chain, job_states, prepare_job, record, submissions, write_job
from summit_train.core.errors import RunFailed, UserError
from summit_train.spec import Spec, load_spec
from tests.conftest import WriteSpec

SLURM, SUMMIT, LSF = (load_site(name) for name in ("slurm_generic", "summit", "lsf_generic"))
PBS, FLUX = load_site("pbs_generic"), load_site("flux_generic")


@pytest.fixture
def spec(write_spec: WriteSpec) -> Spec:
    return load_spec(write_spec("a b; $(touch x)"))


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """The folders of two runs, of an array."""
    return [tmp_path / "runs" / name for name in ("one", "two")]


def _job(spec: Spec, runs: Sequence[Path] = ()) -> Job:
    return Job(spec.name, tuple(runs) or (spec.run_path,), 2, 60, spec.run_path.parent, "/venv/bin/python")


def _written(spec: Spec, site: Site) -> tuple[Job, Path]:
    job = _job(spec)
    return job, write_job(site, job, render(site, job), [spec])


def test_the_run_directory_gets_spec_and_script(spec):
    folder = spec.run_path / "job"
    folder.mkdir(parents=True)
    for mark in ("done", "requeues", "last_job", "submitted.jsonl", "7.out"):
        (folder / mark).touch()
    _, script = _written(spec, SLURM)
    assert script == folder / "job.sh"
    assert load_spec(folder / "spec.yaml") == spec
    # Marks of an earlier submission would end or bound this one; its record and its output stay.
    assert {path.name for path in folder.iterdir()} == {"job.sh", "job.json", "spec.yaml", "submitted.jsonl", "7.out"}


def test_an_array_has_its_script_apart_from_its_runs(spec, runs, tmp_path):
    specs = [spec.model_copy(update={"name": run.name}) for run in runs]
    script = write_job(SLURM, _job(spec, runs), "script\n", specs, tmp_path / "sweep")
    assert script == tmp_path / "sweep/job.sh" and script.read_text() == "script\n"
    assert [load_spec(run / "job/spec.yaml").name for run in runs] == ["one", "two"]
    with pytest.raises(ValueError, match=r"zip\(\)"):
        write_job(SLURM, _job(spec, runs), "", specs[:1])


@pytest.mark.parametrize(
    ("answer", "after", "words"),
    [
        ("88;cluster\n", None, ["--parsable", "job.sh"]),
        ("charged to abc123\n88\n", "4711", ["--parsable", "--dependency=afterany:4711", "job.sh"]),
    ],
)
def test_sbatch_is_called_in_the_scripts_folder(standins, spec, answer, after, words):
    """So the relative --output of the script is there, whatever characters the path has."""
    _, script = _written(spec, SLURM)
    (standins.folder / "sbatch").write_text(answer)
    assert SLURM.batch.submit(script, "srun", after) == "88"
    (call,) = standins.calls("sbatch")
    assert (call["words"], call["folder"]) == (words, str(spec.run_path / "job"))


def test_a_folder_that_slurm_misreads_is_refused():
    """It replaces %j in the whole path of a job's output, and fails to start the job."""
    message = r"^/at 50%j/job: Slurm cannot write output below a name with % or \\; change it$"
    with pytest.raises(UserError, match=message):
        SLURM.batch.words(Path("/at 50%j/job/job.sh"), "srun")


def test_an_answer_without_a_job_is_passed_on(standins, spec):
    _, script = _written(spec, SLURM)
    (standins.folder / "sbatch").write_text("welcome to the cluster\n")
    with pytest.raises(RunFailed, match="sbatch answered 'welcome to the cluster', which names no job"):
        SLURM.batch.submit(script, "srun", None)


@pytest.mark.parametrize(
    ("site", "named", "ids", "option", "after"),
    [
        (SUMMIT, True, ["101", "102", "103"], "-w", "ended({})"),
        (LSF, False, ["101", "102", "103"], "-w", "ended({})"),
        (PBS, True, ["101.pbs", "102.pbs", "103.pbs"], "-W", "depend=afterany:{}"),
        (FLUX, True, ["fA101", "fA102", "fA103"], "--dependency", "afterany:{}"),
    ],
)
def test_the_jobs_of_a_chain_wait_for_each_other_and_are_recorded(standins, spec, site, named, ids, option, after):
    """named: the command is given the script's name, or reads it from its standard input."""
    job, script = _written(spec, site)
    assert chain(site, job, script, 1) == ids[:1] and not (spec.run_path / "job/last_job").exists()
    assert chain(site, job, script, 2) == ids[1:]
    assert (spec.run_path / "job/last_job").read_text() == f"{ids[2]}\n"
    jobs = standins.jobs()
    for each in jobs:
        assert (each["script"], each["named"], each["folder"]) == (script.read_text(), named, str(script.parent))
    assert [each["options"].get(option) for each in jobs][1:] == [None, after.format(ids[1])]
    lines = submissions(spec.run_path)
    assert [line["id"] for line in lines] == ids and lines[0].pop("time") <= lines[1]["time"]
    assert lines[0] == {
        "id": ids[0],
        "site": site.name,
        "scheduler": site.scheduler,
        "script": str(script),
        "spec": str(spec.run_path / "job/spec.yaml"),
        "nodes": 2,
        "walltime_minutes": 60,
    }


@pytest.mark.parametrize(
    ("site", "file", "text", "states"),
    [
        (
            SLURM,
            "squeue",
            "1 PENDING\n2 RUNNING\n3 COMPLETING\n4_1 RUNNING\n4_2 PENDING\n5_7 PENDING\n44 RUNNING\n6 REQUEUE_HOLD\n",
            "1 queued 2 running 3 running 4 running 4_1 running 4_2 queued 4_3 gone 5 queued 6 queued 7 gone",
        ),
        (
            LSF,
            "bjobs",
            "1 0 PEND\n2 0 RUN\n4 1 RUN\n4 2 PEND\n5 7 PSUSP\n",
            "1 queued 2 running 4 running 4[1] running 4[2] queued 4[3] gone 5 queued 7 gone",
        ),
        (
            PBS,
            "qselect",
            "1.pbs Q\n2.pbs R\n3.pbs H\n6.pbs E\n",
            "1.pbs queued 2.pbs running 3.pbs queued 5.pbs gone 6.pbs running",
        ),
        (
            FLUX,
            "jobs",
            "fA1 DEPEND\nfA2 RUN\nfA3 SCHED\nfA4 CLEANUP\n",
            "fA1 queued fA2 running fA3 queued fA4 running fA5 gone",
        ),
    ],
)
def test_states_of_jobs(standins, site, file, text, states):
    (standins.folder / file).write_text(text)
    words = states.split()
    ids = words[::2]
    assert job_states(site, ids) == dict(zip(ids, words[1::2], strict=True))
    (standins.folder / file).unlink()
    assert job_states(site, ids[:1]) == {ids[0]: "gone"}
    calls = len(standins.calls(file))
    assert job_states(site, []) == {} and len(standins.calls(file)) == calls


def test_members_of_an_array(spec, runs, tmp_path):
    job = _job(spec, runs)
    for run in runs:
        (run / "job").mkdir(parents=True)
    for site, one in ((SLURM, job), (LSF, job), (SLURM, replace(job, runs=job.runs[:1]))):
        record(site, one, tmp_path / "sweep/job.sh", "7")
    assert [[line["id"] for line in submissions(run)] for run in runs] == [["7_1", "7[1]", "7"], ["7_2", "7[2]"]]


def test_another_schedulers_number_says_nothing_here(standins, spec):
    job, script = _written(spec, SLURM)
    record(SLURM, job, script, "8")
    (standins.folder / "squeue").write_text("8 PENDING\n")
    with pytest.raises(UserError, match="job 8 is queued; wait for it, or cancel it first"):
        prepare_job(SLURM, job, "", spec)
    (standins.folder / "bjobs").write_text("8 0 RUN\n")
    assert prepare_job(LSF, job, "", spec) == script


def test_what_tells_of_a_job_does_not_reach_the_next_one(monkeypatch):
    inside = {
        "SLURM_MEM_PER_CPU": "100", "SLURM_JOB_ID": "7", "SBATCH_TIMELIMIT": "1", "SRUN_CPUS_PER_TASK": "2",
        "PBS_JOBID": "7", "LSB_JOBID": "7", "FLUX_JOB_ID": "f7",
    }  # fmt: skip
    stays = {"SLURM_CONF": "/etc/a", "SBATCH_ACCOUNT": "b", "LSB_BSUB_PARSE_SCRIPT": "y", "FLUX_URI": "c", "HOME": "/d"}
    assert environment_outside(inside | stays) == stays
    for name, value in (inside | stays).items():
        monkeypatch.setenv(name, value)
    line = SLURM.batch.by_hand(Path("/run/job/job.sh"), "srun")
    assert line.startswith("cd /run/job && env --unset=FLUX_JOB_ID --unset=LSB_JOBID ")
    assert line.endswith(" --unset=SLURM_MEM_PER_CPU --unset=SRUN_CPUS_PER_TASK sbatch --parsable job.sh")


@pytest.mark.parametrize(
    ("site", "option", "value"),
    [
        # What bsub's command line says of -R replaces what the script says, the ranks of a node here.
        (LSF, "-R", "select[hname!='n4.cluster' && hname!='10.0.0.7'] span[ptile=4]"),
        (SUMMIT, "-R", "select[hname!='n4.cluster' && hname!='10.0.0.7']"),
        (FLUX, "--requires", "-host:n4.cluster,10.0.0.7"),
    ],
)
def test_nodes_that_are_known_as_bad_are_not_asked_for(standins, spec, site, option, value):
    job, script = _written(spec, site)
    (script.parent / "bad_nodes").write_text("n4.cluster: ECC\n# n5\n10.0.0.7 slow\n")
    chain(site, job, script, 1)
    assert standins.jobs()[-1]["options"][option] == value


def test_every_resource_requirement_of_an_lsf_script_is_repeated(tmp_path):
    """As profiles may write it."""
    script = tmp_path / "job.sh"
    script.write_text(
        '#BSUB -R "span[ptile=4]"\n#BSUB -q x -R\'select[mem>1000 && ib]\' -x\n#BSUB -R"rusage[mem=4G]"\n'
    )
    words = LSF.batch.words(script, "mpirun", None, ["n4"])
    found = [word for option, word in pairwise(words) if option == "-R"]
    assert found == ["select[hname!='n4']", "span[ptile=4]", "select[mem>1000 && ib]", "rusage[mem=4G]"]
    assert LSF.batch.words(script, "mpirun") == ["bsub"]


def test_slurm_gets_the_bad_nodes_of_all_runs_by_its_own_names(standins, spec, runs, tmp_path):
    """sbatch refuses the name of a node with its domain."""
    job = _job(spec, runs)
    script = write_job(SLURM, job, "", [spec, spec], tmp_path / "sweep")
    (runs[0] / "job/bad_nodes").write_text("n4.cluster: ECC\n10.0.0.7 slow\n")
    (runs[1] / "job/bad_nodes").write_text("n6 slow\nn4 slow\n")
    (standins.folder / "sbatch").write_text("88\n")
    chain(SLURM, job, script, 1)
    assert standins.calls("sbatch")[-1]["words"] == ["--exclude=n4,10.0.0.7,n6", "--parsable", "job.sh"]
