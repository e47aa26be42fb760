"""`summit-train doctor --site` on a login node of small programs; test_slurm.py has a real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from summit_train.cluster import doctor_site
from summit_train.cluster.doctor_site import (
    check_account,
    check_host_python,
    check_launcher,
    check_queue,
    check_shared,
    examine_site,
)
from summit_train.cluster.probe import Check
from summit_train.cluster.scheduler import user_name
from summit_train.cluster.schedulers import SCHEDULERS
from summit_train.cluster.site import Site, load_site
from summit_train.core.errors import RunFailed
from tests.cluster.test_doctor import program

PARTITIONS = """\
echo 'PartitionName=long Default=NO MaxNodes=UNLIMITED MaxTime=2-12:00:00 TotalNodes=64 State=UP'
echo 'PartitionName=gpu AllowGroups=ALL Default=YES MaxNodes=8 MaxTime=08:00:30 TotalNodes=64 State=UP'"""
NOWHERE = 'if [ "$4" = nowhere ]; then echo "Partition nowhere not found" >&2; exit 1; fi\n'
QUEUES = f"{NOWHERE}{{ {PARTITIONS}; }} | grep =${{4:-}}"


@pytest.fixture
def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that is first on PATH, also in login shells."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(doctor_site, "_POLL_S", 0.05)
    modules = 'module() { [ "$2" != absent ] || { echo "Unable to locate a modulefile for $2" >&2; return 1; }; }'
    (tmp_path / ".bash_profile").write_text(f"PATH='{folder}':$PATH\n{modules}\n")
    return folder


def _site(*keys: str) -> Site:
    return load_site("slurm_generic", keys)


@pytest.mark.parametrize(
    ("keys", "status", "found", "fix"),
    [
        ((), "ok", "/bin/srun", ""),
        (("modules=[gcc, cuda/12.8]",), "ok", "/bin/srun", ""),
        (("modules=[gcc, absent]",), "fail", "Unable to locate a modulefile for absent", "modules and setup must work"),
        (("setup=[echo said, exit 3]",), "fail", "said", "modules and setup must work"),
        (("setup=['PATH=/nowhere']",), "fail", "no srun on PATH", "and put srun on PATH"),
        (("setup=[sleep 60]",), "fail", "no answer within 2 s", "modules and setup must work"),
    ],
)
def test_modules_and_setup_are_run_and_must_lead_to_the_launcher(login, keys, status, found, fix, monkeypatch):
    program(login, "srun", "exit 0")
    monkeypatch.setattr(doctor_site, "ANSWER_S", 2.0)
    check = check_launcher(_site(*keys))
    assert (check.name, check.status) == ("launcher", status) and check.found.endswith(found) and fix in check.fix


@pytest.mark.parametrize(("site", "has_own"), [("slurm_generic", True), ("pbs_generic", False)])
def test_the_launcher_is_the_one_that_a_job_finds(login, tmp_path, monkeypatch, site, has_own):
    """The environment's own comes first, but not before the machine's mpiexec."""
    (tmp_path / "venv").mkdir()
    monkeypatch.setattr("sys.executable", str(tmp_path / "venv/python"))
    for folder in (login, tmp_path / "venv"):
        for name in ("srun", "mpiexec"):
            program(folder, name, "exit 0")
    found = Path(check_launcher(load_site(site)).found)
    assert found.parent == (tmp_path / "venv" if has_own else login)


@pytest.mark.parametrize(
    ("script", "account", "expected"),
    [
        ("printf 'b2\\na1\\nb2\\n'", "a1", ("ok", "a1; yours: a1, b2", "")),
        ("printf 'b2\\na1\\n'", None, ("ok", "none; yours: a1, b2", "")),
        ("printf 'b2\\na1\\n'", "c3", ("fail", "c3 is not yours", "set account to one of a1, b2")),
        ("echo no database >&2; exit 1", "a1",
         ("warn", "a1, not checked: sacctmgr refused (exit status 1): no database", "")),
    ],
)  # fmt: skip
def test_the_account_is_one_that_the_scheduler_knows(login, script, account, expected):
    program(login, "sacctmgr", script)
    check = check_account(_site(*([f"account={account}"] if account else [])))
    assert (check.status, check.found, check.fix) == expected


CAPS = "walltime_caps=[{nodes: %s, walltime: %s}]"


@pytest.mark.parametrize(
    ("keys", "status", "found"),
    [
        ((CAPS % (8, "8:00"),), "ok", "the default: 8:00 on 8 nodes"),
        ((CAPS % (9, "8:00"),), "warn", "the default: 8:00 on 8 nodes"),
        ((CAPS % (8, "8:01"),), "warn", "the default: 8:00 on 8 nodes"),
        ((), "warn", "the default: 8:00 on 8 nodes"),
        ((CAPS % (64, "60:00"), "queue=long"), "ok", "long: 60:00 on 64 nodes"),
        (("queue=nowhere",), "fail", "scontrol refused (exit status 1): Partition nowhere not found"),
    ],
)
def test_the_queue_exists_and_allows_what_the_profile_allows(login, keys, status, found):
    program(login, "scontrol", QUEUES)
    check = check_queue(_site(*keys))
    assert (check.status, check.found) == (status, found)
    if status == "warn":
        assert check.fix.endswith('set walltime_caps, such as [{nodes: 8, walltime: "8:00"}]')


def test_a_scheduler_that_is_missing_or_silent_is_a_finding(login, monkeypatch):
    monkeypatch.setattr("summit_train.cluster.scheduler._ANSWER_S", 0.2)
    program(login, "scontrol", "exec sleep 60")
    assert check_queue(_site()).found == "scontrol did not answer within 0.2 s"
    monkeypatch.setenv("PATH", str(login))
    missing = "none, not checked: sacctmgr cannot be started: No such file or directory"
    assert check_account(_site()).found == missing


def test_a_queue_without_limits_allows_everything(login):
    program(login, "scontrol", "echo 'PartitionName=a Default=YES MaxNodes=UNLIMITED MaxTime=UNLIMITED TotalNodes=n'")
    assert check_queue(_site()) == Check("queue", "ok", "the default: any time on any number of nodes")
    program(login, "scontrol", "echo 'PartitionName=a Default=NO MaxTime=UNLIMITED'")
    assert check_queue(_site()).found == "Slurm has no default partition"
    assert check_queue(load_site("lsf_generic")) == Check("queue", "warn", "the default, not checked on lsf")


def test_the_file_system_is_that_of_the_longest_mount_above(tmp_path):
    (tmp_path / "mounts").write_text(f"a / ext4 rw 0 0\nb {tmp_path} nfs4 rw 0 0\nc {tmp_path}/runs2 xfs rw 0 0\n")
    check = check_shared("runs", tmp_path / "runs/not/yet", tmp_path / "mounts")
    assert (check.status, check.found) == ("ok", f"{tmp_path}/runs/not/yet: nfs4 at {tmp_path}")
    check = check_shared("runs", tmp_path / "runs2", tmp_path / "mounts")
    assert check.status == "warn" and check.found.endswith(f"xfs at {tmp_path}/runs2") and "--submit" in check.fix


def test_a_site_is_examined_as_far_as_this_machine_can(login, tmp_path):
    for name, script in (("sbatch", ""), ("scontrol", QUEUES), ("sacctmgr", "echo a1")):
        program(login, name, script)
    site = _site("requires=[account]", "notes=[drained on Tuesdays]", "comm=torch")
    found = {check.name: check for check in examine_site(site, tmp_path)}
    each = "slurm_generic: slurm, srun; 4 ranks of 8 cores, 4 GPUs a node"
    need = "give --set account=..., or write it into the profile"
    assert found["profile"] == Check("profile", "fail", each, need)
    assert found["note"] == Check("note", "warn", "drained on Tuesdays")
    assert found["ranks"].found == "torch, by SUMMIT_TRAIN_COMM"
    assert found["scheduler"] == Check("scheduler", "ok", f"{login}/sbatch")
    names = ["launcher", "disk for runs", "runs on the nodes", "Python on the nodes", "scheduler", "account", "queue"]
    assert list(found) == ["profile", "note", "ranks", *names]
    *_, last = examine_site(load_site("lsf_generic"), tmp_path)
    assert last == Check("scheduler", "fail", "no bsub on PATH", "use a login node of lsf_generic")
    assert [check.name for check in examine_site(load_site("local"), tmp_path)][-1] == "disk for runs"


# What the trial job's script is run as by a scheduler of small programs, which writes its output as Slurm does.
SBATCH = "echo '%s' > 7.out\necho 7"


@pytest.mark.parametrize(
    ("ranks", "failed"),
    [
        ([{"node": "n", "GPUs": 4, "cores": 8}] * 4, []),
        ([{"node": "n", "GPUs": 1, "cores": 8}] * 4, []),  # as with --gpus-per-task=1
        ([{"node": "n", "GPUs": 4, "cores": 8}] * 3, ["node: ranks"]),
        ([], ["node: ranks"]),
        ([{"node": "n", "GPUs": 4, "cores": 8}] * 3 + [{"node": "n", "GPUs": 3, "cores": 8}], ["node: GPUs"]),
        ([{"node": "n", "GPUs": 4, "cores": 8}] * 3 + [{"node": "n", "GPUs": 4, "cores": 7}], ["node: cores"]),
    ],
)
def test_what_the_ranks_of_the_trial_have_is_held_against_the_profile(login, say, tmp_path, ranks, failed):
    check = {"name": "torch", "status": "ok", "found": "2.13", "fix": ""}
    program(login, "sbatch", SBATCH % json.dumps({"ok": True, "checks": [check], "ranks": ranks}))
    for name, script in (("squeue", ""), ("srun", ""), ("scontrol", QUEUES), ("sacctmgr", "echo a1")):
        program(login, name, script)
    status, out, _ = say("doctor", "--site", "slurm_generic", "--submit", "--run-dir", tmp_path / "runs", "--json")
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert checks["node: torch"]["found"] == "2.13" and checks["trial job"]["found"].startswith("7 has ended; ")
    assert [name for name, check in checks.items() if check["status"] == "fail"] == failed
    assert status == bool(failed)
    script = (tmp_path / "runs/doctor_slurm_generic/job/job.sh").read_text()
    command = f"-m summit_train doctor --json --run-dir {tmp_path}/runs/doctor_slurm_generic --node-local /tmp\n"
    assert command in script and "spec.yaml" not in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_a_trial_without_findings_fails_with_its_last_words(login, say, tmp_path, monkeypatch):
    monkeypatch.setattr("summit_train.cluster.doctor_site._LATE_S", 0.1)
    for name, script in (("sbatch", SBATCH % "srun: error: Unable to create step"), ("squeue", ""), ("srun", "")):
        program(login, name, script)
    words = ("doctor", "--site", "slurm_generic", "--submit", "--run-dir", tmp_path)
    status, out, _ = say(*words)
    assert status == 1 and "fail  trial job                   srun: error: Unable to create step\n" in out
    # Its former output is not taken for that of the next one.
    program(login, "sbatch", "echo 8")
    assert "fail  trial job                   no output: do the nodes see this folder?\n" in say(*words)[1]


@pytest.mark.parametrize(
    ("python", "status", "found"),
    [
        (sys.executable, "ok", ": 3."),
        ("{login}/python", "fail", ": 3.6.8"),
        ("/no/python", "fail", ": [Errno 2]"),
    ],
)
def test_what_starts_the_keeper_is_tried(login, python, status, found):
    program(login, "python", "echo 3.6.8\nexit 1")
    python = python.format(login=login)
    check = check_host_python(python)
    assert check.status == status and check.found.startswith(f"{python}{found}")
    assert (check.fix == "host_python must be Python 3.9 or newer, on all nodes") == (status == "fail")


def test_a_container_is_checked_as_far_as_a_login_node_can(login, tmp_path, monkeypatch):
    monkeypatch.chdir("/usr")  # apptainer itself binds /tmp and the home folder, in one of which the checkout may be
    program(login, "apptainer", "exit 0")
    image = tmp_path / "image.sif"
    keys = ["container.runtime=apptainer", f"container.image={image}", "container.binds=[/elsewhere]"]
    found = [
        check for check in examine_site(_site(*keys, "node_local=/local"), Path("/runs")) if "contain" in check.name
    ]
    assert [(check.name, check.status, check.found) for check in found] == [
        ("container's runtime", "ok", f"{login}/apptainer"),
        ("container", "warn", f"container.binds lack the working folder {Path.cwd()}: ranks may not find it"),
        ("container", "warn", "container.binds lack runs /runs: ranks may not find it"),
        ("container", "warn", "container.binds lack node_local /local: ranks may not find it"),
        ("container", "warn", f"container.image: no file {image} on this machine"),
        ("container on the nodes", "ok", f"apptainer with {image}: not tried here; --submit tries it"),
    ]
    image.touch()
    keys[2] = f"container.binds=[/runs, {Path.cwd()}, '/scratch:/local']"
    names = [check.name for check in examine_site(_site(*keys, "node_local=/local/me"), Path("/runs"))]
    assert "container" not in names
    (login / "apptainer").unlink()
    checks = {check.name: check for check in examine_site(_site(*keys), tmp_path)}
    assert checks["container's runtime"].status == "fail" or shutil.which("apptainer")


def test_a_user_whose_number_has_no_name_is_a_finding(monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 4_200_042)
    words = "user 4200042 has no name in the password database; set USER to it"
    assert check_account(_site()) == Check("account", "warn", f"none, not checked: {words}")
    with pytest.raises(RunFailed, match=words):
        SCHEDULERS["pbs"].states()
    monkeypatch.setenv("USER", "me")
    assert user_name() == "me"
