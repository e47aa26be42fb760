"""Files are written whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import time
from pathlib import Path

import pytest

from summit_train.core.errors import RunFailed, UserError, describe, is_bug
from summit_train.core.files import (
    cache_folder,
    check_output,
    file_sha256,
    is_locked,
    locked,
    naming,
    read_file,
    remove_leftovers,
    replacing,
    write_json,
    write_text,
)  # fmt: skip
from tests.killing import another_holds, killed_at
from tests.runs import full_disk


def test_the_new_content_takes_the_old_one_s_place(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "a.json", {"a": 1})
    write_json(tmp_path / "new" / "a.json", {"a": 2})
    assert (tmp_path / "new" / "a.json").read_text() == '{\n "a": 2\n}\n'
    assert os.listdir(tmp_path / "new") == ["a.json"]


def test_an_error_in_the_block_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "old")
    with pytest.raises(OSError, match="down") as caught, replacing(tmp_path / "a") as file:
        file.write(b"new")
        raise OSError(100, "Network is down")
    assert caught.value.filename is None
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "old")
    with pytest.raises(OSError, match="File too large") as caught, full_disk():
        write_text(tmp_path / "a", "new")
    assert describe(caught.value) == f"{tmp_path}/a: File too large"
    assert (tmp_path / "a").read_text() == "old" and os.listdir(tmp_path) == ["a"]
    with pytest.raises(OSError, match="No space left") as caught, naming("log"), open("/dev/full", "w") as file:
        file.write("new")
    assert describe(caught.value) == "log: No space left on device"


def test_a_process_killed_while_it_writes_leaves_the_old_or_the_new_content(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "old")
    number = 1
    while killed_at(number, tmp_path, lambda: write_text(tmp_path / "a", "new")):
        assert (tmp_path / "a").read_text() == "old"
        number += 1
    assert number > 2 and (tmp_path / "a").read_text() == "new"


def test_a_name_that_is_no_utf8_is_written_as_its_bytes(tmp_path: Path) -> None:
    write_text(tmp_path / "names", os.fsdecode(b"a\xff.mp4"))
    assert (tmp_path / "names").read_bytes() == b"a\xff.mp4"


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    not_regular = "is not a regular file"
    for path, why in ((tmp_path / "fifo", not_regular), (Path("/dev/zero"), not_regular), (tmp_path, "Is a directory")):
        for read in (read_file, file_sha256):
            with pytest.raises(OSError, match=why) as caught:
                read(path)
            assert caught.value.filename == str(path)


def test_too_many_open_files_are_one_line_whatever_met_them_and_a_bug_keeps_its_traceback() -> None:
    error, bug = RuntimeError("a library's words"), KeyError("missing")
    error.__context__ = bug.__context__ = OSError(errno.EMFILE, "Too many open files")
    error.__suppress_context__ = True  # raised from None
    assert re.fullmatch(r"too many open files: the limit of [\d,-]+ for a process is too low; .*", describe(error))
    assert is_bug(bug) and describe(bug).endswith("KeyError: 'missing'") and "Too many" in describe(bug)


def test_a_value_of_ten_megabytes_is_not_echoed_whole() -> None:
    text = describe(RunFailed(f"list.csv:1: got {'x' * 10_000_000!r}; try y"))
    assert text.startswith("list.csv:1: got 'xxx") and "[10,000,025 characters in all]" in text
    assert text.endswith("xxx'; try y") and len(text) < 5000


def test_a_lock_is_seen_from_outside_and_ends_with_its_holder(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "lock")
    with another_holds(tmp_path / "lock"):
        assert is_locked(tmp_path / "lock")
    assert not is_locked(tmp_path / "lock")
    with locked(tmp_path / "lock"):
        assert not is_locked(tmp_path / "lock")  # this process's own


def test_whether_a_file_can_be_written_is_known_before(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "old")
    check_output("--out", "a", tmp_path / "a")
    check_output("--out", "new", tmp_path / "new" / "b")
    assert (tmp_path / "a").read_text() == "old" and os.listdir(tmp_path / "new") == []
    for wrong, reason in (
        (tmp_path, "is not a regular file"),
        (Path("/dev/null"), "is not a regular file"),
        (tmp_path / "a" / "b", "Not a directory"),
        (Path("/proc/a"), "No such file"),
    ):
        with pytest.raises(UserError, match=f"^--out x: cannot be written: {reason}"):
            check_output("--out", "x", wrong)
    assert sorted(os.listdir(tmp_path)) == ["a", "new"]
    (tmp_path / "link").symlink_to("a")
    for spelling in ("a", "link", "new/../a"):
        with pytest.raises(UserError, match=r"^--out must be another file than .*/a, which it would replace$"):
            check_output("--out", spelling, tmp_path / spelling, tmp_path / "new", tmp_path / "a")
    check_output("--out", "b", tmp_path / "b", tmp_path / "a", tmp_path / "b")  # which is not there yet


def test_a_user_without_a_home_is_named_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "~no_such_user/cache")
    with pytest.raises(OSError, match="no home folder; set XDG_CACHE_HOME"):
        cache_folder()


def test_what_killed_writes_left_is_removed_unless_its_process_may_live(tmp_path: Path) -> None:
    """Process 1 lives; a number above the kernel's largest is nobody's. Another host's is given an hour."""
    host, nobody = os.uname().nodename, 1 << 22 | 1
    kept = {f".a.1@{host}", ".a.1@elsewhere.org", ".c.json.1"}  # the last as earlier versions, without a host
    old = {".b.1@elsewhere.org", ".d.json.1", ".é@x.1@elsewhere.org"}
    folder = tmp_path / "predictions"
    folder.mkdir()
    for name in kept | old | {f".a.{nobody}@{host}"}:
        (folder / f"{name}.writing").touch()
    for name in old:
        os.utime(folder / f"{name}.writing", (time.time() - 3700,) * 2)
    remove_leftovers(tmp_path)
    assert {path.name for path in folder.iterdir()} == {f"{name}.writing" for name in kept}


def test_a_killed_write_is_known_by_its_name(tmp_path: Path) -> None:
    for number in range(1, 4):
        killed_at(number, tmp_path, lambda: write_text(tmp_path / "plan.json", "new"))
    assert len(list(tmp_path.glob(".plan.json.*.writing"))) > 0
    remove_leftovers(tmp_path)
    assert list(tmp_path.glob(".*")) == []
