"""The job keeper: what nodes answer, what launchers are given, and what it leaves for people and programs.

Its way through a job is tested by the scripts that it ends: tests/cluster/test_scripts.py, test_restarts.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from summit_train.cluster.job import KEEPER
from summit_train.cluster.running_job import Answer, _answers, program_end
from summit_train.cluster.scheduler import LONGEST_WORD, Nodes
from summit_train.cluster.schedulers import SCHEDULERS, ranges
from summit_train.cluster.submit import write_keeper
from summit_train.core.files import write_json
from summit_train.core.run_folder import RunLock
from tests.cluster.test_scripts import NEW_JOBS, ended_with, prepared, run_to_end, started, stopped, wait_for_calls
from tests.worlds import PATIENCE_S, ROOT

FRONTIER = [f"frontier{number:05}" for number in range(1, 9363)]


def test_it_starts_without_what_is_heavy_and_by_an_old_python(tmp_path):
    """Also from one file, by a Python that has no summit_train."""
    program = "import sys, summit_train.cluster.keeper; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    ours = {name for name in loaded if name.startswith("summit_train.")}
    assert not {"numpy", "torch", "pydantic", "yaml", "jinja2"} & {*loaded}
    write_keeper(tmp_path / KEEPER)
    for python in filter(None, map(shutil.which, ("python3.9", "python3"))):
        words = [python, "-ISB", str(tmp_path / KEEPER), "only"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        if "pyenv: " in done.stderr:  # it knows that version and does not have it
            continue
        assert done.returncode == 2 and done.stderr.startswith("usage: "), done.stderr
    # What it needs is in the file.
    names = subprocess.run(["unzip", "-l", tmp_path / KEEPER], capture_output=True, text=True).stdout
    if names:
        assert all(f"{name.replace('.', '/')}" in names for name in ours)


@pytest.mark.parametrize(
    ("nodes", "text", "answers"),
    [
        (["n1", "n2"], "@answer n1 0 \n@answer n2.domain 0 \n", {"n1": Answer(), "n2": Answer()}),
        (["n1"], "noise\n@answer other 0 \n", {"n1": Answer()}),
        (["n1", "n2"], "@answer n2 127 no such file\n", {"n2": Answer("no such file")}),
        (["n1", "n2"], "@answer n2 1 \n", {"n2": Answer("exit status 1")}),
        (["n1", "n2"], "@answer n3 0 \n", {}),
        (
            ["n1", "n2"],
            "@answer n1 0 \nsrun: error: Task launch failed on node n2: no route\nsrun: error: n22 n2-x\n",
            {"n1": Answer(), "n2": Answer("srun: error: Task launch failed on node n2: no route", True)},
        ),
        (["n1"], "srun: launching\nsrun: error: no\nsrun: bye\n", {"n1": Answer("srun: error: no", True)}),
        (["n1"], "ssh: connect\n\n", {"n1": Answer("ssh: connect", True)}),
        (["n1", "n2"], "srun: error: job step aborted\n", {}),
        (["n1"], "", {}),
    ],
)
def test_the_answers_of_nodes_and_the_words_of_launchers(nodes, text, answers):
    assert _answers(text, nodes) == answers


@pytest.mark.parametrize(
    ("names", "word"),
    [
        ("n1 n2 n4 m n5", "n[1-2],n4,m,n5"),
        ("n09 n10 n9 n99 n100", "n[09-10],n9,n[99-100]"),
        ("a1b2 a1b3 c", "a1b[2-3],c"),
        ("x x", "x,x"),
    ],
)
def test_ranges_of_hosts(names, word):
    assert ranges(names.split()) == word


def test_hosts_that_a_word_cannot_hold_go_through_a_file_or_as_ranges():
    assert len(",".join(FRONTIER)) > LONGEST_WORD
    for scheduler, word in (("slurm", "/f"), ("flux", "frontier[00001-09362]")):
        hosts = SCHEDULERS[scheduler].hosts
        assert hosts(Nodes(["n1", "n2"], Path("/f"))) == "n1,n2" and hosts(Nodes(FRONTIER, Path("/f"))) == word


def test_all_nodes_are_asked_in_one_step_as_many_as_there_are(standins, tmp_path):
    script, run = prepared(standins, "srun", tmp_path / "run")
    (standins.folder / "hosts").write_text("".join(f"{host}\n" for host in FRONTIER))
    (standins.folder / "broken").write_text("frontier00002")
    (standins.folder / "answers at once").touch()  # without a process for each
    status, output = run_to_end(standins, script)
    assert status == 0 and "frontier00002 cannot start ranks: python: cannot open shared" in output, output[-2000:]
    asked = standins.calls("asked")
    assert {call["together"] for call in asked} == {len(FRONTIER)} and len(asked) == len(FRONTIER)
    assert (run / "job/hosts").read_text().split() == ["frontier00001", "frontier00003"]


def test_a_launcher_that_starts_nothing_is_no_reason_to_requeue(standins, tmp_path):
    """Neither at the first start nor at a later one; its words are in the output."""
    script, run = prepared(standins, "srun", tmp_path / "run")
    (standins.folder / "refusal").write_text("srun: error: Invalid account\n")
    status, output = run_to_end(standins, script)
    assert status == 1 and "n1 cannot start ranks: srun: error: Invalid account\n" in output
    (standins.folder / "refusal").rename(standins.folder / "later refusal")
    status, output = run_to_end(standins, script, TRAINER="crash after a step")
    assert status == 1 and "restart 1 of 5\n" in output
    assert "n2 cannot start ranks: srun: error: Invalid account\n" in output
    assert not standins.calls("scontrol") and not (run / "job/requeues").exists()


def test_nodes_that_do_not_answer_in_time_are_left_out(standins, tmp_path):
    """All of them here: a node may come back, so the job is requeued."""
    script, _ = prepared(standins, "srun", tmp_path / "run")
    (standins.folder / "silent").touch()
    (standins.folder / "squeue").write_text("RUNNING\n")
    status, output = run_to_end(standins, script, TRAINER="crash after a step", STANDIN_WAITS='{"answer": 0.3}')
    (standins.folder / "silent").unlink()
    assert status == 85 and "n1 cannot start ranks: no answer within 0.3 s\n" in output, output
    assert output.endswith("stopped at step 1; requeued, 1 of 20 requeues\n")


def test_nodes_may_take_longer_while_others_answer(standins, tmp_path):
    """30 of them, one after the other: together more than the seconds that the next one has."""
    script, _ = prepared(standins, "srun", tmp_path / "run")
    (standins.folder / "hosts").write_text("".join(f"n{number}\n" for number in range(30)))
    (standins.folder / "broken").touch()
    (standins.folder / "answers at once").write_text("0.2")
    status, output = run_to_end(standins, script, STANDIN_WAITS='{"first_answer": 5, "look": 0.1}')
    assert status == 0 and "cannot start" not in output, output


def test_a_second_job_of_a_run_waits_for_the_first(standins, tmp_path):
    script, run = prepared(standins, "srun", tmp_path / "run")
    with RunLock(run / "job"):
        status, output = run_to_end(standins, script, STANDIN_WAITS='{"lock": 0}')
        holder = f"{os.uname().nodename}, process {os.getpid()}"
        assert status == 2 and f"{run}/job: another run is using this directory ({holder}); wait" in output
        waiting = started(standins, script)
        time.sleep(1)
        assert waiting.poll() is None and not standins.calls("asked")
        warned = started(standins, script)
        time.sleep(1)
        warned.send_signal(signal.SIGUSR2)
        status, output = ended_with(standins, warned)
        assert status == 1 and output.endswith("another job of this run held its folder; submit it again to continue\n")
        assert not (run / "job/state.json").exists() and not (run / "job/requeues").exists()
    assert ended_with(standins, waiting)[0] == 0


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("{nodes}", "{node}", "--nodes={node}: {node}"),
        ("{ranks}", "x{python}", "--ntasks=x{python}: {python}"),
        ("{ranks}", "{image}", "--ntasks={image}: {image}"),
        (" train ", " '{x}' train ", "{x}: {x}"),
        ('spec.yaml"', "spec.yaml\" '${x}'", ""),
    ],
)
def test_an_unknown_name_in_braces_is_refused_at_once(standins, tmp_path, old, new, named):
    script, _ = prepared(standins, "srun", tmp_path / "run")
    assert script.count(old) == 1
    status, output = run_to_end(standins, script.replace(old, new))
    right = "must be one of nodes, ranks, hosts, hostfile, staged, or python in a word of its own\n"
    assert output.endswith(f"job 7: the script's last line: {named}: {right}") == bool(named), output
    assert status == (2 if named else 0) and bool(standins.calls("asked")) != bool(named)


def test_a_warning_that_ends_a_question_to_the_scheduler_is_no_failure(standins, tmp_path):
    """Flux sends it to all processes of the script."""
    script, _ = prepared(standins, "flux", tmp_path / "run")
    (standins.folder / "warned").touch()
    status, output = run_to_end(standins, script, TRAINER="crash after a step")
    assert status == 85 and "stopped at step 1; requeued" in output, output


def test_a_jobs_launchers_do_not_hear_of_an_interactive_job():
    """Whose shell called sbatch: srun takes these for options."""
    stale = dict.fromkeys(
        ("SLURM_STEP_ID", "SLURM_CPU_BIND_TYPE", "SLURM_MPI_TYPE", "SRUN_DEBUG", "SLURM_PTY_PORT"), "x"
    )
    own = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SRUN_CPUS_PER_TASK": "4", "PATH": "/bin"}
    slurm = SCHEDULERS["slurm"]
    assert slurm.environment(own | stale, ["n1"], False) == own
    assert slurm.environment(own | stale, ["n1"], True) == own | {"SLURM_OVERLAP": "1"}
    # Rank 0 is on the first node, unless the site says otherwise.
    assert SCHEDULERS["pbs"].environment({}, ["n3", "n1"], False) == {"MASTER_ADDR": "n3"}
    assert SCHEDULERS["pbs"].environment({"MASTER_ADDR": "a"}, ["n3"], True) == {"MASTER_ADDR": "a"}
    assert SCHEDULERS["flux"].environment({"MASTER_ADDR": "a"}, ["n3"], True) == {"MASTER_ADDR": "n3"}


def test_ranks_get_a_secret_that_each_job_makes(standins, tmp_path):
    """Of 32 random bytes, unless the user has made one."""
    for number, environ in enumerate(({}, {}, {"SUMMIT_TRAIN_SECRET": "mine"})):
        script, _ = prepared(standins, "srun", tmp_path / f"run{number}")
        assert run_to_end(standins, script, **environ)[0] == 0
    first, second, own = (call["SUMMIT_TRAIN_SECRET"] for call in standins.calls("trainer"))
    assert re.fullmatch("[0-9a-f]{64}", first) and re.fullmatch("[0-9a-f]{64}", second) and first != second
    assert own == "mine"


def test_what_it_leaves_for_people_and_programs(standins, tmp_path):
    script, run = prepared(standins, "srun", tmp_path / "run")
    status, output = run_to_end(standins, script, TRAINER="crash")
    log = (run / "job/log").read_text()
    assert status == 139 and log == output
    assert re.fullmatch(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d job 7: .+\n){4}", log)
    state = json.loads((run / "job/state.json").read_text())
    del state["since"]
    assert state == {"job": "7", "state": "failed", "restarts": 1, "nodes": ["n1", "n2"]}


@pytest.mark.parametrize("site", ["srun", *NEW_JOBS[:1], "local", "ranks"])
def test_the_launchers_words_can_be_changed_in_the_script(standins, tmp_path, site):
    """A program may stand before another one; what cannot be is refused in one line."""
    script, run = prepared(standins, site, tmp_path / "run")
    wrapped = script.replace('    "$python" -m summit_train', '    env MINE=1 "$python" -m summit_train')
    assert wrapped != script and run_to_end(standins, wrapped)[0] == 0
    (run / "job/done").unlink()
    status, output = run_to_end(standins, script.replace("-m summit_train train", "train.py"))
    assert status == 2 and output.count("\n") == 1 and "PROGRAM must be ... -m summit_train ..., got [" in output
    status, output = run_to_end(standins, script.replace(' "$job_id" --', ""))
    assert status == 2 and output.startswith("usage: ") and str(ROOT) not in output
    (run / "job/job.json").unlink()
    status, output = run_to_end(standins, script)
    line = f"{run}/job/job.json is missing; write script and spec by `summit-train submit --write`\n"
    assert (status, output) == (2, line)


def test_the_program_is_found_behind_an_image_of_its_name():
    words = ["podman-hpc", "run", "summit_train", "python", "-m", "summit_train", "train", "spec.yaml"]
    assert program_end(words) == 6 and program_end(words[3:]) == 3


def test_what_a_newer_version_has_written_and_a_path_in_braces_do_not_matter(standins, tmp_path):
    """Nor does a sweep's table that cannot be written."""
    script, run = prepared(standins, "srun", tmp_path / "r{nodes}", sweep=tmp_path / "sweep")
    about = run / "job/job.json"
    write_json(about, json.loads(about.read_text()) | {"later": 1, "python": "/nowhere/python"})
    status, output = run_to_end(standins, script)
    assert status == 0 and "the sweep's table is not up to date: [Errno 2]" in output and (run / "job/done").exists()
    (call,) = standins.calls("trainer")
    assert call["words"][-1] == f"{run}/job/spec.yaml"


def test_a_node_local_folder_that_no_node_has_is_refused(standins, tmp_path):
    keys = ("node_local=$NO_SUCH_FOLDER/x",)
    script, _ = prepared(standins, "srun", tmp_path / "run", keys=keys, stage=(tmp_path / "packed",))
    status, output = run_to_end(standins, script)
    assert status == 2 and "node_local must be an absolute path on each node, got '$NO_SUCH_FOLDER/x'; try to" in output
    assert not standins.calls("srun")


def test_a_job_that_is_cancelled_before_it_has_nodes_removes_nothing(standins, tmp_path):
    keys = ("node_local=/tmp",)
    script, _ = prepared(standins, "srun", tmp_path / "run", keys=keys, stage=(tmp_path / "packed",))
    silent = standins.folder / "silent"
    silent.touch()
    process = started(standins, script)
    wait_for_calls(standins, process, "asked", 1)
    process.send_signal(signal.SIGTERM)
    silent.unlink()
    status, output = ended_with(standins, process)
    assert status == 143 and "SIGTERM: the job must stop, with a checkpoint" in output, output
    assert not [call for call in standins.calls("srun") if "rm" in call["command"]]


@pytest.mark.parametrize("site", ["srun", NEW_JOBS[0]])
def test_a_job_that_is_cancelled_and_then_warned_stays_cancelled(standins, tmp_path, site):
    script, run = prepared(standins, site, tmp_path / "run")
    status, output = stopped(standins, script, signal.SIGTERM, signal.SIGUSR2)
    assert status == 143 and "stopped by SIGTERM" in output, output
    assert json.loads((run / "job/state.json").read_text())["state"] == "cancelled"


def test_ranks_are_stopped_where_nobody_reads_the_output_any_more(standins, tmp_path):
    script, run = prepared(standins, "srun", tmp_path / "run")
    process = started(standins, script, TRAINER="stop")
    assert process.stdout is not None
    wait_for_calls(standins, process, "trainer", 1)
    process.stdout.close()
    (standins.folder / "squeue").write_text("RUNNING\n")
    process.send_signal(signal.SIGUSR2)
    assert process.wait(PATIENCE_S) == 85 and (run / "job/requeues").read_text() == "7 step 8\n"
