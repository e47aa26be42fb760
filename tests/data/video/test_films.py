"""Films: a clip of a long file reads its own frames alone; what is kept of a film is right, bounded and private."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from summit_train.data.check import examine
from summit_train.data.manifest import ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.video import decode, films, source
from summit_train.data.video.encode import write_video
from summit_train.data.video.films import Films
from summit_train.data.video.source import LIMITS, DecodeError
from tests.data.clips import all_of, stored_clip

NUM_FRAMES = 300


@pytest.fixture
def name() -> str:
    return "a.mp4"


@pytest.fixture
def store(name: str, tmp_path: Path, kept_indexes: Path, monkeypatch: pytest.MonkeyPatch) -> FileStore:
    """A film of 300 frames, a key frame every 12."""
    monkeypatch.setattr(films, "_MIN_FRAMES", NUM_FRAMES)
    frames = np.random.default_rng(0).integers(0, 256, (NUM_FRAMES, 16, 32, 3), np.uint8)
    write_video(tmp_path / name, frames, b_frames=0 if name == "a.avi" else 2)
    return _opened(tmp_path, name)


def _opened(folder: Path, name: str) -> FileStore:
    digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    write_manifest(folder / "list.csv", [ManifestRow(name, 0, NUM_FRAMES, sha256=digest)])
    return FileStore(read_manifest(folder / "list.csv"), str(folder))


def _clip(store: FileStore, *numbers: int) -> np.ndarray:
    return stored_clip(store, 0, lambda n: np.array(numbers), all_of)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi", "a.ts"])
def test_a_later_clip_reads_the_packets_from_its_key_frame_alone(
    store: FileStore, kept_indexes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _clip(store, *range(NUM_FRAMES))
    demuxed = decode.demuxed
    packets = list[int]()
    file_sha256 = source.file_sha256
    hashed = list[str]()
    for module in (decode, films):
        monkeypatch.setattr(module, "demuxed", lambda *a: (packets.append(p.size) or p for p in demuxed(*a)))
    monkeypatch.setattr(source, "file_sha256", lambda path: hashed.append(path) or file_sha256(path))
    # The other one has the index on disk.
    for one, num_hashed in ((store, 0), (FileStore(store.manifest, store.root), 1)):
        for numbers in ([290], [150, 152], [299, 7]):
            packets.clear()
            np.testing.assert_array_equal(_clip(one, *numbers), whole[numbers])
            assert len(packets) < 60
        assert len(hashed) == num_hashed
    (kept,) = kept_indexes.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600 and kept.parent.stat().st_mode & 0o777 == 0o700


def test_indexing_a_set_keeps_the_indexes_of_its_films(
    store: FileStore, tmp_path: Path, kept_indexes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not isinstance(examine(str(tmp_path), "a.mp4"), DecodeError)
    assert len(list(kept_indexes.iterdir())) == 1
    monkeypatch.setattr(films, "demuxed", lambda *_: pytest.fail("it is indexed again"))
    assert Films().load(store.path(0), None, NUM_FRAMES, LIMITS).index is not None


@pytest.mark.parametrize("name", ["a\x1b.mp4"])
def test_what_is_kept_of_a_file_that_has_changed_is_made_again(
    store: FileStore, tmp_path: Path, kept_indexes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = _clip(store, 290)
    (kept,) = kept_indexes.iterdir()
    kept.write_bytes(kept.read_bytes()[:1000])  # damaged
    np.testing.assert_array_equal(_clip(_opened(tmp_path, "a\x1b.mp4"), 290), first)
    write_video(tmp_path / "a\x1b.mp4", np.full((NUM_FRAMES, 16, 32, 3), 90, np.uint8))
    with pytest.raises(DecodeError, match="has changed since it was indexed"):
        _clip(store, 290)
    np.testing.assert_allclose(_clip(_opened(tmp_path, "a\x1b.mp4"), 290), 90, atol=5)
    assert not caplog.messages
    known, path = Films(), str(tmp_path / "a\x1b.mp4")
    num_kept = len(list(kept_indexes.iterdir()))
    for time in (1, 2, 2):
        os.utime(path, (time, time))
        assert known.load(path, None, NUM_FRAMES, LIMITS).index is not None
        assert len(list(kept_indexes.iterdir())) == num_kept + time
    (note,) = caplog.messages
    assert note == f"summit-train: note: {tmp_path}/a\\x1b.mp4 has changed; indexing its packets again"


def test_a_film_that_changes_while_it_is_read_is_an_error(store: FileStore, tmp_path: Path) -> None:
    def change(num_frames: int) -> np.ndarray:
        os.utime(tmp_path / "a.mp4", (0, 0))
        return np.array([290])

    with pytest.raises(DecodeError, match=r"a\.mp4: has changed while it was read"):
        stored_clip(store, 0, change, all_of)


def test_without_a_cache_on_disk_there_is_one_note(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "b.mp4").write_bytes((tmp_path / "a.mp4").read_bytes())
    for folder, why in (
        (os.devnull, "(Not a directory); set XDG_CACHE_HOME"),
        ("~no-such-user/cache", "cannot be kept: ~no-such-user/cache (the user has no home folder; set XDG_CACHE_HOME"),
    ):
        caplog.clear()
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        known = Films()
        for name in ("a.mp4", "b.mp4"):
            assert known.load(str(tmp_path / name), None, NUM_FRAMES, LIMITS).index is not None
        (message,) = caplog.messages
        assert why in message


def test_copies_of_a_film_that_nodes_have_at_one_path_have_an_index_each(store: FileStore, kept_indexes: Path) -> None:
    film = Path(store.path(0))
    copy = film.with_name("copy.mp4")
    copy.write_bytes(film.read_bytes())
    for num_kept in (1, 2, 2):
        assert Films().load(str(film), None, NUM_FRAMES, LIMITS).index is not None
        assert len(list(kept_indexes.iterdir())) == num_kept
        film.rename(film.with_name("other.mp4"))
        copy.rename(film)
        film.with_name("other.mp4").rename(copy)


def test_an_index_of_other_types_or_lengths_is_made_again(store: FileStore, tmp_path: Path, kept_indexes: Path) -> None:
    first = _clip(store, 290)
    (kept,) = kept_indexes.iterdir()
    with np.load(kept) as file:
        whole = dict(file)
    for wrong in ({"places": whole["places"][1:]}, {"times": whole["times"] / 2}, {"starts": whole["starts"][None]}):
        np.savez(kept, **whole | wrong)
        np.testing.assert_array_equal(_clip(_opened(tmp_path, "a.mp4"), 290), first)
        with np.load(kept) as file:
            assert all(np.array_equal(file[name], whole[name]) for name in whole)


def test_what_is_kept_is_bounded(
    store: FileStore, tmp_path: Path, kept_indexes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _clip(store, 290)
    (kept,) = kept_indexes.iterdir()
    monkeypatch.setattr(films, "_MAX_BYTES", 2 * kept.stat().st_size)
    monkeypatch.setattr(films, "_MAX_INDEXES", 2)
    os.utime(kept, (0, 0))
    known = Films()
    names = ["b.mp4", "c.mp4", "d.mp4"]
    for place, name in enumerate(names, 1):
        (tmp_path / name).write_bytes((tmp_path / "a.mp4").read_bytes())
        known.load(str(tmp_path / name), None, NUM_FRAMES, LIMITS)
        assert len(list(kept_indexes.iterdir())) == 2
        assert [Path(film.name).name for film in known._indexes] == names[max(0, place - 2) : place]
    assert not kept.exists()
