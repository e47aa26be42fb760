"""One run at a time in a folder, by a lock; and the nodes that a job script leaves out."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from summit_train.cluster.doctor import check_disk
from summit_train.core.errors import RunFailed, UserError
from summit_train.core.run_folder import FAILURE, RunLock, Spares, bad_nodes, name_bad_nodes, spares, wait_for_lock
from tests.conftest import WriteSpec
from tests.killing import another_holds
from tests.worlds import Say


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setenv(FAILURE, str(tmp_path / "job/failure"))  # a restart in a job does not wait for them
    with pytest.raises(UserError, match=r"file system gives no POSIX locks .*mounted with locks \(Lustre: -o flock"):
        RunLock(tmp_path)
    found = check_disk("disk for runs", tmp_path)
    assert found.status == "fail" and "gives no POSIX locks" in found.found and "-o flock" in found.fix


def test_a_restart_in_a_job_waits_for_the_lock_of_a_lost_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder is another process, as a POSIX lock binds only others. It lets go after the first attempt."""
    (tmp_path / "lock").write_text("n1, process 7\n")
    ticks = list[float]()
    with ExitStack() as holder:
        holder.enter_context(another_holds(tmp_path / "lock"))
        with pytest.raises(UserError, match=r"another run is using this directory \(n1, process 7\)"):
            RunLock(tmp_path)
        wait_for_lock(tmp_path, lambda: pytest.fail("waited outside of a job"))
        monkeypatch.setenv("SUMMIT_TRAIN_FAILURE", "job/failure.1.1")
        with pytest.raises(RunFailed, match="another run is using this directory"):
            RunLock(tmp_path)
        monkeypatch.setattr(time, "sleep", lambda _: None)
        monkeypatch.setattr(time, "monotonic", lambda: len(ticks) * 1.0)
        wait_for_lock(tmp_path, lambda: ticks.append(1))
        assert len(ticks) == 100
        ticks.clear()
        monkeypatch.setattr(time, "sleep", lambda _: holder.close())
        wait_for_lock(tmp_path, lambda: ticks.append(1))
    assert len(ticks) == 1
    with RunLock(tmp_path):
        pass


def test_the_watchdog_knows_of_a_wait_for_a_lock(
    write_spec: WriteSpec, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait may be longer than watch.stall_seconds."""

    def wait(run_path: Path, tick: Callable[[], None]) -> None:
        heard.clear()
        tick()
        raise RunFailed("that is enough")

    heard = list[str]()
    monkeypatch.setattr("summit_train.training.start.wait_for_lock", wait)
    monkeypatch.setattr("summit_train.core.watch.Watchdog.at", lambda _, where, **more: heard.append(where))
    status, _, err = say("train", write_spec("one"))
    assert (status, heard) == (1, ["waiting for the lock of a lost rank"]) and "that is enough" in err


def test_outside_a_job_nothing_is_written(tmp_path: Path) -> None:
    assert name_bad_nodes(tmp_path, {"n1": "slow"}) == []
    assert list(tmp_path.iterdir()) == []
    assert spares(tmp_path) == Spares(0, 0)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("# n0\n\n n1 Xid 74\n  # n2\n", ["n1"]),
        ("n1\r\nn2 slow\r\n", ["n1", "n2"]),
        ("n1: ECC\nn2:ECC\nn3 : ECC", ["n1", "n2", "n3"]),
        ("n1,n2\nn3;slow\nn4, n5\n", ["n1", "n2", "n3", "slow", "n4"]),
        ("10.0.0.1\nfe80::1 slow\nn1.hsn\n", ["10.0.0.1", "fe80::1", "n1.hsn"]),
        ("n[4-6]\n", ["n[4-6]"]),  # the job script refuses it
    ],
)
def test_a_line_names_nodes_as_people_write_them(tmp_path: Path, text: str, names: list[str]) -> None:
    assert bad_nodes(tmp_path) == []
    (tmp_path / "job").mkdir()
    (tmp_path / "job/bad_nodes").write_text(text, newline="")
    assert bad_nodes(tmp_path) == names


@pytest.mark.parametrize("before", [b"n1: ECC\r\nn2,slow", b"\xef\xbb\xbfn1\n# \xfcberhitzt\nn2", b"# mine\nn1\nn2\n"])
def test_a_node_is_added_once_on_a_line_of_its_own(tmp_path: Path, before: bytes) -> None:
    (tmp_path / "job").mkdir()
    (path := tmp_path / "job" / "bad_nodes").write_bytes(before)
    assert name_bad_nodes(tmp_path, {"n1": "again", "n2": "again"}) == []
    assert path.read_bytes() == before
    assert name_bad_nodes(tmp_path, {"n2": "again", "n3": "does not answer"}) == ["n3"]
    assert path.read_bytes() == before.removesuffix(b"\n") + b"\nn3 does not answer\n"
