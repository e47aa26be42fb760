"""`summit-train sweep`: what is planned, submitted, run here and told, with which exit status."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from summit_train.__main__ import main
from summit_train.cluster.site import load_site
from summit_train.cluster.submit import submissions
from summit_train.data.manifest import read_manifest
from summit_train.data.manifest.reading import write_classes
from summit_train.spec import load_spec
from summit_train.spec.source import to_yaml
from tests.conftest import WriteSpec
from tests.runs import steps_of
from tests.standins import Standins
from tests.worlds import PATIENCE_S, ROOT, Say, forked, json_of, lines, main_without_reports, refused, start, stdout_of

Sweeps = Callable[..., Path]


@pytest.fixture
def say(say: Say, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Say:
    """Runs a command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return say


@pytest.fixture
def write_sweep(write_spec: WriteSpec, tmp_path: Path) -> Sweeps:
    """Writes a sweep over the tiny spec, whose runs go to tmp_path/runs/study."""

    def one(axes: str, **sections: object) -> Path:
        write_spec("base", **sections)
        (tmp_path / "study.yaml").write_text(f"name: study\nbase: base.yaml\n{axes}")
        return tmp_path / "study.yaml"

    return one


SIX = "grid: {scale.gpus: [4, 8]}\nzip: {seed: [0, 1, 2], model.dropout: [0.1, 0.2, 0.3]}\nat_once: 2\n"


@pytest.fixture
def submits(standins: Standins) -> Standins:
    """Stand-ins for schedulers; sbatch accepts jobs as number 77."""
    (standins.folder / "sbatch").write_text("77\n")
    return standins


def _ids(tmp_path: Path) -> dict[str, list[str]]:
    """The ids of every run's jobs."""
    runs = sorted(path for path in (tmp_path / "runs/study").iterdir() if (path / "job/spec.yaml").exists())
    return {run.name: [line["id"] for line in submissions(run)] for run in runs}


def test_a_dry_run_prints_every_runs_plan_and_touches_nothing(say: Say, write_sweep: Sweeps, tmp_path: Path) -> None:
    path = write_sweep("zip: {scale.gpus: [4, 8], nodes: [1, 2]}\nruns: [{scale.gpus: 8, seed: 1, nodes: 1}]\n")
    before = sorted(tmp_path.rglob("*"))
    words = ("sweep", path, "--dry-run", "--site", "slurm_generic")
    status, out, err = say(*words)
    assert (status, err) == (0, "")
    # 80 clips, 2 epochs: 10 steps of 8 clips, 5 of 16; the LR 0.005 is of 8
    assert [line.split() for line in lines(out)[2:5]] == [
        ["gpus-4", "1", "4", "4", "1", "8", "32", "20", "0.005", "4:00"],
        ["gpus-8", "2", "8", "8", "1", "16", "64", "10", "0.01", "4:00"],
        ["gpus-8_seed-1", "1", "4", "8", "2", "16", "64", "10", "0.01", "4:00"],
    ]
    # The site's 4 hours on 1, 2 and 1 nodes, each with 5 requeues, a day, as the speed is unknown.
    assert "\n  node-hours  at most 96.0 with all requeues\n" in out
    assert "the script of the first of 3 jobs:\n\n#!/bin/bash\n#SBATCH --job-name=gpus-4\n" in out
    out = stdout_of(say(*words, "--set", "requires=[account]"))
    assert out.splitlines()[-1].startswith("no script: slurm_generic: a job must have acc")
    assert sorted(tmp_path.rglob("*")) == before


def test_all_runs_of_an_array_may_take_what_the_longest_one_needs(say: Say, tmp_path: Path) -> None:
    """100 epochs take 32 minutes and 3 requeues (tests/cluster/test_estimate.py), 50 epochs less."""
    base = ROOT / "configs/kinetics/tsm_r50_8f_1536gpu.yaml"
    axes = "nodes: 256\ngrid: {schedule.epochs: [50, 100]}\n"
    (tmp_path / "study.yaml").write_text(f"name: study\nbase: {base}\n{axes}")
    values = json_of(say("sweep", "study.yaml", "--site", "summit", "--clips", "240000", "--dry-run", "--json"))
    assert [run["site"]["walltime_minutes"] < 32 for run in values["runs"]] == [True, False]
    assert values["most_node_hours"] == pytest.approx(2 * 256 * 32 / 60 * (1 + 3))


def test_weights_are_looked_for_by_each_run(say: Say, write_sweep: Sweeps, tmp_path: Path) -> None:
    """The first run has a checkpoint and needs none; the second one does."""
    path = write_sweep("grid: {seed: [0, 1]}\n", model={"pretrained": "no.pth"})
    checkpoint = tmp_path / "runs/study/seed-0/checkpoints/step_00000001.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    reason = "seed-1: model.pretrained: no.pth: no such file or run folder"
    assert refused(say("sweep", path, "--dry-run")) == reason


def test_a_sweep_warns_of_its_files_once(say: Say, write_sweep: Sweeps, motion_set: Path, tmp_path: Path) -> None:
    head, *rows = (motion_set / "train.csv").read_text().splitlines()
    (tmp_path / "train.csv").write_text("\n".join([head, *(row for row in rows if row.split(",")[1] != "3")]))
    write_classes(tmp_path, read_manifest(motion_set / "train.csv").classes or ())
    data = {"train": str(tmp_path / "train.csv"), "root": str(motion_set)}
    status, _, err = say("sweep", write_sweep("grid: {seed: [0, 1]}\n", data=data), "--dry-run")
    assert status == 0 and lines(err) == ["warning: 1 class (down) in data.val and not in data.train"]


def test_folds_with_other_classes_are_refused_before_a_run_starts(
    say: Say, write_sweep: Sweeps, motion_set: Path, tmp_path: Path
) -> None:
    """The first fold has no names of classes; the third one's are turned round."""
    classes = read_manifest(motion_set / "train.csv").classes or ()
    for number, names in enumerate((None, classes, classes[::-1]), 1):
        (folder := tmp_path / f"folds/fold{number}").mkdir(parents=True)
        for name in ("train", "val"):
            (folder / f"{name}.csv").write_text((motion_set / f"{name}.csv").read_text())
        if names:
            write_classes(folder, names)
    base = write_sweep("folds: folds/fold{1..3}\n", data={"root": str(motion_set), "train": "", "val": ""})
    wrong = refused(say("sweep", str(base), "--dry-run"))
    assert "folds/fold2/train.csv and folds/fold3/train.csv must have the same classes" in wrong
    base.write_text(base.read_text().replace("3}", "2}"))
    assert say("sweep", str(base), "--dry-run")[0] == 0


def test_a_sweep_over_an_augmentation_of_your_own_is_planned(say: Say, write_sweep: Sweeps, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def dim(clip, generator, by):\n    return clip // by\n")
    own = {"kind": "own.py:dim", "options": {"by": 2}}
    path = write_sweep("grid: {seed: [0, 1]}\n", data={"augment": ["scale_jitter", own]})
    assert say("sweep", str(path), "--dry-run")[0] == 0


def test_runs_of_equal_nodes_are_one_array_with_the_cap(
    say: Say, write_sweep: Sweeps, submits: Standins, tmp_path: Path
) -> None:
    words = ("sweep", write_sweep(SIX + "nodes: 1\n"), "--site", "slurm_generic")
    planned = say(*words, "--dry-run")[1]
    status, out, err = say(*words)
    assert (status, err) == (0, "")
    own = f"; slurm's own messages: {tmp_path}/runs/study/job/array_*.out\n  mail        none; to get it, add"
    for part in (
        "study: job array 77 of 6 runs, 2 at once",
        f"\n  output      RUN/job/*.out{own}",
        "  node-hours  at most 144.0 with all requeues\n",
    ):
        assert part in out
    assert len(submits.calls("sbatch")) == 1
    text = (tmp_path / "runs/study/job/job.sh").read_text()
    assert "#SBATCH --array=1-6%2\n" in text and planned.endswith(f"\nthe script:\n\n{text}")
    runs = shlex.split(text.split("runs=(")[1].split(")")[0])
    assert [Path(run).name for run in runs] == [f"gpus-{gpus}_seed-{seed}" for gpus in (4, 8) for seed in (0, 1, 2)]
    assert json.loads(Path(runs[0], "job/job.json").read_text())["sweep"] == f"{tmp_path}/runs/study"
    assert _ids(tmp_path) == {Path(run).name: [f"77_{i}"] for i, run in enumerate(runs, 1)}
    spec = load_spec(tmp_path / "runs/study/gpus-8_seed-1/job/spec.yaml")
    assert (spec.scale.gpus, spec.seed, spec.model.dropout, spec.name) == (8, 1, 0.2, "gpus-8_seed-1")
    assert spec.run_path == tmp_path / "runs/study/gpus-8_seed-1"


@pytest.mark.parametrize(("keys", "minutes"), [({}, 1.0), ({"checkpoint": {"every_minutes": 7}}, 7.0)])
@pytest.mark.usefixtures("submits")
def test_a_run_saves_as_often_as_the_sites_failures_ask_for(
    keys: dict[str, object], minutes: float, say: Say, write_sweep: Sweeps, tmp_path: Path
) -> None:
    generic = f"extends: {ROOT}/configs/sites/slurm_generic.yaml\n"
    (tmp_path / "ours.yaml").write_text(f"{generic}failure_gpu_hours: 0.1\n")
    assert say("sweep", write_sweep("grid: {scale.gpus: [4, 8]}\nnodes: 1\n", **keys), "--site", "ours.yaml")[2] == ""
    written = [load_spec(path) for path in tmp_path.glob("runs/study/*/job/spec.yaml")]
    assert [spec.checkpoint.every_minutes for spec in written] == [minutes, minutes]


def test_submitted_again_only_what_failed_or_is_missing_starts(
    say: Say, write_sweep: Sweeps, submits: Standins, tmp_path: Path
) -> None:
    words = ("sweep", write_sweep("grid: {seed: [0, 1, 2, 3]}\nnodes: 1\n"), "--site", "slurm_generic")
    assert say(*words)[0] == 0
    (submits.folder / "squeue").write_text("77_1 RUNNING\n77_2 PENDING\n77_4 COMPLETING\n")
    (submits.folder / "sbatch").write_text("78\n")
    there = "not started again: seed-0 (running), seed-1 (queued), seed-3 (running)\n"
    assert there in stdout_of(say(*words))
    assert _ids(tmp_path) == {"seed-0": ["77_1"], "seed-1": ["77_2"], "seed-2": ["77_3", "78"], "seed-3": ["77_4"]}
    # And again, with all of them there: nothing is submitted.
    (submits.folder / "squeue").write_text("77_1 RUNNING\n77_2 PENDING\n77_4 RUNNING\n78 PENDING\n")
    assert say(*words)[0] == 0 and len(submits.calls("sbatch")) == 2
    runs = json_of(say("sweep", words[1], "--status", "--json"))["runs"]
    states = [("running", "77_1"), ("queued", "77_2"), ("queued", "78"), ("running", "77_4")]
    assert [(run["state"], run["job"]) for run in runs] == states
    # A start here starts none of them either, whatever it knows of schedulers itself.
    out = stdout_of(say("sweep", words[1], "--local"))
    assert "seed-2 (queued)" in out and "0 of 0 failed" in out


def test_what_is_queued_on_another_site_is_known_where_that_site_is_named(
    say: Say, write_sweep: Sweeps, submits: Standins, tmp_path: Path
) -> None:
    """The sweep's folder remembers the site of the last submission alone."""
    words = ("sweep", write_sweep("grid: {seed: [0, 1]}\nnodes: 1\n"), "--site", "slurm_generic")
    assert say(*words)[0] == 0
    (submits.folder / "squeue").write_text("77_1 PENDING\n77_2 RUNNING\n")
    lsf = load_site("lsf_generic").model_dump(mode="json")
    (tmp_path / "runs/study/site.yaml").write_text(to_yaml(lsf))  # as a submission there leaves it
    with open(tmp_path / "runs/study/seed-0/job/submitted.jsonl", "a") as file:
        file.write(json.dumps(submissions(tmp_path / "runs/study/seed-0")[0] | {"id": "9", "scheduler": "lsf"}) + "\n")
    assert "not started again: seed-0 (queued), seed-1 (running)\n" in stdout_of(say(*words))
    assert len(submits.calls("sbatch")) == 1
    rows = json_of(say(*words, "--status", "--json"))["runs"]
    assert [(row["state"], row["job"]) for row in rows] == [("queued", "77_1"), ("running", "77_2")]


@pytest.mark.usefixtures("standins")
def test_an_array_that_slurm_refuses_says_what_to_do_and_leaves_its_runs_missing(
    say: Say, write_sweep: Sweeps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_REFUSES", "sbatch: error: Batch job submission failed: Invalid job array specification")
    path = write_sweep("grid: {seed: [0, 1]}\nnodes: 1\n")
    status, _, err = say("sweep", path, "--site", "slurm_generic")
    assert status == 1 and len(lines(err)) == 1
    assert "specification; an array must have fewer runs than MaxArraySize" in err
    monkeypatch.delenv("STANDIN_REFUSES")
    assert say("sweep", path, "--status")[1].splitlines()[-2:-1] == ["study: 2 missing"]


def test_different_nodes_are_jobs_of_their_own_and_the_cap_is_kept_by_waiting(
    say: Say, write_sweep: Sweeps, submits: Standins, tmp_path: Path
) -> None:
    path = write_sweep("zip: {seed: [0, 1, 2], scale.gpus: [4, 8, 4], nodes: [1, 2, 1]}\nat_once: 2\n")
    assert stdout_of(say("sweep", path, "--site", "slurm_generic")).count(": job 77 on ") == 3
    words = [call["words"] for call in submits.calls("sbatch")]
    waits = [[word for word in call if word.startswith("--dependency")] for call in words]
    assert waits == [[], [], ["--dependency=afterany:77"]]
    assert "#SBATCH --nodes=2\n" in (tmp_path / "runs/study/seed-1/job/job.sh").read_text()


@pytest.mark.usefixtures("submits")
def test_status_without_the_scheduler_says_so_and_calls_nothing_failed(
    say: Say, write_sweep: Sweeps, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_sweep("grid: {seed: [0, 1]}\nnodes: 1\n")
    assert say("sweep", path, "--site", "slurm_generic")[0] == 0
    monkeypatch.setenv("PATH", "/nowhere")
    status, out, err = say("sweep", path, "--status")
    assert status == 0 and "the state of the jobs is unknown: sbatch is not on PATH" in err
    assert "study: 2 unknown\n" in out


def test_status_of_a_sweep_that_was_not_started_writes_nothing(say: Say, write_sweep: Sweeps, tmp_path: Path) -> None:
    out = stdout_of(say("sweep", write_sweep("grid: {seed: [0, 1]}\n"), "--status"))
    assert out.endswith("study: 2 missing\n") and not (tmp_path / "runs").exists()


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a sweep here are forked from this process: they need not import torch again."""

    def run(words: Sequence[str]) -> tuple[int, set[int]]:
        status, _ = forked(0, partial(main_without_reports, words[words.index("summit_train") + 1 :]))
        return status, set()

    monkeypatch.setattr("summit_train.sweep.start._run_command", run)


_LOCAL = ("--local", "--set", "ranks_per_node=1")


@pytest.mark.usefixtures("in_process")
def test_here_a_failing_run_stops_no_other_and_is_all_that_starts_again(
    say: Say, write_sweep: Sweeps, eight_videos: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "runs/study"
    path = write_sweep(
        f"runs:\n  - {{name: after, model.pretrained: {folder}/b}}\n  - {{name: b}}\n  - {{name: c, scale.gpus: 2}}\n",
        data=eight_videos,
        schedule={"epochs": 1, "warmup_epochs": 0},
    )
    status, out, _ = say("sweep", str(path), *_LOCAL)
    assert status == 1 and "[1/3] after: failed with exit status 2" in out and "[3/3] c: top-1 " in out
    table = json.loads((folder / "table.json").read_text())
    assert [run["state"] for run in table["runs"]] == ["failed", "done", "done"]
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    # b is there now, so that the weights can be had.
    kept = (folder / "b/metrics.jsonl").read_bytes()
    status, out, _ = say("sweep", str(folder), *_LOCAL)
    assert status == 0 and "not started again: b (done), c (done)\n" in out and "[1/1] after: top-1 " in out
    assert (folder / "b/metrics.jsonl").read_bytes() == kept
    assert json.loads((folder / "table.json").read_text())["states"]["done"] == 3


@pytest.mark.usefixtures("in_process")
def test_here_a_full_disk_behind_the_log_ends_no_run(
    write_sweep: Sweeps, eight_videos: dict[str, str], tmp_path: Path
) -> None:
    path = write_sweep("grid: {seed: [0]}\n", data=eight_videos, schedule={"epochs": 1, "warmup_epochs": 0})

    def work() -> int:
        sys.stdout = open("/dev/full", "w")  # noqa: SIM115
        return main(["sweep", str(path), *_LOCAL])

    status, err = forked(0, work)
    assert status == 0 and "standard output: No space left on device" in err
    assert json.loads((tmp_path / "runs/study/table.json").read_text())["states"]["done"] == 1


@pytest.mark.slow
@pytest.mark.nightly
def test_here_a_stop_is_passed_on_and_the_sweep_continues_where_it_stopped(
    say: Say, write_sweep: Sweeps, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = write_sweep("grid: {seed: [0, 1]}\n", schedule={"epochs": 4, "warmup_epochs": 1})
    process = start(0, "-m", "summit_train", "sweep", str(path), *_LOCAL)
    run = tmp_path / "runs/study/seed-0"
    deadline = time.monotonic() + PATIENCE_S
    while not steps_of(run):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 85, output
    assert "study: stopped at seed-0; start the sweep again to continue there" in output
    assert not (tmp_path / "runs/study/seed-1").exists()
    assert max(steps_of(run)) < 40
    request.getfixturevalue("in_process")
    assert say("sweep", str(path), *_LOCAL)[0] == 0
    assert steps_of(run) == list(range(1, 41)), "it began again, or lost steps"
    assert json.loads((tmp_path / "runs/study/table.json").read_text())["states"]["done"] == 2
