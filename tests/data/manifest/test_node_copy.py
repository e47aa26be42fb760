"""Large lists: the processes of a node map one copy of what the first of them parsed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summit_train.core.errors import UserError
from summit_train.data.manifest import Manifest, node_copy, read_manifest, tables
from summit_train.data.manifest.node_copy import read_shared
from summit_train.data.manifest.reading import read_rows

HEADER = b"path,label,num_frames,group,sha256,reversed,start_frame,end_frame,left,top,width,height\n"
ROWS = (
    b"a/1.mp4,up,84,daria," + b"78" * 32 + b",0,3,20,1,2,30,40\n"
    b"b\xff.mp4,up;down,,,,1,,,,,,\n"
    b'"c, d.mp4",;,12,\xe9ve,,0,,7,,,,\n'
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of the test's own, and lists that count as large."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(node_copy, "_MIN_BYTES", 1)
    return folder


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    (tmp_path / "list.csv").write_bytes(HEADER + ROWS)
    (tmp_path / "classes.txt").write_text("down\nup\n")
    return tmp_path / "list.csv"


def _copies(temporary: Path) -> list[Path]:
    return sorted(path for path in temporary.glob("summit_train_lists_*/*") if path.is_dir())


def _is_mapped(manifest: Manifest) -> bool:
    return isinstance(manifest.paths.base, np.memmap) and isinstance(manifest.labels.base, np.memmap)


def _assert_equal(one: Manifest, other: Manifest) -> None:
    for name, value in vars(replace(other, stored_fingerprint=one.stored_fingerprint)).items():
        assert np.array_equal(getattr(one, name), value), name
    assert one.fingerprint() == other.fingerprint()
    assert list(read_rows(one)) == list(read_rows(other))


def _forbid_parsing(patch: pytest.MonkeyPatch) -> None:
    def parse(*_: object) -> None:
        raise AssertionError("the list is parsed")

    patch.setattr(tables, "parse_tables", parse)


def test_the_second_reader_maps_what_the_first_parsed(
    listed: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for region in (None, "columns"):
        expected = read_manifest(listed, region)
        assert not _is_mapped(expected) and len(expected.regions) == (3 if region else 0)
        first = read_shared(listed, region)
        with monkeypatch.context() as patch:
            _forbid_parsing(patch)
            second = read_shared(listed, region)
        for manifest in (first, second):
            assert _is_mapped(manifest)
            _assert_equal(manifest, expected)
    assert len(_copies(temporary)) == 2
    assert os.stat(_copies(temporary)[0].parent).st_mode & 0o777 == 0o700


def test_small_lists_have_no_copy(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (tmp_path / "list.csv").write_text("path,label\n" + "a.mp4,0\n" * 50_000)
    assert not _is_mapped(read_shared(tmp_path / "list.csv", None))
    assert list(temporary.iterdir()) == []
    (tmp_path / "list.csv").write_text("path,label\n" + "a.mp4,0\n" * 300_000)
    assert _is_mapped(read_shared(tmp_path / "list.csv", None))


def test_a_list_that_has_changed_is_parsed_again(listed: Path, tmp_path: Path) -> None:
    assert read_shared(listed, None).path(0) == "a/1.mp4"
    before = listed.stat()
    content = listed.read_bytes().replace(b"a/1.mp4", b"a/2.mp4")
    listed.write_bytes(content)  # of the same size, inode and time
    os.utime(listed, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read_shared(listed, None).path(0) == "a/2.mp4"
    other = tmp_path / "other.csv"
    other.write_bytes(content.replace(b"a/2.mp4", b"a/3.mp4"))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(listed)
    assert read_shared(listed, None).path(0) == "a/3.mp4"
    assert read_shared(listed, None).labels.tolist() == [1, 0, -1]
    (tmp_path / "classes.txt").write_text("up\ndown\n")
    assert read_shared(listed, None).labels.tolist() == [0, 0, -1]


@pytest.mark.parametrize("damage", ["flip", "cut", "pickle", "shorter", "record", "missing", "counts", "checksum"])
def test_a_damaged_copy_is_made_again(
    listed: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    read_shared(listed, None)
    (copy,) = _copies(temporary)
    labels = copy / "manifest/labels.npy"
    content = labels.read_bytes()
    if damage == "flip":
        labels.write_bytes(content[:-4] + bytes([content[-4] ^ 1]) + content[-3:])
    elif damage == "cut":
        labels.write_bytes(content[:-1])
    elif damage == "pickle":
        np.save(labels, np.array([1, "a", None], object), allow_pickle=True)
    elif damage == "shorter":
        np.save(labels, np.zeros(2, np.int32))
    elif damage == "counts":  # which the fingerprint of a list does not include
        counts = copy / "manifest/frame_counts.npy"
        counts.write_bytes(counts.read_bytes()[:-1] + b"\1")
    elif damage == "checksum":
        (copy / "checksum").write_text("")
    elif damage == "record":
        (copy / "manifest/columns.json").write_text("[]")
    else:
        (copy / "manifest/paths.npy").unlink()
    _assert_equal(read_shared(listed, None), read_manifest(listed))
    assert _copies(temporary) == [copy] and labels.read_bytes() == content


def test_a_folder_of_others_is_not_used(
    listed: Path, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = read_manifest(listed)
    folder = temporary / f"summit_train_lists_{os.getuid()}_{os.uname().nodename}"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    _assert_equal(read_shared(listed, None), expected)
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o755)
    _assert_equal(read_shared(listed, None), expected)
    if os.getuid() == 0:
        folder.chmod(0o700)
        os.chown(folder, 12345, 12345)
        _assert_equal(read_shared(listed, None), expected)
    assert [*folder.iterdir(), *elsewhere.iterdir()] == []
    assert len(caplog.messages) == (3 if os.getuid() == 0 else 2)
    what = f"the columns of {listed} cannot be kept: {folder} (is not a folder of this user alone); set TMPDIR"
    assert {f"summit-train: note: {what}"} == set(caplog.messages)


def test_without_room_the_list_is_read_all_the_same(
    listed: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = read_manifest(listed)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", os.devnull)
        _assert_equal(read_shared(listed, None), expected)
    assert "(Not a directory); set TMPDIR" in caplog.text

    def full(path: Path, *_: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(os, "rename", full)  # the last step
    _assert_equal(read_shared(listed, None), expected)
    assert "(No space left on device); set TMPDIR" in caplog.text
    assert _copies(temporary) == []


def test_a_wrong_list_leaves_nothing(listed: Path, temporary: Path) -> None:
    listed.write_bytes(HEADER + ROWS + b",up,,,,,,,,,,\n")
    for _ in range(2):
        with pytest.raises(UserError, match=r"list\.csv:5: the path is empty"):
            read_shared(listed, None)
    assert _copies(temporary) == []


def test_the_copies_used_longest_ago_are_deleted(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [tmp_path / f"{number}.csv" for number in range(4)]
    for source in sources:
        source.write_text("path,label\n" + "a.mp4,0\n" * 100)
    made = list[Path]()
    for number, source in enumerate(sources[:3]):
        read_shared(source, None)
        (new,) = set(_copies(temporary)) - set(made)
        made.append(new)
        os.utime(new, (number, number))
    read_shared(sources[0], None)  # used again
    size = sum(file.stat().st_size for file in made[0].rglob("*"))
    monkeypatch.setattr(node_copy, "_MAX_BYTES", 3 * size)
    read_shared(sources[3], None)
    assert set(_copies(temporary)) >= {made[0], made[2]} and made[1] not in _copies(temporary)
    monkeypatch.setattr(node_copy, "_MAX_BYTES", 1)  # the newest one stays: it is in use
    sources[3].write_text("path,label\n" + "b.mp4,0\n" * 100)
    assert _is_mapped(read_shared(sources[3], None)) and len(_copies(temporary)) == 1


def _report(manifest: Manifest, answers: multiprocessing.SimpleQueue[object]) -> None:
    answers.put((_is_mapped(manifest), manifest.fingerprint()))


def test_a_process_that_is_started_with_a_list_maps_it(listed: Path, temporary: Path) -> None:
    manifest = read_shared(listed, None)
    again = pickle.loads(pickle.dumps(manifest))
    assert _is_mapped(again)
    _assert_equal(again, manifest)
    assert pickle.loads(pickle.dumps(replace(manifest, labels=manifest.labels[1:]))).labels.tolist() == [0, -1]
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    for is_kept in (True, False):
        if not is_kept:
            for file in (_copies(temporary)[0] / "manifest").iterdir():
                file.unlink()
        worker = context.Process(target=_report, args=(manifest, answers))
        worker.start()
        assert answers.get() == (is_kept, manifest.fingerprint())
        worker.join()


def _read(source: Path, temporary: Path, answers: multiprocessing.SimpleQueue[object]) -> None:
    tempfile.tempdir = str(temporary)
    parse_tables, parsed = tables.parse_tables, list[Path]()

    def noted(source: Path, *others: Any) -> dict[str, Any]:
        parsed.append(source)
        return parse_tables(source, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "parse_tables", noted)
        manifest = read_shared(source, None)
    answers.put((len(parsed), _is_mapped(manifest), manifest.fingerprint()))


def test_of_processes_that_begin_together_one_parses(tmp_path: Path, temporary: Path) -> None:
    source = tmp_path / "list.csv"
    source.write_text("path,label\n" + "".join(f"some/folder/{number}.mp4,0\n" for number in range(100_000)))
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    workers = [context.Process(target=_read, args=(source, temporary, answers)) for _ in range(3)]
    for worker in workers:
        worker.start()
    found = sorted(answers.get() for _ in workers)
    for worker in workers:
        worker.join()
    fingerprint = read_shared(source, None).fingerprint()
    assert found == [(0, True, fingerprint), (0, True, fingerprint), (1, True, fingerprint)]
