"""`summit-train submit` and `plan --site`: what is printed, where, with which exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from summit_train.cluster.submit import submissions
from summit_train.spec import load_spec
from tests.conftest import WriteSpec
from tests.standins import Standins
from tests.worlds import Say, environment, stdout_of

ROOT = Path(__file__).resolve().parents[2]
PAPER = str(ROOT / "configs/kinetics/tsm_r50_8f_1536gpu.yaml")
ON_SUMMIT = ("--site", "summit", "--clips", "240000")


@pytest.fixture
def say(say: Say, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Say:
    """Runs a command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return say


def test_a_dry_run_needs_no_scheduler_and_touches_nothing(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The golden words have its script and cost."""
    monkeypatch.setenv("PATH", "/nowhere")
    words = ("submit", PAPER, *ON_SUMMIT, "--nodes", "256", "--dry-run")
    assert "\n#BSUB -nnodes 256\n" in stdout_of(say(*words))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("site", "line"),
    [
        ("slurm_generic", "sbatch --parsable job.sh"),
        ("summit", "bsub job.sh"),
        ("lsf_generic", "bsub < job.sh"),
        ("pbs_generic", "qsub job.sh"),
        ("flux_generic", "flux batch job.sh"),
        ("local", "bash job.sh"),
    ],
)
def test_a_job_that_is_written_is_submitted_by_the_line_that_is_printed(
    say: Say, standins: Standins, write_spec: WriteSpec, tmp_path: Path, site: str, line: str
) -> None:
    """Its script equals that of a dry run, which has nothing to read."""
    spec = write_spec("a b; $(touch x)", scale={"gpus": 12})
    words, run = ("submit", str(spec), "--site", site, "--nodes", "1"), tmp_path / "runs/a b; $(touch x)"
    script = say(*words, "--dry-run")[1]
    status, out, err = say(*words, "--write")
    assert (status, out) == (0, f"cd '{run}/job' && {line}\n")
    assert err.endswith(f"nothing is submitted; the script is {run}/job/job.sh\n")
    assert (run / "job/job.sh").read_text() == script and load_spec(run / "job/spec.yaml") == load_spec(spec)
    assert submissions(run) == standins.jobs() == standins.calls("sbatch") == []
    if site != "local":
        (standins.folder / "sbatch").write_text("77\n")
        assert subprocess.run(["bash", "-c", out], env=standins.environ, capture_output=True).returncode == 0
        calls = standins.jobs() or standins.calls("sbatch")
        assert [call["folder"] for call in calls] == [f"{run}/job"]


def test_a_chain_that_is_written_is_one_job_with_more_requeues(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No scheduler is needed for it, unless jobs of the run were submitted before, which may still be there."""
    monkeypatch.setenv("PATH", "/nowhere")
    words, run = ("submit", PAPER, *ON_SUMMIT, "--nodes", "8", "--write"), tmp_path / "runs/tsm_r50_8f_1536gpu"
    status, _, err = say(*words)
    assert status == 0 and err.endswith("job.sh, which requeues itself in place of a chain of 5 jobs\n")
    assert json.loads((run / "job/job.json").read_text())["max_requeues"] == 14
    (run / "job/submitted.jsonl").write_text('{"id": "7", "scheduler": "lsf"}\n')
    assert say(*words)[0] == 2


def test_a_job_has_the_words_of_its_site(say: Say, standins: Standins, write_spec: WriteSpec, tmp_path: Path) -> None:
    (standins.folder / "sbatch").write_text("77\n")
    words = ("submit", str(write_spec("run")), "--site", "slurm_generic", "--nodes", "1", "--set")
    assert say(*words, "spec={watch.stall_seconds: 60, data.workers: 9}")[0] == 0
    spec = load_spec(tmp_path / "runs/run/job/spec.yaml")
    assert (spec.watch.stall_seconds, spec.data.workers) == (60, 0)


def test_a_job_is_submitted_and_recorded(say: Say, standins: Standins, write_spec: WriteSpec, tmp_path: Path) -> None:
    spec = write_spec("a b; $(touch x)")
    (standins.folder / "sbatch").write_text("77\n")
    words = ("submit", str(spec), "--site", "slurm_generic", "--nodes", "1")
    status, out, _ = say(*words)
    run = tmp_path / "runs/a b; $(touch x)"
    assert (status, out) == (
        0,
        f"a b; $(touch x): job 77 submitted; the script is {run}/job/job.sh, its output goes to {run}/job; "
        "at most 5 requeues, 24.0 node-hours in all\n",
    )
    assert [line["id"] for line in submissions(run)] == ["77"]
    assert load_spec(run / "job/spec.yaml") == load_spec(spec)
    # The same again while that one waits, and when it is gone.
    (standins.folder / "squeue").write_text("77 PENDING\n")
    refusal = f"summit-train: {run}: job 77 is queued; wait for it, or cancel it first\n"
    status, _, err = say(*words)
    assert status == 2 and err.endswith(f"\n{refusal}")
    (standins.folder / "squeue").write_text("")
    (standins.folder / "sbatch").write_text("78\n")
    assert say(*words)[0] == 0
    assert [line["id"] for line in submissions(run)] == ["77", "78"]


def test_a_chain_is_said_and_submitted(say: Say, standins: Standins, tmp_path: Path) -> None:
    status, out, err = say("submit", PAPER, *ON_SUMMIT, "--nodes", "8")
    assert status == 0
    assert "  walltime     a chain of 5 jobs of 2:00: 80.0 node-hours; at most 240.0 with 10 requeues\n" in err
    assert out.startswith("tsm_r50_8f_1536gpu: 5 jobs, one after the other, 101 to 105, submitted; the script is ")
    assert [job["options"].get("-w") for job in standins.jobs()] == [None, *(f"ended({n})" for n in range(101, 105))]
    assert len(submissions(tmp_path / "runs/tsm_r50_8f_1536gpu")) == 5


def test_without_the_scheduler_nothing_is_written(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    status, _, err = say("submit", PAPER, *ON_SUMMIT, "--nodes", "256")
    assert status == 2 and list(tmp_path.iterdir()) == []
    assert err.endswith("summit-train: bsub is not on PATH: submit on a machine of summit, or use --dry-run\n")


def test_a_refusal_is_1(say: Say, standins: Standins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_REFUSES", "You must specify a project.")
    status, _, err = say("submit", PAPER, *ON_SUMMIT, "--nodes", "256")
    refused = "Request aborted by esub. Job not submitted. You must specify a project."
    assert (status, err.splitlines()[-1]) == (1, f"summit-train: bsub refused (exit status 97): {refused}")
    assert submissions(tmp_path / "runs/tsm_r50_8f_1536gpu") == []


@pytest.mark.slow
@pytest.mark.nightly
def test_this_machine_trains_in_the_foreground(
    write_spec: WriteSpec, eight_videos: dict[str, str], tmp_path: Path
) -> None:
    spec, run = write_spec("a 'b", data=eight_videos, schedule={"epochs": 1}), tmp_path / "runs/a 'b"
    words = [sys.executable, "-m", "summit_train", "submit", str(spec), "--site", "local", "--nodes", "1"]
    environ = environment(SUMMIT_TRAIN_COMM="torch")
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith(f": done, {run}\n"), done.stderr
    assert json.loads((run / "plan.json").read_text())["ranks"] == 2
    assert (run / "job/done").exists() and (run / "eval.json").exists()


def _site_of_plan(say: Say, *words: str) -> dict[str, object]:
    status, out, err = say("plan", PAPER, "--clips", "240000", *words, "--json")
    assert (status, err) == (0, "")
    values = json.loads(out)
    assert values["ranks"] == values["site"]["ranks"]
    return dict(values["site"])


def test_plan_has_the_cost_on_a_site(say: Say) -> None:
    site = _site_of_plan(say, "--site", "summit")
    assert (site["name"], site["nodes"], site["jobs"], site["walltime_minutes"]) == ("summit", 256, 1, 32)
    assert (site["node_hours"], site["comm"]) == (pytest.approx(59.1, abs=0.05), "auto")
    few = _site_of_plan(say, "--site", "summit", "--nodes", "8", "--walltime", "1:00", "--set", "comm=torch")
    assert (few["ranks"], few["jobs"], few["walltime_minutes"], few["comm"]) == (48, 12, 60, "torch")
    assert _site_of_plan(say, "--site", "summit", "--ranks", "96")["nodes"] == 16
    assert _site_of_plan(say, "--site", "slurm_v100", "--nodes", "2")["hours"] is None
