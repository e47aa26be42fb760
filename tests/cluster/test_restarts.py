"""Job scripts whose ranks fail or whose nodes are bad or lost start the ranks again in the same job, on other nodes.

As in test_scripts.py, launchers and trainer are stand-ins, bash and the signals are real.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from summit_train.report.goodput import restarts as read_restarts
from tests.cluster.test_scripts import (
    LAUNCHERS,
    NEW_JOBS,
    SCHEDULERS,
    ended_with,
    prepared,
    run_to_end,
    started,
    wait_for_calls,
)

# The guard with a clock of its own, which ends it before its second look.
WATCH = """
import os, sys, time
from summit_train.cluster import keeper
looks = []
def sleep(seconds, sleep=time.sleep):
    if seconds != 30:  # while a program runs
        return sleep(seconds)
    looks.append(seconds)
    if len(looks) == 2:
        os._exit(0)
time.sleep = sleep
keeper.main(sys.argv[1:])
"""
THREE = "n1\nn2\nn3\n"


@pytest.mark.parametrize(
    ("trainer", "restarts", "starts", "status"),
    [
        ("crash once", 5, 2, 0),
        ("crash", 5, 2, 139),  # twice without a checkpoint between
        ("crash after a step", 5, 6, 139),
        ("crash after a step", 1, 2, 139),
        ("crash", 0, 1, 139),
        ("your mistake", 5, 1, 2),
    ],
)
def test_ranks_that_fail_start_again_in_the_same_job(standins, tmp_path, trainer, restarts, starts, status):
    """While a new checkpoint comes between two failures, and as often as the site allows."""
    script, run = prepared(standins, "summit", tmp_path / "run", keys=(f"restarts={restarts}",))
    ended, output = run_to_end(standins, script, TRAINER=trainer)
    assert ended == status and len(standins.calls("trainer")) == starts
    found = re.findall(r"ended with (exit status 139 at step \d; restart \d of \d)\n", output)
    steps = [number if trainer == "crash after a step" else 0 for number in range(1, starts)]
    assert found == [f"exit status 139 at step {step}; restart {n} of {restarts}" for n, step in enumerate(steps, 1)]
    lines = (run / "job/restarts").read_text().splitlines() if steps else []
    expected = [f"job 7: exit status 139; from step {step} on 2 nodes, 12 ranks" for step in steps]
    assert [line.split(" ", 1)[1] for line in lines] == expected == read_restarts(run)


@pytest.mark.parametrize("site", ["srun", "mpirun", "hydra", "pals", "flux"])
def test_a_restart_leaves_out_the_nodes_that_do_not_answer(standins, tmp_path, site):
    """n2 is lost: a spare node takes its place, then what is left goes on, and then too few are left."""
    keys = ("spare_nodes=1", "min_nodes=1", "node_local=/tmp")
    script, run = prepared(standins, site, tmp_path / "run", keys, stage=(Path("/packed"),))
    (standins.folder / "hosts").write_text(THREE)
    (standins.folder / "squeue").write_text("RUNNING\n")
    (standins.folder / "lost").write_text("n2 then n1 then n3\n")
    status, output = run_to_end(standins, script, TRAINER="lose a node")
    job = "f7" if site == "flux" else "7"
    each = 12 if site == "pals" else 4
    assert [line.split(" ", 1)[1] for line in (run / "job/restarts").read_text().splitlines()] == [
        f"job {job}: exit status 9, without n2; from step 1 on 2 nodes, {2 * each} ranks: n1 n3",
        f"job {job}: exit status 9, without n1; from step 2 on 1 node, {each} ranks: n3",
    ], output
    assert "nodes left: 0 (), needed: 1; set spare_nodes or min_nodes" in output and status == 85
    assert (run / "job/requeues").read_text() == f"{job} step 3\n"
    # The ranks know how many nodes could be replaced and lost; a failure speaks for its own start alone.
    calls = standins.calls("trainer")
    starts = [call for call in calls if call["words"][2] == "train"]
    assert [call["spares"] for call in starts] == ["1 2\n", "0 1\n", "0 0\n"]
    assert len({call["SUMMIT_TRAIN_FAILURE"] for call in starts}) == 3
    # Each start stages anew, for the nodes that come in fresh.
    assert [call["words"][2] for call in calls] == ["data", "train"] * 3


def test_a_node_that_answers_again_is_used_again(standins, tmp_path):
    script, run = prepared(standins, "hydra", tmp_path / "run", keys=("spare_nodes=1", "restarts=2"))
    (standins.folder / "hosts").write_text(THREE)
    (standins.folder / "lost").write_text("n2 then -n2\n")
    assert run_to_end(standins, script, TRAINER="lose a node")[0] == 9
    lines = (run / "job/restarts").read_text().splitlines()
    assert [line.rpartition(" ranks: ")[2] for line in lines] == ["n1 n3", "n1 n2"]


def test_a_signal_while_nodes_are_asked_hands_the_job_over(standins, tmp_path):
    script, run = prepared(standins, "srun", tmp_path / "run")
    silent = standins.folder / "silent"
    silent.touch()  # nodes let the script wait
    process = started(standins, script, TRAINER="crash after a step")
    wait_for_calls(standins, process, "asked", 3)  # the first start asks both
    (standins.folder / "squeue").write_text("RUNNING\n")
    process.send_signal(signal.SIGUSR2)
    silent.unlink()
    status, output = ended_with(standins, process)
    assert status == 85 and "stopped at step 1; requeued, 1 of 20" in output
    assert len(standins.calls("trainer")) == 1 and not (run / "job/restarts").exists()


def test_a_job_whose_own_node_is_lost_is_requeued_from_another_one(standins, tmp_path):
    """A step on a spare node asks Slurm for the job's nodes. test_lost_nodes.py has a real Slurm."""
    standins.program("scancel", standins.bin / "scancel")
    script, run = prepared(standins, "srun", tmp_path / "run", keys=("spare_nodes=1",), max_requeues=2)
    (standins.folder / "hosts").write_text(THREE)
    assert run_to_end(standins, script, TRAINER="done beside a guard")[0] == 0
    (guard,) = [call for call in standins.calls("srun") if "--watch" in call["command"]]
    assert guard["command"][-1] == "n1" and guard["options"]["--nodelist"] == "n3"
    (run / "job/requeues").touch()
    for left, state, requeued in (
        (THREE, "RUNNING n[1-3]", 0),
        ("n2\nn3\n", "", 0),  # it has ended, or been requeued
        ("n2\nn3\n", "PENDING ", 0),
        ("n2\nn3\n", "COMPLETING n[2-3]", 0),
        *(("n2\nn3\n", "RUNNING n[2-3]", requeued) for requeued in (1, 2, 2)),
    ):
        (standins.folder / "hosts").write_text(left)
        (standins.folder / "squeue").write_text(f"{state}\n")
        words = [sys.executable, "-c", WATCH, *guard["command"][3:]]
        subprocess.run(words, env=standins.environ | SCHEDULERS, check=True)
        assert [call["words"] for call in standins.calls("scontrol")] == [["requeue", "7"]] * requeued
        assert (run / "job/requeues").read_text() == "7 without n1\n" * requeued
    assert [call["words"] for call in standins.calls("scancel")] == [["7"]]
    line = " job 7: requeued, as n1, where its script ran, is lost\n"
    assert (run / "job/restarts").read_text().count(line) == (run / "job/7.out").read_text().count(line) == 2


def test_a_launcher_that_waits_for_a_silent_node_is_ended(standins, tmp_path):
    """After a rank left the reason why it failed."""
    script, run = prepared(standins, "srun", tmp_path / "run")
    waits = '{"look": 0.1, "launcher": 0.5}'
    status, output = run_to_end(standins, script, TRAINER="fail beside a silent node", STANDIN_WAITS=waits)
    assert status == 0 and "the launcher still waits: ending it" in output
    assert ' job 7: "rank 1 on n2: silent"; from step 0' in (run / "job/restarts").read_text()


@pytest.mark.parametrize(
    ("site", "broken"), [*((site, "n2") for site in ("srun", "mpirun", "hydra", "pals", "flux")), ("srun", "n1 n2")]
)
def test_a_node_that_cannot_start_the_program_is_left_out_from_the_start(standins, tmp_path, site, broken):
    """It is up and runs the launcher's own programs. Its reason is in the output, without the launcher's lines."""
    script, run = prepared(standins, site, tmp_path / "run", keys=("spare_nodes=1",))
    (standins.folder / "hosts").write_text(THREE)
    (standins.folder / "broken").write_text(broken)
    status, output = run_to_end(standins, script)
    for node in broken.split():
        assert f"{node} cannot start ranks: python: cannot open shared object file\n" in output
    asked = standins.calls("asked")
    assert sorted(call["node"] for call in asked) == ["n1", "n2", "n3"]
    assert all(call["command"][-2:] == ["--answer", f"{run}/job/spec.yaml"] for call in asked)
    if broken == "n2":
        assert status == 0 and (run / "job/hosts").read_text().replace(" slots=4", "").split() == ["n1", "n3"]
    else:
        assert status == 1 and "nodes left: 1 (n3), needed: 2; set spare_nodes or min_nodes" in output
        assert not standins.calls("trainer")


def test_a_node_that_breaks_between_two_starts_is_left_out(standins, tmp_path):
    """As the replacement of a lost one, too: n3 cannot start ranks, so n1 goes on alone."""
    script, run = prepared(standins, "srun", tmp_path / "run", keys=("spare_nodes=1", "min_nodes=1", "restarts=1"))
    (standins.folder / "hosts").write_text(THREE)
    (standins.folder / "broken").write_text("n3")
    (standins.folder / "lost").write_text("n2")
    _, output = run_to_end(standins, script, TRAINER="lose a node")
    assert output.count("n3 cannot start ranks: python: cannot open shared object file\n") == 2
    assert (run / "job/restarts").read_text().endswith("without n2; from step 1 on 1 node, 4 ranks: n1\n")


DOMAINS = "n1.hsn\nn1.hsn\nn2.hsn\nn3.hsn\n"
DOWN = "n1   offline Xid 74\nn9 down\n"


@pytest.mark.parametrize(
    ("site", "hosts", "bad", "down", "left"),
    [
        *((site, THREE, "\ufeffn1 Xid 74\n# n2\n", "", "n2 n3") for site in ("hydra", "flux", "srun", "mpirun")),
        ("hydra", THREE, "n[1-2]\n", "", "n1 n2"),
        ("hydra", "10.0.0.1\n10.0.0.1\n10.0.0.2\n10.0.0.3\n", "10.0.0.2 slow\n", "", "10.0.0.1 10.0.0.3"),
        ("pals", DOMAINS, "n2\n", "", "n1.hsn n3.hsn"),
        ("pals", DOMAINS, "", DOWN, "n2.hsn n3.hsn"),
    ],
)
def test_bad_nodes_are_left_out_and_missed_where_none_is_spare(standins, tmp_path, site, hosts, bad, down, left):
    """hosts: of the scheduler; down: the answer of pbsnodes. tests/core/test_run_folder.py has the file's forms."""
    script, run = prepared(standins, site, tmp_path / "run")
    (standins.folder / "hosts").write_text(hosts)
    (standins.folder / "pbsnodes").write_text(down)
    (run / "job/bad_nodes").write_text(bad)
    status, output = run_to_end(standins, script)
    assert status == 0, output
    wrong = "job/bad_nodes: 'n[1-2]' must be a node's name; write a line for each node\n"
    assert (wrong in output) == ("[" in bad)
    (trainer,) = standins.calls("trainer")
    options = standins.calls(LAUNCHERS[site])[-1]["options"]
    if site in NEW_JOBS:
        assert trainer["MASTER_ADDR"] == left.split()[0]
        assert trainer["PBS_NODEFILE"] == str(standins.folder / "hosts")
    assert (run / "job/hosts").read_text().replace(" slots=4", "").split() == left.split()
    names = next(options[name] for name in ("--nodelist", "--requires", "--hostfile", "-f") if name in options)
    by_name = site in ("flux", "srun")
    assert names.removeprefix("host:") == (left.replace(" ", ",") if by_name else f"{run}/job/hosts")
    (run / "job/done").unlink()
    (run / "job/bad_nodes").write_text(left.replace(" ", "\n"))
    status, output = run_to_end(standins, script)
    assert status == 1 and "needed: 2; set spare_nodes or min_nodes in the site profile" in output
