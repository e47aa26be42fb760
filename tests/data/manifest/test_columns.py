from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from summit_train.data.manifest import columns
from summit_train.data.manifest.columns import StoredRows, cached_folder, file_key, map_column, write_table
from tests.worlds import ROOT


def write_column(path: Path, values: np.ndarray, dtype: object) -> None:
    write_table(path.parent, {path.stem: dtype}, [{path.stem: values}])  # type: ignore[dict-item]


@pytest.mark.parametrize("dtype", ["<i4", "<u4", "<i8", "u1", "?"])
@pytest.mark.parametrize("lengths", [[], [0], [3], [5, 0, 1_000]])
def test_what_is_written_piece_by_piece_is_a_numpy_file(tmp_path: Path, dtype: str, lengths: list[int]) -> None:
    parts = [np.arange(length).astype(dtype) for length in lengths]
    write_table(tmp_path, {"a": dtype}, ({"a": part} for part in parts))
    wanted = np.concatenate([np.zeros(0, dtype), *parts])
    loaded = np.load(tmp_path / "a.npy")
    mapped = map_column(tmp_path / "a.npy", dtype)
    for array in (loaded, mapped):
        assert array.dtype == np.dtype(dtype)
        assert np.array_equal(array, wanted)
    assert len(mapped) == 0 or not mapped.flags.writeable


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300), start=st.integers(-10, 310), stop=st.integers(-10, 310))
def test_stored_bytes_are_sliced_as_bytes_are(tmp_path: Path, content: bytes, start: int, stop: int) -> None:
    write_column(tmp_path / "b.npy", np.frombuffer(content, np.uint8), np.uint8)
    stored = StoredRows(tmp_path / "b.npy", np.uint8)
    assert len(stored) == len(content)
    part = slice(max(0, start), max(0, start, stop))
    assert stored[part].tobytes() == content[part]
    assert stored[0 : len(content)].tobytes() == content


def test_what_is_no_such_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    with pytest.raises(ValueError, match=r"a\.npy: cannot be read as a column: No such file"):
        map_column(path, np.int32)
    write_column(path, np.arange(4), np.int32)
    whole = path.read_bytes()
    with pytest.raises(ValueError, match=r"a\.npy: is no column of int64, or it is damaged"):
        map_column(path, np.int64)
    assert map_column(path, np.int64, np.int32).tolist() == [0, 1, 2, 3]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"a\.npy: is no column"):
            map_column(path, np.int32)
    for place in range(512):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"a\.npy: is no column"):
            map_column(path, np.int32)


def test_rows_of_fields_are_numpys_too(tmp_path: Path) -> None:
    dtype = np.dtype([("shard", "<u4"), ("start", "<i8")])
    rows = np.array([(1, 2), (3, 4), (5, 6)], dtype)
    write_column(tmp_path / "a.npy", rows, dtype)
    assert np.array_equal(np.load(tmp_path / "a.npy", mmap_mode="r"), rows)
    assert np.array_equal(StoredRows(tmp_path / "a.npy", dtype)[1:3], rows[1:])


# Folders that are made once.


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in a folder of its own; the user's cache folder and the temporary one are below tmp_path too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "list.csv"
    path.write_bytes(bytes(range(256)) * 1000)
    return path


def _fill(folder: Path) -> None:
    (folder / "content").write_text("worked out")


def _made(folder: Path | None) -> str:
    assert folder is not None
    assert os.listdir(folder) == ["content"]
    return (folder / "content").read_text()


def test_a_folder_is_built_once(source: Path) -> None:
    first = cached_folder(source, file_key(source), _fill)
    assert _made(first) == "worked out"
    assert first is not None and first.parent == source.parent

    def again(folder: Path) -> None:
        raise AssertionError("it is there")

    assert cached_folder(source, file_key(source), again) == first
    assert sorted(os.listdir(source.parent)) == sorted([first.name, "list.csv"])


@pytest.mark.parametrize("change", ["time", "size", "middle", "more"])
def test_the_key_changes_with_the_file(source: Path, change: str) -> None:
    before, status = file_key(source), source.stat()
    more = []
    if change == "size":
        source.write_bytes(source.read_bytes() + b"x")
    elif change == "middle":
        whole = source.read_bytes()
        source.write_bytes(b"?" * len(whole))
    elif change == "more":
        more = ["a class"]
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns + (change == "time")))
    assert file_key(source, *more) != before
    assert len(bytes.fromhex(before)) == 16


def test_an_error_of_the_building_leaves_nothing(source: Path) -> None:
    def fail(folder: Path) -> None:
        _fill(folder)
        raise ValueError("line 7 is wrong")

    with pytest.raises(ValueError, match="line 7"):
        cached_folder(source, file_key(source), fail)
    assert os.listdir(source.parent) == ["list.csv"]
    assert _made(cached_folder(source, file_key(source), _fill)) == "worked out"


@pytest.mark.parametrize("full", [1, 2, 3])
def test_where_nothing_can_be_written_the_next_place_is_taken(source: Path, full: int) -> None:
    asked: list[Path] = []

    def build(folder: Path) -> None:
        asked.append(folder)
        if len(asked) <= full:
            raise OSError(errno.ENOSPC, "no space left on device")
        _fill(folder)

    found = cached_folder(source, file_key(source), build)
    places = [source.parent, source.parents[1] / "cache" / "summit_train", source.parents[1] / "tmp"]
    below = [next(number for number, place in enumerate(places) if place in folder.parents) for folder in asked]
    if full == 3:
        assert found is None
        assert below == [0, 1, 2]
    else:
        assert _made(found) == "worked out"
        assert below == list(range(full + 1))
        assert cached_folder(source, file_key(source), build) == found
        assert len(asked) == full + 1
    assert os.listdir(source.parent) == ["list.csv"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_is_read_only(source: Path) -> None:
    source.parent.chmod(0o555)
    found = cached_folder(source, file_key(source), _fill)
    assert found is not None and found.parent.name == "summit_train"


def test_a_temporary_folder_that_others_can_write_to_is_not_used(source: Path) -> None:
    folder = source.parents[1] / "tmp" / f"summit_train-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert folder not in [place.parent for place in columns._places(source)]
    folder.chmod(0o700)
    assert folder in [place.parent for place in columns._places(source)]


def test_folders_of_an_older_state_stay_for_a_while(source: Path) -> None:
    states = []
    for number in range(3):
        source.write_text(f"state {number}")
        states.append(cached_folder(source, file_key(source), _fill))
        if number == 0:
            os.utime(states[0], (0, 0))  # type: ignore[arg-type]
    assert [state is not None and state.is_dir() for state in states] == [False, True, True]


# What other processes do meanwhile.

_BUILDER = textwrap.dedent(
    """
    import os, sys, time
    from pathlib import Path
    from summit_train.data.manifest.columns import cached_folder, file_key
    source, seconds = Path(sys.argv[1]), float(sys.argv[2])
    def build(folder):
        print("building", flush=True)
        time.sleep(seconds)
        (folder / "content").write_text("worked out")
    print(cached_folder(source, file_key(source), build), flush=True)
    """
)


def _builder(source: Path, seconds: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", _BUILDER, str(source), str(seconds)]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_of_many_processes_one_builds(source: Path) -> None:
    outputs = [process.communicate()[0].split() for process in [_builder(source, 1) for _ in range(5)]]
    assert sum("building" in words for words in outputs) == 1
    assert len({words[-1] for words in outputs}) == 1


def test_a_builder_that_was_killed_is_not_waited_for(source: Path) -> None:
    process = _builder(source, 600)
    assert process.stdout is not None
    assert process.stdout.readline() == "building\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(os.listdir(source.parent)) == 2
    began = time.monotonic()
    found = cached_folder(source, file_key(source), _fill)
    assert time.monotonic() - began < 60
    assert _made(found) == "worked out"
    assert found is not None
    assert sorted(os.listdir(source.parent)) == sorted([found.name, "list.csv"])


def test_what_a_builder_on_another_node_left_is_no_obstacle(source: Path) -> None:
    building = source.parent / f".list.csv.{file_key(source)}.building"
    (building / "of another node").mkdir(parents=True)
    (building / "lock").touch()
    found = cached_folder(source, file_key(source), _fill)
    assert _made(found) == "worked out"
    assert found is not None
    assert sorted(os.listdir(source.parent)) == sorted([found.name, "list.csv"])


def test_where_locks_do_not_reach_the_first_to_finish_wins(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "locked", lambda path: nullcontext(path.parent.mkdir(exist_ok=True)))
    calls = []

    def build(folder: Path) -> None:
        calls.append(folder)
        if len(calls) == 1:  # meanwhile on another node
            assert _made(cached_folder(source, file_key(source), build)) == "worked out"
        _fill(folder)

    found = cached_folder(source, file_key(source), build)
    assert _made(found) == "worked out"
    assert len(calls) == 2 and found is not None
    assert sorted(os.listdir(source.parent)) == sorted([found.name, "list.csv"])


def test_a_file_system_without_locks_is_no_place(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = columns.locked

    def locked(path: Path) -> AbstractContextManager[None]:
        if source.parent in path.parents:
            raise OSError(errno.ENOLCK, "no locks available")
        return lock(path)

    monkeypatch.setattr(columns, "locked", locked)
    found = cached_folder(source, file_key(source), _fill)
    assert found is not None and found.parent.name == "summit_train"


def test_one_whose_folder_was_taken_away_goes_round_again(source: Path) -> None:
    calls = []

    def build(folder: Path) -> None:
        calls.append(folder)
        if len(calls) == 1:
            folder.rename(folder.with_name("taken"))
        _fill(folder)

    assert _made(cached_folder(source, file_key(source), build)) == "worked out"
    assert len(calls) == 2
