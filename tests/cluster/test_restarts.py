"""Job scripts whose ranks fail or whose nodes are bad or lost start the ranks again in the same job, on other nodes.

As in test_scripts.py, launchers and trainer are stand-ins, bash and the signals are real.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
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
)
from tests.standins import Standins
from tests.worlds import PATIENCE_S

# A watch that says when it has looked once.
WATCH = """
import signal, sys, time
from summit_train.cluster import keeper
looks = []
def sleep(seconds, sleep=time.sleep):
    if seconds != 30:  # while a program runs
        return sleep(seconds)
    looks.append(seconds)
    if len(looks) == 2:
        print("looked", flush=True)
        signal.pause()
time.sleep = sleep
keeper.main(sys.argv[1:])
print("ended", flush=True)
"""


@pytest.fixture
def standins(tmp_path: Path) -> Standins:
    return Standins(tmp_path / "stand ins")


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
def test_ranks_that_fail_start_again_in_the_same_job(
    standins: Standins, tmp_path: Path, trainer: str, restarts: int, starts: int, status: int
) -> None:
    """While a new checkpoint comes between two failures, and as often as the site allows."""
    script, run = prepared(standins, "summit", tmp_path / "run", keys=(f"restarts={restarts}",))
    ended, output = run_to_end(standins, script, TRAINER=trainer)
    assert ended == status and len(standins.calls("trainer")) == starts
    lines = (run / "job/restarts").read_text().splitlines() if starts > 1 else []
    assert (
        len(lines) == starts - 1 == len(re.findall(rf"exit status 139 at step \d; restart \d of {restarts}\n", output))
    )
    for number, line in enumerate(lines, 1):
        step = number if trainer == "crash after a step" else 0
        assert line.endswith(f" job 7: exit status 139; from step {step} on 2 nodes, 12 ranks")
    assert read_restarts(run) == [line.split(" ", 1)[1] for line in lines]


@pytest.mark.parametrize("site", ["srun", "mpirun", "hydra", "pals", "flux"])
def test_a_restart_leaves_out_the_nodes_that_do_not_answer(standins: Standins, tmp_path: Path, site: str) -> None:
    """n2 is lost: a spare node takes its place, then what is left goes on, and then too few are left."""
    script, run = prepared(
        standins,
        site,
        tmp_path / "run",
        keys=("spare_nodes=1", "min_nodes=1", "node_local=/tmp"),
        stage=(Path("/packed"),),
    )
    (standins.folder / "hosts").write_text("n1\nn2\nn3\n")
    (standins.folder / "squeue").write_text("RUNNING\n")
    (standins.folder / "lost").write_text("n2 then n1 then n3\n")
    status, output = run_to_end(standins, script, TRAINER="lose a node")
    lines = [line.split(" ", 1)[1] for line in (run / "job/restarts").read_text().splitlines()]
    job = "f7" if site == "flux" else "7"
    each = 12 if site == "pals" else 4
    assert lines == [
        f"job {job}: exit status 9, without n2; from step 1 on 2 nodes, {2 * each} ranks: n1 n3",
        f"job {job}: exit status 9, without n1; from step 2 on 1 node, {each} ranks: n3",
    ], output
    assert "nodes left: 0 (), needed: 1; set spare_nodes or min_nodes" in output and status == 85
    assert (run / "job/requeues").read_text() == f"{job} step 3\n"
    # The ranks know how many nodes could be replaced and lost; a failure speaks for its own start alone.
    starts = [call for call in standins.calls("trainer") if call["words"][2] == "train"]
    assert [call["spares"] for call in starts] == ["1 2\n", "0 1\n", "0 0\n"]
    assert len({call["SUMMIT_TRAIN_FAILURE"] for call in starts}) == 3
    # Each start stages anew, for the nodes that come in fresh.
    assert [call["words"][2] for call in standins.calls("trainer")] == ["data", "train"] * 3


def test_a_node_that_answers_again_is_used_again(standins: Standins, tmp_path: Path) -> None:
    script, run = prepared(standins, "hydra", tmp_path / "run", keys=("spare_nodes=1", "restarts=2"))
    (standins.folder / "hosts").write_text("n1\nn2\nn3\n")
    (standins.folder / "lost").write_text("n2 then -n2\n")
    assert run_to_end(standins, script, TRAINER="lose a node")[0] == 9
    lines = (run / "job/restarts").read_text().splitlines()
    assert [line.rpartition(" ranks: ")[2] for line in lines] == ["n1 n3", "n1 n2"]


def test_a_signal_while_nodes_are_asked_hands_the_job_over(standins: Standins, tmp_path: Path) -> None:
    script, run = prepared(standins, "srun", tmp_path / "run")
    silent = standins.folder / "silent"
    silent.touch()  # nodes let the script wait
    process = started(standins, script, TRAINER="crash after a step")
    deadline = time.monotonic() + PATIENCE_S
    while len(standins.calls("asked")) <= 2:  # the first start asks both
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    (standins.folder / "squeue").write_text("RUNNING\n")
    process.send_signal(signal.SIGUSR2)
    silent.unlink()
    status, output = ended_with(standins, process)
    assert status == 85 and "stopped at step 1; requeued, 1 of 20" in output
    assert len(standins.calls("trainer")) == 1 and not (run / "job/restarts").exists()


def test_a_job_whose_own_node_is_lost_is_requeued_from_another_one(standins: Standins, tmp_path: Path) -> None:
    """A step on n2 asks Slurm for the job's nodes. test_lost_nodes.py has a real Slurm."""
    standins.program("scancel", standins.bin / "scancel")
    script, run = prepared(standins, "srun", tmp_path / "run", keys=("spare_nodes=1",), max_requeues=2)
    (standins.folder / "hosts").write_text("n1\nn2\nn3\n")
    assert run_to_end(standins, script, TRAINER="done beside a guard")[0] == 0
    (guard,) = [call for call in standins.calls("srun") if "--watch" in call["command"]]
    assert guard["command"][-1] == "n1"
    assert guard["options"]["--nodelist"] == "n3"  # a spare one
    (run / "job/requeues").touch()
    looks = [("n1\nn2\nn3\n", "RUNNING n[1-3]", 0)]
    looks += [
        ("n2\nn3\n", state, 0) for state in ("", "PENDING ", "COMPLETING n[2-3]")
    ]  # it has ended, or been requeued
    looks += [("n2\nn3\n", "RUNNING n[2-3]", requeued) for requeued in (1, 2, 2)]
    for left, state, requeued in looks:
        (standins.folder / "hosts").write_text(left)
        (standins.folder / "squeue").write_text(f"{state}\n")
        words = ["-c", WATCH, *guard["command"][3:]]
        watch = subprocess.Popen([sys.executable, *words], env=standins.environ | SCHEDULERS, stdout=subprocess.PIPE)
        assert watch.stdout is not None
        watch.stdout.readline()
        watch.kill()
        watch.wait()
        assert [call["words"] for call in standins.calls("scontrol")] == [["requeue", "7"]] * requeued
        assert (run / "job/requeues").read_text() == "7 without n1\n" * requeued
    assert [call["words"] for call in standins.calls("scancel")] == [["7"]]
    line = " job 7: requeued, as n1, where its script ran, is lost\n"
    assert (run / "job/restarts").read_text().count(line) == (run / "job/7.out").read_text().count(line) == 2


def test_a_launcher_that_waits_for_a_silent_node_is_ended(standins: Standins, tmp_path: Path) -> None:
    """After a rank left the reason why it failed."""
    script, run = prepared(standins, "srun", tmp_path / "run")
    waits = '{"look": 0.1, "launcher": 0.5}'
    status, output = run_to_end(standins, script, TRAINER="fail beside a silent node", STANDIN_WAITS=waits)
    assert status == 0 and "the launcher still waits: ending it" in output
    assert ' job 7: "rank 1 on n2: silent"; from step 0' in (run / "job/restarts").read_text()


@pytest.mark.parametrize(
    ("site", "broken"), [*((site, "n2") for site in ("srun", "mpirun", "hydra", "pals", "flux")), ("srun", "n1 n2")]
)
def test_a_node_that_cannot_start_the_program_is_left_out_from_the_start(
    standins: Standins, tmp_path: Path, site: str, broken: str
) -> None:
    """It is up and runs the launcher's own programs. Its reason is in the output, without the launcher's lines."""
    script, run = prepared(standins, site, tmp_path / "run", keys=("spare_nodes=1",))
    (standins.folder / "hosts").write_text("n1\nn2\nn3\n")
    (standins.folder / "broken").write_text(broken)
    status, output = run_to_end(standins, script)
    for node in broken.split():
        assert f"{node} cannot start ranks: python: cannot open shared object file\n" in output
    asked = standins.calls("asked")
    assert sorted(call["node"] for call in asked) == ["n1", "n2", "n3"]
    assert {*map(tuple, (call["command"][-2:] for call in asked))} == {("--answer", f"{run}/job/spec.yaml")}
    if broken == "n2":
        assert status == 0 and (run / "job/hosts").read_text().replace(" slots=4", "").split() == ["n1", "n3"]
    else:
        assert status == 1 and "nodes left: 1 (n3), needed: 2; set spare_nodes or min_nodes" in output
        assert not standins.calls("trainer")


def test_a_node_that_breaks_between_two_starts_is_left_out(standins: Standins, tmp_path: Path) -> None:
    """As the replacement of a lost one, too: n3 cannot start ranks, so n1 goes on alone."""
    script, run = prepared(standins, "srun", tmp_path / "run", keys=("spare_nodes=1", "min_nodes=1", "restarts=1"))
    (standins.folder / "hosts").write_text("n1\nn2\nn3\n")
    (standins.folder / "broken").write_text("n3")
    (standins.folder / "lost").write_text("n2")
    _, output = run_to_end(standins, script, TRAINER="lose a node")
    assert output.count("n3 cannot start ranks: python: cannot open shared object file\n") == 2
    assert (run / "job/restarts").read_text().endswith("without n2; from step 1 on 1 node, 4 ranks: n1\n")


THREE = "n1\nn2\nn3\n"
DOMAINS = "n1.hsn\nn1.hsn\nn2.hsn\nn3.hsn\n"
# What the scheduler names as the job's hosts, job/bad_nodes, what pbsnodes says of hosts, and the hosts that are used.
BAD_NODES = [
    (THREE, "\n# n2\n n1 Xid 74\n", "", "n2 n3"),
    (THREE, "", "", "n1 n2"),
    (THREE, "\ufeffn1\r\n", "", "n2 n3"),
    (THREE, "n2: ECC", "", "n1 n3"),
    (THREE, "n9,n1\n", "", "n2 n3"),
    (THREE, "n[1-2]\n", "", "n1 n2"),
    ("10.0.0.1\n10.0.0.1\n10.0.0.2\n10.0.0.3\n", "10.0.0.2 slow\n", "", "10.0.0.1 10.0.0.3"),
    (DOMAINS, "n2\n", "", "n1.hsn n3.hsn"),
    (DOMAINS, "", "n1   offline Xid 74\nn9 down\n", "n2.hsn n3.hsn"),
]


@pytest.mark.parametrize(
    ("site", "cases"),
    [
        # All scripts read the file in the same way; they differ in how they name hosts.
        pytest.param("hydra", BAD_NODES, marks=pytest.mark.nightly),
        ("pals", BAD_NODES[7:]),
        ("flux", BAD_NODES[:1]),
        ("srun", BAD_NODES[:1]),
        ("mpirun", BAD_NODES[:1]),
    ],
)
def test_bad_nodes_are_left_out_and_missed_where_none_is_spare(
    standins: Standins, tmp_path: Path, site: str, cases: list[tuple[str, str, str, str]]
) -> None:
    script, run = prepared(standins, site, tmp_path / "run")
    for hosts, bad, down, left in cases:
        (standins.folder / "hosts").write_text(hosts)
        (standins.folder / "pbsnodes").write_text(down)
        (run / "job/bad_nodes").write_text(bad)
        status, output = run_to_end(standins, script)
        assert status == 0
        wrong = "job/bad_nodes: 'n[1-2]' must be a node's name; write a line for each node\n"
        assert (wrong in output) == ("[" in bad) == ("must be" in output)
        (run / "job/done").unlink()
        trainer, options = standins.calls("trainer")[-1], standins.calls(LAUNCHERS[site])[-1]["options"]
        if site in NEW_JOBS:
            assert trainer["MASTER_ADDR"] == left.split()[0]
            assert trainer["PBS_NODEFILE"] == str(standins.folder / "hosts")
        file = str(run / "job/hosts")
        if site in ("flux", "srun"):
            named = options.get("--requires") or options["--nodelist"]
            assert named.removeprefix("host:").split(",") == left.split()
        else:
            assert options["-f" if site == "hydra" else "--hostfile"] == file
        assert Path(file).read_text().replace(" slots=4", "").split() == left.split()
    (run / "job/bad_nodes").write_text("n1\nn2\n")
    status, output = run_to_end(standins, script)
    assert status == 1 and "needed: 2; set spare_nodes or min_nodes in the site profile" in output
