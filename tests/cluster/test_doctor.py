"""The doctor's findings, on this machine and on machines made up of small programs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from summit_train.__main__ import main
from summit_train.cli import doctor as command
from summit_train.cluster import doctor
from summit_train.cluster.doctor import Check, Status, available_cpus, check_disk
from summit_train.core import processes
from summit_train.core.errors import RunFailed
from summit_train.core.processes import ROOT_ALLOWED, find_mpirun, mpirun_command, probe, refuses_root


def program(folder: Path, name: str, text: str) -> Path:
    """An executable shell script."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_torch_is_found_with_its_build() -> None:
    check = doctor.check("torch")
    assert check.status == "ok"
    assert check.found.startswith("2.")
    assert "threads" in check.found


def test_the_decoders_that_data_sets_need_are_there() -> None:
    check = doctor.check("video")
    assert check.status == "ok", check
    assert "decodes h264, mpeg4, vp9, hevc" in check.found


def test_a_lost_decoder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DECODERS", ("h264", "nonesuch"))
    check = doctor.check("video")
    assert check.status == "warn"
    assert "nonesuch" in check.mend


def test_what_export_needs() -> None:
    check = doctor.check("export")
    assert check.status == "ok" and check.found.startswith("onnx 1."), check


def test_export_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe", lambda *_: {"onnx": "1.23.2", "onnxruntime": None, "onnxscript": None})
    check = doctor.check("export")
    assert check.status == "warn" and check.found == "no onnxruntime, onnxscript"
    assert check.mend.endswith("pip install onnx onnxruntime onnxscript")


def test_a_package_that_cannot_be_imported_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = doctor.check("torch")
    assert check.status == "fail"
    assert check.found == "ImportError: libtorch.so: cannot open shared object file"
    assert "make setup" in check.mend


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="no Horovod here: make setup builds it")
class TestWithHorovod:
    def test_it_was_built_with_mpi_for_this_torch(self) -> None:
        check = doctor.check("horovod")
        assert check.status in ("ok", "warn"), check
        assert "built with MPI" in check.found

    def test_mpi4py_uses_the_same_mpi(self) -> None:
        check = doctor.check("mpi4py")
        assert check.status == "ok", check

    def test_two_ranks_allreduce(self) -> None:
        check = doctor.check_allreduce()
        assert check.status == "ok", check


def test_a_horovod_for_another_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"version": "0.28.1", "mpi": True, "nccl": False, "gpus": 0, "torch": "2.13.0", "built_for": "1.13.1"}
    monkeypatch.setattr(doctor, "probe", lambda *_: facts)
    check = doctor.check("horovod")
    assert (check.status, check.found) == ("fail", "0.28.1, built with MPI for torch 1.13.1")
    assert "rebuilds Horovod" in check.mend


def test_ranks_that_do_not_know_each_other_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What ranks say that an mpirun of another MPI started: each believes to be alone."""
    alone = json.dumps({"by": "Horovod and mpi4py", "size": 1, "total": 1.0, "gathered": [0]})
    other = program(tmp_path, "mpirun", f"echo '{alone}'\necho '{alone}'")
    monkeypatch.setattr(doctor, "find_mpirun", lambda: str(other))
    check = doctor.check_allreduce()
    assert check.status == "fail"
    assert "'size': 1" in check.found
    assert "different MPIs" in check.mend


@pytest.mark.parametrize(
    ("library", "is_mpi"),
    [
        ("/usr/lib/libmpi.so.40.30.4", True),
        ("/opt/mpich/lib/libmpich.so.12", True),
        ("/opt/ibm/lib/libmpi_ibm.so.3", True),
        ("/usr/lib/libmpi_cxx.so.40", False),
        ("/usr/lib/libmpifort.so.12", False),
        ("/usr/lib/libmpi_usempif08.so.40", False),
    ],
)
def test_parts_of_one_mpi_are_not_taken_for_another(library: str, is_mpi: bool) -> None:
    assert bool(re.search(doctor.MPI_LIBRARY, library)) == is_mpi


def test_an_mpirun_that_hangs_fails_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hangs = program(tmp_path, "mpirun", '[ "$1" = --version ] && exit\nexec sleep 60')
    monkeypatch.setattr(doctor, "find_mpirun", lambda: str(hangs))
    check = doctor.check_allreduce(timeout=0.5)
    assert check.status == "fail"
    assert check.found == "no answer within 0.5 s"


def test_an_mpirun_that_refuses_root_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mpirun = program(tmp_path, "mpirun", "echo 'mpirun (Open MPI) 4.1.8'")
    monkeypatch.setattr("summit_train.core.processes.find_mpirun", lambda: str(mpirun))
    monkeypatch.setattr(doctor, "find_mpirun", lambda: str(mpirun))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name in ROOT_ALLOWED:
        monkeypatch.delenv(name, raising=False)
    check = doctor.check_mpi()
    assert check.status == "warn" and check.found == f"mpirun (Open MPI) 4.1.8 at {mpirun}"
    assert "needs OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1: export both" in check.mend
    assert not refuses_root({}, ["--allow-run-as-root"])
    assert not refuses_root(ROOT_ALLOWED)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert doctor.check_mpi().status == "ok"


def install(monkeypatch: pytest.MonkeyPatch, *installed: str, wish: str | None = None) -> None:
    """Of mpirun, horovod and mpi4py only these are installed, and SUMMIT_TRAIN_COMM says `wish`."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in installed or None)
    monkeypatch.setattr(doctor, "find_mpirun", lambda: "/bin/true" if "mpirun" in installed else None)
    monkeypatch.delenv("SUMMIT_TRAIN_COMM", raising=False)
    if wish is not None:
        monkeypatch.setenv("SUMMIT_TRAIN_COMM", wish)


def examined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, tuple[Status, str]]:
    """Status and finding of the checks that ranks need, where every program that a check starts breaks."""

    def broken(*_: object) -> processes.Facts:
        raise RunFailed("it breaks")

    monkeypatch.setattr(doctor, "probe", broken)
    others = ("python", "torch", "kernels", "video", "export", "gpus", "cpus", "shared memory", "disk for")
    checks = [check for check in doctor.examine(tmp_path) if not check.name.startswith(others)]
    return {check.name: (check.status, check.found) for check in checks}


def test_ranks_without_horovod_and_mpi_are_joined_by_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch)
    left_out = ("ok", "not installed; ranks are joined by torch.distributed (torchrun)")
    assert examined(monkeypatch, tmp_path) == {
        "ranks": ("ok", "torch: Horovod or mpi4py is not installed"),
        "horovod": left_out,
        "mpi4py": left_out,
        "mpi": left_out,
        "allreduce, 2 ranks by torch": ("fail", "it breaks"),
    }


def test_a_machines_own_mpi_does_not_ask_for_horovod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, "mpirun", "mpi4py")
    found = examined(monkeypatch, tmp_path)
    assert found["horovod"][0] == "ok" and found["mpi"][1].endswith("at /bin/true")
    assert found["mpi4py"] == ("fail", "it breaks")


@pytest.mark.parametrize("wish", [None, "torch"])
def test_a_horovod_that_is_broken_fails_whatever_torch_can_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wish: str | None
) -> None:
    """Where Horovod joins the ranks, torch's failure is a warning."""
    install(monkeypatch, "mpirun", "horovod", "mpi4py", wish=wish)
    found = examined(monkeypatch, tmp_path)
    assert all(found[name] == ("fail", "it breaks") for name in ("horovod", "mpi4py", "allreduce, 2 ranks"))
    assert found["ranks"][1].startswith("torch, by SUMMIT_TRAIN_COMM" if wish else "horovod under mpirun")
    assert found["allreduce, 2 ranks by torch"] == ("fail" if wish else "warn", "it breaks")


@pytest.mark.parametrize(("installed", "missing"), [((), "mpirun"), (("mpirun",), "horovod")])
def test_a_horovod_that_is_asked_for_must_be_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: tuple[str, ...], missing: str
) -> None:
    install(monkeypatch, *installed, wish="horovod")
    found = examined(monkeypatch, tmp_path)
    lacks = "SUMMIT_TRAIN_COMM=horovod needs horovod and mpi4py, not installed here"
    assert found["ranks"] == ("fail", lacks)
    assert all(found[name][0] == "fail" for name in ("horovod", "mpi4py", "allreduce, 2 ranks"))
    assert (found["mpi"] == ("fail", "no mpirun")) == (missing == "mpirun")


def test_horovod_without_mpirun_or_mpi4py(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, "horovod")
    found = examined(monkeypatch, tmp_path)
    assert found["mpi"] == ("fail", "no mpirun") and found["mpi4py"] == ("fail", "it breaks")
    assert found["allreduce, 2 ranks"] == ("fail", "not tried: no mpirun")


def test_a_back_end_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, wish="gloo")
    found = "SUMMIT_TRAIN_COMM must be horovod, torch or auto, got 'gloo'"
    assert doctor.check_ranks() == Check("ranks", "fail", found, "unset SUMMIT_TRAIN_COMM")


def test_two_ranks_of_torchrun_allreduce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUMMIT_TRAIN_COMM", "horovod")  # of no concern to this check
    check = doctor.check_torch_allreduce()
    assert check == Check("allreduce, 2 ranks by torch", "ok", "the sum and the gather of torch (gloo) are right")


def test_why_a_rank_of_torchrun_failed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that it failed, which torchrun says last."""
    command = processes.torchrun_command(2)
    with pytest.raises(RunFailed, match=r"^ValueError: no such interface$"):
        probe("raise ValueError('no such interface')", 120, command)


def test_the_environments_own_mpirun_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "on_path").mkdir()
    (tmp_path / "own").mkdir()
    other = program(tmp_path / "on_path", "mpirun", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path / "on_path"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own" / "python"))
    assert find_mpirun() == str(other)
    own = program(tmp_path / "own", "mpirun", "exit 0")
    assert find_mpirun() == str(own)


@pytest.mark.parametrize(
    ("version", "words"),
    [("mpirun (Open MPI) 4.1.8", ["--oversubscribe", "--bind-to", "none"]), ("HYDRA build details:", [])],
)
def test_mpirun_gets_only_words_that_it_knows(tmp_path: Path, version: str, words: list[str]) -> None:
    mpirun = str(program(tmp_path, "mpirun", f"echo '{version}'"))
    assert mpirun_command(mpirun, 3) == [mpirun, "-np", "3", *words]


def test_root_is_allowed_only_for_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in processes.mpi_environment({})
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert processes.mpi_environment({"HOME": "/root"})["OMPI_ALLOW_RUN_AS_ROOT"] == "1"


def test_a_probe_tells_the_programs_last_words() -> None:
    with pytest.raises(RunFailed, match="ZeroDivisionError: division by zero"):
        probe("1 / 0", 30)
    with pytest.raises(RunFailed, match="exit status 3"):
        probe("raise SystemExit(3)", 30)
    assert probe("print('noise'); print(json.dumps({'answer': 42}))", 30) == {"answer": 42}


def gpu_facts(archs: list[str], capability: list[int]) -> processes.Facts:
    """What torch says of two equal GPUs."""
    device = {"name": "Tesla V100", "memory": 16 * doctor.GIB, "capability": capability}
    return {"cuda": "13.0", "archs": archs, "nccl": [2, 29, 7], "devices": [device, device]}


def test_a_torch_without_code_for_the_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe", lambda *_: gpu_facts(["sm_75", "sm_80", "sm_90"], [7, 0]))
    check = doctor.check("gpus")
    assert check.status == "fail"
    assert "no code for Tesla V100" in check.mend


@pytest.mark.parametrize("archs", [["sm_70"], ["sm_90", "compute_60"]])
def test_gpus_are_counted(monkeypatch: pytest.MonkeyPatch, archs: list[str]) -> None:
    monkeypatch.setattr(doctor, "probe", lambda *_: gpu_facts(archs, [7, 0]))
    check = doctor.check("gpus")
    assert check.status == "ok"
    assert check.found == "2 x Tesla V100 (16 GiB); CUDA 13.0, NCCL 2.29.7"


def test_a_gpu_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "probe", lambda *_: {"cuda": None, "archs": [], "nccl": None, "devices": []})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.check("gpus") == Check("gpus", "ok", "none; training runs on the CPU")
    program(tmp_path, "nvidia-smi", 'echo "GPU 0: NVIDIA H200 (UUID: GPU-1)"')
    check = doctor.check("gpus")
    assert check.status == "warn"
    assert check.found == "GPU 0: NVIDIA H200, which torch does not see"
    assert "built for the CPU" in check.mend


def test_a_containers_quota_cuts_the_cpus(tmp_path: Path) -> None:
    affinity = len(os.sched_getaffinity(0))
    assert available_cpus(tmp_path) == affinity
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert available_cpus(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_cpus(tmp_path) == affinity


def test_disk_is_looked_at_where_the_folder_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = check_disk("disk", tmp_path / "not" / "yet")
    assert check.status in ("ok", "warn")
    assert str(tmp_path / "not" / "yet") in check.found
    usage = shutil.disk_usage(tmp_path)._replace(free=doctor.GIB // 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert check_disk("disk", tmp_path).status == "fail"


def test_a_folder_below_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert check_disk("disk", tmp_path / "file" / "runs").status == "fail"


@pytest.mark.parametrize(("status", "exit_status"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_the_exit_status_and_the_two_forms(
    status: Status, exit_status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [Check("python", "ok", "3.12.1"), Check("mpi", status, "no mpirun", "load a module")]
    monkeypatch.setattr(command, "examine", lambda *_: iter(checks))
    assert main(["doctor"]) == exit_status
    text = capsys.readouterr().out.splitlines()
    assert text[1].split() == [status, "mpi", "no", "mpirun"]
    assert text[2].strip() == "-> load a module"
    assert main(["doctor", "--json"]) == exit_status
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] == (status != "fail")
    assert answer["checks"][1] == {"name": "mpi", "status": status, "found": "no mpirun", "mend": "load a module"}
