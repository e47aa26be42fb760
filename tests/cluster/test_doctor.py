"""The doctor's findings, on this machine and on machines made up of small programs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from summit_train.__main__ import main
from summit_train.cli import doctor as command
from summit_train.cluster import doctor
from summit_train.cluster.doctor import available_cpus, check_disk
from summit_train.cluster.probe import GIB, MPI_LIBRARY, Check, judge_gpus, judge_horovod, probe_torch
from summit_train.core import machine, processes
from summit_train.core.comm import open_world
from summit_train.core.comm.launch import this_launch
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.processes import ROOT_ALLOWED, find_mpirun, mpirun_command, refuses_root
from tests.worlds import PATIENCE_S, environment, forked

NO_HOROVOD = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="no Horovod; make setup builds it")
AV = """
__version__, library_versions = "17", {"libavcodec": (62, 1)}
def Codec(name, mode):
    if name in MISSING[mode]:
        raise ValueError
"""


def program(folder: Path, name: str, text: str) -> str:
    """An executable shell script."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return str(folder / name)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("torch", r"2\..* threads?"),
        ("video", r"PyAV .*, decodes h264, mpeg4, vp9, hevc, encodes libx264.*"),
        ("export", r"onnx 1\..*, onnxruntime 1\..*, onnxscript 0\..*"),
        pytest.param("horovod", r".* built with MPI.*", marks=NO_HOROVOD),
        pytest.param("mpi4py", r".*", marks=NO_HOROVOD),
    ],
)
def test_what_this_machine_has_is_found(name, found):
    check = doctor.check(name)
    assert check.status == "ok" or (name, check.status) == ("horovod", "warn")
    assert re.fullmatch(found, check.found), check


def test_a_torch_that_is_too_new_is_a_warning(monkeypatch):
    """As another package may install it."""
    monkeypatch.setattr(machine, "TESTED_TORCH", ("1.0", "2.1"))
    check = probe_torch()
    assert check.status == "warn" and "pip install 'torch==2.1.*'" in check.fix


@pytest.mark.parametrize(
    ("module", "text", "name", "status", "found", "fix"),
    [
        ("torch", "raise ImportError('libtorch.so')", "torch", "fail", "ImportError: libtorch.so", "run `make setup`"),
        ("av", AV + "MISSING = {'r': ['hevc'], 'w': []}", "video", "warn",
         "PyAV 17, libavcodec 62.1, decodes h264, mpeg4, vp9, encodes libx264, mpeg4", "missing: hevc; pip install"),
        # The motion set is then written by mpeg4.
        ("av", AV + "MISSING = {'r': [], 'w': ['libx264']}", "video", "ok",
         "PyAV 17, libavcodec 62.1, decodes h264, mpeg4, vp9, hevc, encodes mpeg4", ""),
        ("av", AV + "MISSING = {'r': [], 'w': ['libx264', 'mpeg4']}", "video", "warn",
         "PyAV 17, libavcodec 62.1, decodes h264, mpeg4, vp9, hevc, encodes nothing", "missing: an encoder for the"),
        # Its metadata is there, its library cannot be loaded.
        ("onnxruntime", "raise ImportError('libonnx.so: cannot open')", "export", "warn",
         "no onnxruntime (libonnx.so: cannot open)", "networks: pip install --force-reinstall onnxruntime"),
        ("onnx", "raise ModuleNotFoundError('gone')", "export", "warn", "no onnx (gone)", "networks: pip install onnx"),
    ],
)  # fmt: skip
def test_a_package_that_breaks_or_lacks_a_codec(module, text, name, status, found, fix, monkeypatch, tmp_path):
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = doctor.check(name)
    assert check.status == status and found in check.found and fix in check.fix, check


def test_kernels_that_cannot_be_loaded_are_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", program(tmp_path, "c++", 'for last; do :; done\necho "no library" > "$last"'))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check = doctor.check("kernels")
    assert check.status == "warn" and "cannot be loaded" in check.found and "set XDG_CACHE_HOME" in check.fix


HOROVOD = {"version": "0.28.1", "mpi": True, "nccl": False, "gpus": 0, "torch": "2.13.0", "built_for": "1.13.1"}
V100 = {"name": "Tesla V100", "memory": 16 * GIB, "capability": [7, 0]}
GPUS = {"cuda": "13.0", "nccl": [2, 29, 7], "devices": [V100, V100]}
TWO_V100 = "2 x Tesla V100 (16 GiB); CUDA 13.0, NCCL 2.29.7"


@pytest.mark.parametrize(
    ("judge", "facts", "status", "found", "fix"),
    [
        (judge_horovod, HOROVOD, "fail", "0.28.1, built with MPI for torch 1.13.1",
         "torch 2.13.0 is installed: run `summit-train build-horovod`"),
        (judge_horovod, HOROVOD | {"built_for": "2.13.0", "gpus": 1}, "warn", "0.28.1, built with MPI for torch 2.13.0",
         "gradients go through the host"),
        (judge_gpus, GPUS | {"archs": ["sm_75", "sm_80", "sm_90"]}, "fail", TWO_V100, "no code for Tesla V100"),
        (judge_gpus, GPUS | {"archs": ["sm_60"]}, "fail", TWO_V100, "no code for Tesla V100"),
        (judge_gpus, GPUS | {"archs": ["sm_70"]}, "ok", TWO_V100, ""),
        (judge_gpus, GPUS | {"archs": ["sm_90", "compute_60"]}, "ok", TWO_V100, ""),
    ],
)  # fmt: skip
def test_facts_are_judged(judge, facts, status, found, fix):
    check = judge(**facts)
    assert (check.status, check.found) == (status, found) and fix in check.fix


def test_a_gpu_that_torch_does_not_see(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    none = {"devices": [], "archs": [], "cuda": None, "nccl": None}
    assert judge_gpus(**none) == Check("gpus", "ok", "none; training runs on the CPU")
    program(tmp_path, "nvidia-smi", 'echo "GPU 0: NVIDIA H200 (UUID: GPU-1)"')
    fix = "this torch is built for the CPU: install one for CUDA (make setup TORCH=...)"
    assert judge_gpus(**none) == Check("gpus", "warn", "GPU 0: NVIDIA H200, which torch does not see", fix)


@NO_HOROVOD
def test_two_ranks_of_mpirun_allreduce():
    assert doctor.check_allreduce().status == "ok"


@pytest.mark.nightly
def test_two_ranks_of_torchrun_allreduce(monkeypatch):
    monkeypatch.setenv("SUMMIT_TRAIN_COMM", "horovod")  # of no concern to this check
    check = doctor.check_torch_allreduce()
    assert check == Check("allreduce, 2 ranks by torch", "ok", "the sum and the gather of torch (gloo) are right")


@pytest.mark.parametrize(
    ("script", "seconds", "found", "fix"),
    [
        # Ranks that an mpirun of another MPI starts: each believes to be alone.
        ('shift 2\n"$@"\nexec "$@"', PATIENCE_S, "'size': 1", "different MPIs"),
        ("exec sleep 60", 0.5, "no answer within 0.5 s", "fix what fails above"),
    ],
)
def test_an_mpirun_of_another_mpi_or_one_that_hangs_fails(script, seconds, found, fix, monkeypatch, tmp_path):
    mpirun = program(tmp_path, "mpirun", f'[ "$1" = --version ] && exit\n{script}')
    monkeypatch.setattr(processes, "find_mpirun", lambda: mpirun)
    monkeypatch.setattr(doctor, "ANSWER_S", seconds)
    check = doctor.check_allreduce()
    assert check.status == "fail" and found in check.found and fix in check.fix


def test_parts_of_one_mpi_are_not_taken_for_another():
    mpis = ["/usr/lib/libmpi.so.40.30.4", "/opt/mpich/lib/libmpich.so.12", "/opt/ibm/lib/libmpi_ibm.so.3"]
    parts = ["/usr/lib/libmpi_cxx.so.40", "/usr/lib/libmpifort.so.12", "/usr/lib/libmpi_usempif08.so.40"]
    assert [path for path in mpis + parts if re.search(MPI_LIBRARY, path)] == mpis


@pytest.mark.parametrize("user", [0, 1000])
def test_an_mpirun_that_refuses_root_says_what_it_needs(monkeypatch, tmp_path, user):
    mpirun = program(tmp_path, "mpirun", "echo 'mpirun (Open MPI) 4.1.8'")
    monkeypatch.setattr(processes, "find_mpirun", lambda: mpirun)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    for name in ROOT_ALLOWED:
        monkeypatch.delenv(name, raising=False)
    check = doctor.check_mpi()
    assert (check.status, check.found) == ("ok" if user else "warn", f"mpirun (Open MPI) 4.1.8 at {mpirun}")
    fix = "needs OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1: export both"
    assert (fix in check.fix) == ("OMPI_ALLOW_RUN_AS_ROOT" in processes.mpi_environment({})) == (user == 0)
    assert not refuses_root(ROOT_ALLOWED)


LEFT_OUT = ("ok", "not installed; ranks are joined by torch.distributed (torchrun)")
BREAKS, MPI = ("fail", "it breaks"), ("ok", " at /bin/true")
MISSING = ("fail", "SUMMIT_TRAIN_COMM=horovod needs horovod and mpi4py, not installed here")
RANKS, TORCH_RANKS = "allreduce, 2 ranks", "allreduce, 2 ranks by torch"
ALL = ("mpirun", "horovod", "mpi4py")


@pytest.mark.parametrize(
    ("installed", "asked", "expected"),
    [
        ((), "auto", {"ranks": ("ok", "torch: Horovod or mpi4py is not installed"), "horovod": LEFT_OUT,
                      "mpi4py": LEFT_OUT, "mpi": LEFT_OUT, TORCH_RANKS: BREAKS}),
        # A machine's own MPI does not ask for Horovod.
        (("mpirun", "mpi4py"), "auto", {"horovod": LEFT_OUT, "mpi4py": BREAKS, "mpi": MPI}),
        # Where Horovod joins the ranks, torch's failure is a warning.
        (ALL, "auto", {"ranks": ("ok", "horovod under mpirun"), "horovod": BREAKS, "mpi4py": BREAKS, RANKS: BREAKS,
                       TORCH_RANKS: ("warn", "it breaks")}),
        (ALL, "torch", {"ranks": ("ok", "torch, by SUMMIT_TRAIN_COMM"), "horovod": BREAKS, TORCH_RANKS: BREAKS}),
        (("horovod",), "auto", {"mpi": ("fail", "no mpirun"), RANKS: ("fail", "not tried: no mpirun")}),
        (("mpirun",), "horovod", {"ranks": MISSING, "horovod": BREAKS, "mpi4py": BREAKS, "mpi": MPI, RANKS: BREAKS}),
        ((), "gloo", {"ranks": ("fail", "SUMMIT_TRAIN_COMM must be horovod, torch or auto, got 'gloo'")}),
    ],
)  # fmt: skip
def test_what_ranks_need_depends_on_what_is_installed_and_asked_for(installed, asked, expected, monkeypatch, tmp_path):
    """Of mpirun, horovod and mpi4py only these are installed, and every program that a check starts breaks."""

    def broken(*_: object) -> processes.Facts:
        raise RunFailed("it breaks")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in installed or None)
    monkeypatch.setattr(processes, "find_mpirun", lambda: "/bin/true" if "mpirun" in installed else None)
    monkeypatch.setattr(processes, "answer", broken)
    for name, value in (ROOT_ALLOWED | {"SUMMIT_TRAIN_COMM": asked}).items():
        monkeypatch.setenv(name, value)  # the same finding for root as for others
    found = {check.name: check for check in doctor.examine(tmp_path)}
    for name, (status, text) in expected.items():
        assert found[name].status == status and text in found[name].found, found[name]
    assert (RANKS in found) == (asked == "horovod" or "horovod" in installed)


def test_the_environments_own_mpirun_comes_first(monkeypatch, tmp_path):
    other = program(tmp_path / "on_path", "mpirun", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path / "on_path"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own" / "python"))
    assert find_mpirun() == other
    assert program(tmp_path / "own", "mpirun", "exit 0") == find_mpirun()


def test_mpirun_gets_only_words_that_it_knows(tmp_path):
    open_mpi = program(tmp_path, "open_mpi", "echo 'mpirun (Open MPI) 4.1.8'")
    words = ["--oversubscribe", "--bind-to", "none", "-x", "OPAL_OUTPUT_STDERR_FD=2"]
    assert mpirun_command(open_mpi, 3) == [open_mpi, "-np", "3", *words]
    assert mpirun_command(open_mpi, 6, ["a", "b"]) == [open_mpi, "-np", "6", "--host", "a:3,b:3", *words]
    hydra = program(tmp_path, "hydra", "echo 'HYDRA build details:'")
    assert mpirun_command(hydra, 3) == [hydra, "-np", "3"]
    with pytest.raises(UserError, match=r"^--hosts must be used with Open MPI, but .*/hydra is another MPI's; start"):
        mpirun_command(hydra, 6, ["a", "b"])


@pytest.mark.parametrize(
    ("text", "prefix", "error"),
    [
        ("1 / 0", [], "^ZeroDivisionError: division by zero$"),
        ("raise SystemExit(3)", [], "^exit status 3$"),
        # The rank's reason, not that it failed, which torchrun says last.
        ("raise ValueError('no such')", processes.torchrun_command(2), "^ValueError: no such$"),
    ],
)
def test_a_probe_tells_why_the_program_failed(text, prefix, error):
    with pytest.raises(RunFailed, match=error):
        processes.answer([*prefix, sys.executable, "-c", text], 120, None)
    answers = "import json; print('noise'); print(json.dumps({'answer': 42}))"
    assert processes.answer([sys.executable, "-c", answers], 30, None) == {"answer": 42}


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "50000 100000\n"}, 0.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "25000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.25),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_a_containers_quota_cuts_the_cpus(tmp_path, files, cpus):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert available_cpus(tmp_path) == (cpus or len(os.sched_getaffinity(0)))


def test_disk_is_looked_at_where_the_folder_will_be(tmp_path, monkeypatch):
    check = check_disk("disk", tmp_path / "not" / "yet")
    assert check.status in ("ok", "warn") and str(tmp_path / "not" / "yet") in check.found
    (tmp_path / "file").write_text("")
    assert check_disk("disk", tmp_path / "file" / "runs").status == "fail"
    usage = shutil.disk_usage(tmp_path)._replace(free=GIB // 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert check_disk("disk", tmp_path).status == "fail"


@pytest.mark.parametrize(("status", "exit_status"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_the_exit_status_and_the_two_forms(status, exit_status, monkeypatch, capsys):
    checks = [Check("python", "ok", "3.12.1"), Check("mpi", status, "no mpirun", "load a module")]
    monkeypatch.setattr(command, "examine", lambda *_, alone: iter(checks))
    assert main(["doctor"]) == exit_status
    text = capsys.readouterr().out.splitlines()
    assert text[1].split() == [status, "mpi", "no", "mpirun"]
    assert text[2].strip() == "-> load a module"
    assert main(["doctor", "--json"]) == exit_status
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] == (status != "fail")
    assert answer["checks"][1] == {"name": "mpi", "status": status, "found": "no mpirun", "fix": "load a module"}


def test_a_node_answers_if_a_rank_could_start_there(tmp_path, monkeypatch, capsys):
    spec, room = tmp_path / "spec.yaml", tmp_path / "room"
    room.mkdir()
    monkeypatch.setenv("TMPDIR", str(room))
    assert main(["doctor", "--answer", str(spec)]) == 1
    assert f"{spec}: No such file or directory" in capsys.readouterr().err
    spec.touch()
    assert main(["doctor", "--answer", str(spec)]) == 0
    assert capsys.readouterr() == ("", "") and not list(room.iterdir())
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    assert main(["doctor", "--answer", str(spec)]) == 0  # as where the first node alone has it


def test_a_full_temporary_folder_is_no_answer(tmp_path):
    """A limit of half a mebibyte for a file ends as a full disk does."""
    words = ["bash", "-c", 'ulimit -f 512; exec "$0" -m summit_train doctor --answer "$0"', sys.executable]
    done = subprocess.run(words, env=environment(TMPDIR=str(tmp_path)), capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == f"summit-train: {tmp_path}: File too large\n"


def test_each_node_with_a_finding_about_its_disk_is_named(tmp_path):
    def work() -> int:
        rank = this_launch().rank
        os.environ["SLURMD_NODENAME"] = f"n{rank}"
        world = open_world()
        for file, wrong in ((tmp_path, []), (tmp_path / "file", ["n1", "n2"])):
            (found, *more) = doctor.check_disks(world, str(file / "x" if rank else tmp_path))
            if rank == 0:
                assert [check.found.partition(": ")[0] for check in (found, *more) if wrong] == wrong
                assert wrong or found.status == "warn" or (found.found.endswith(f"at {tmp_path}") and not more)
        world.close()
        return 0

    (tmp_path / "file").touch()
    status, output = forked(3, work)
    assert status == 0, output
