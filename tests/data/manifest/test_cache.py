from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from summit_train.data.manifest import cache
from summit_train.data.manifest.cache import cached_folder, file_key
from tests.worlds import ROOT


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
    assert folder not in [place for place, _ in cache._places(source)]
    folder.chmod(0o700)
    assert folder in [place for place, _ in cache._places(source)]


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
    from summit_train.data.manifest.cache import cached_folder, file_key
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
    assert time.monotonic() - began < cache._SILENT_SECONDS / 2
    assert _made(found) == "worked out"
    assert found is not None
    assert sorted(os.listdir(source.parent)) == sorted([found.name, "list.csv"])


def test_a_builder_on_another_node_that_writes_nothing_is_taken_for_dead(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_SILENT_SECONDS", 0.3)
    building = source.parent / f".list.csv.{file_key(source)}.building"
    building.mkdir()
    (building / "builder").write_text("another-node 1")
    assert _made(cached_folder(source, file_key(source), _fill)) == "worked out"


def test_one_whose_folder_was_taken_away_goes_round_again(source: Path) -> None:
    calls = []

    def build(folder: Path) -> None:
        calls.append(folder)
        if len(calls) == 1:
            folder.rename(folder.with_name("taken"))
        _fill(folder)

    assert _made(cached_folder(source, file_key(source), build)) == "worked out"
    assert len(calls) == 2
