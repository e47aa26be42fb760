"""Files whose container is wrong: about the order of frames, key frames, the main track, or a packet for each frame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
from av.packet import Packet

from summit_train.data.check import examine, index_clips
from summit_train.data.manifest import ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.video.encode import write_video
from summit_train.data.video.source import VideoInfo
from tests.data.clips import (
    CLIPS,
    Video,
    all_of,
    as_film,
    needs_clips,
    probe,
    read_clip,
    stored_clip,
    write_h264,
    write_swapped,
)
from tests.worlds import Say

NUM_FRAMES, STEP = 48, 5


def write_grey(path: Path, codec: str, b_frames: int = 2) -> None:
    """48 frames, frame i of the grey 5 i with a moving white square, a key frame every 12."""
    frames = np.empty((NUM_FRAMES, 48, 64, 3), np.uint8)
    frames[:] = np.arange(NUM_FRAMES, dtype=np.uint8)[:, None, None, None] * STEP
    for number, frame in enumerate(frames):
        frame[8:24, number : number + 16] = 255
    write_video(path, frames, codec=codec, b_frames=b_frames, key_every=12)


def _remux(source: Path, target: Path, change: Callable[[int, Packet], None]) -> None:
    with av.open(str(source)) as old, av.open(str(target), "w") as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        for number, packet in enumerate(packet for packet in old.demux(video=0) if packet.size):
            change(number, packet)
            packet.stream = stream
            new.mux(packet)


def _decoding_times(number: int, packet: Packet) -> None:
    packet.pts = packet.dts = number * 512


def _call_it_key(number: int, packet: Packet) -> None:
    packet.is_keyframe = True


def _show_some_later(number: int, packet: Packet) -> None:
    """By a little more than a frame, in milliseconds: two frames change their places."""
    if number % 7 == 3:
        packet.pts += 41


def _wrong_frames(video: Video, num_frames: int, **how: bool) -> list[int]:
    """The frames that differ, read alone with `num_frames`, from those of a decode from the start."""
    right = read_clip(video, lambda n: np.arange(num_frames), all_of)
    alone = [read_clip(video, lambda n, i=i: np.array([i]), all_of, num_frames, **how)[0] for i in range(num_frames)]
    return [number for number, frame in enumerate(alone) if not np.array_equal(frame, right[number])]


@pytest.mark.parametrize(
    ("codec", "name"),
    [("libx264", "a.mp4"), ("libx264", "a.mkv"), ("libx264", "a.ts"), ("mpeg4", "a.mp4"), ("mpeg4", "a.mkv")],
)
def test_times_in_decoding_order_are_not_believed(tmp_path: Path, codec: str, name: str) -> None:
    """As an AVI with B-frames has them that was copied into another container."""
    write_grey(tmp_path / "whole.mp4", codec)
    _remux(tmp_path / "whole.mp4", tmp_path / name, _decoding_times)
    assert _wrong_frames(tmp_path / name, NUM_FRAMES) == []


@pytest.mark.parametrize(("codec", "ending"), [("mpeg4", "mkv"), ("flv", "flv"), ("wmv2", "wmv"), ("mpeg4", "avi")])
def test_packets_that_are_called_key_frames_and_are_none_are_not_believed(
    tmp_path: Path, codec: str, ending: str
) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (NUM_FRAMES, 9, 11, 3), np.uint8).repeat(16, 1).repeat(16, 2)
    one, changed = (tmp_path / f"{name}.{ending}" for name in ("one", "changed"))
    write_video(one, frames, codec=codec, b_frames=0, key_every=24)
    assert _wrong_frames(one, NUM_FRAMES) == []
    _remux(one, changed, _call_it_key)
    assert _wrong_frames(changed, NUM_FRAMES) == _wrong_frames(changed, NUM_FRAMES, is_checked=True) == []


def write_not_coded(folder: Path, key_every: int) -> Path:
    """MPEG-4 as DivX writes it: the tenth of 49 packets says "as before" and holds no frame."""
    write_grey(folder / "whole.avi", "mpeg4", b_frames=0)
    not_coded = b"\0\0\1\xb6" + int("0101010011001111", 2).to_bytes(2, "big")  # P, no second, time 9, not coded
    with av.open(str(folder / "whole.avi")) as old, av.open(str(folder / "more.avi"), "w") as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        contents = [bytes(packet) for packet in old.demux(video=0) if packet.size]
        for number, content in enumerate([*contents[:9], not_coded, *contents[9:]]):
            packet = Packet(content)
            packet.pts = packet.dts = number
            packet.stream = stream
            packet.time_base = stream.time_base
            packet.is_keyframe = number == 0 or (number > 9 and number % key_every == 1)
            new.mux(packet)
    return folder / "more.avi"


def test_a_number_of_packets_is_not_believed_where_one_may_hold_no_frame(tmp_path: Path) -> None:
    """As OpenCV counts the frames of an MPEG-4 video."""
    path = write_not_coded(tmp_path, key_every=12)
    right = read_clip(path, lambda n: np.arange(NUM_FRAMES), all_of)
    for number in range(NUM_FRAMES):
        (frame,) = read_clip(path, lambda n, i=number: np.array([i]), all_of, NUM_FRAMES + 1)
        assert np.array_equal(frame, right[number]), number


@pytest.mark.parametrize("film", [False, True])
@pytest.mark.parametrize(
    ("times", "key_every", "more"),
    [
        (None, 48, ""),
        ({11: 12, 12: 11}, 12, ""),  # over the edge of a group of pictures
        ({40: 1.5}, 48, ""),  # long after those that it changes the numbers of
        ({17: 18, 18: 17}, 12, ":open-gop=1"),
    ],
)
def test_wrong_times_of_some_frames_are_not_believed(
    tmp_path: Path, film: bool, times: dict[int, float] | None, key_every: int, more: str
) -> None:
    """A list that has the number of frames, as an importer's does, and no digest: no index has seen the file."""
    write_swapped(tmp_path / "odd.mkv", times, key_every, more)
    video = as_film(tmp_path / "odd.mkv", NUM_FRAMES) if film else tmp_path / "odd.mkv"
    assert _wrong_frames(video, NUM_FRAMES) == []
    assert _wrong_frames(video, NUM_FRAMES, is_checked=True) != []  # the file is one that misleads


def test_the_digest_of_an_index_vouches_for_the_number_of_frames(tmp_path: Path, from_start: list[str]) -> None:
    write_grey(tmp_path / "a.mkv", "libx264")
    write_grey(tmp_path / "b.mkv", "mpeg4")
    rows = [ManifestRow(name, 0, NUM_FRAMES) for name in ("a.mkv", "b.mkv")]
    rows += [replace(row, sha256=probe(tmp_path / row.path).sha256) for row in rows]
    write_manifest(tmp_path / "list.csv", rows)
    store = FileStore(read_manifest(tmp_path / "list.csv"), str(tmp_path))
    for clip in range(4):
        (shown,) = stored_clip(store, clip, lambda n: np.array([40]), all_of)
        assert abs(int(np.median(shown)) - 40 * STEP) <= 5
    # Without it H.264 tells the order of its frames itself; MPEG-4 does not.
    assert from_start == [str(tmp_path / "b.mkv")]


@pytest.mark.parametrize("name", ["a.mp4", "a.ts"])
@pytest.mark.parametrize(
    "options",
    [
        {"bf": "3", "g": "12"},
        {"bf": "16", "g": "250"},
        {"bf": "0", "g": "12"},
        {"g": "1"},
        {"bf": "3", "g": "12", "x264-params": "open-gop=1:b-adapt=0:b-pyramid=none:scenecut=0"},
    ],
)
def test_the_order_of_h264_is_known_without_an_index(
    tmp_path: Path, from_start: list[str], name: str, options: dict[str, str]
) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (60, 6, 8, 3), np.uint8).repeat(8, 1).repeat(8, 2)
    write_h264(tmp_path / name, frames, **options)
    assert _wrong_frames(tmp_path / name, 60) == [] and len(from_start) == 1


@needs_clips
@pytest.mark.parametrize(("name", "number"), [("14_decord_unordered_4frames.mov", 4), ("19_exo_slowmo_7frames.mp4", 7)])
def test_the_order_of_a_cameras_h264_is_known_without_an_index(name: str, number: int, from_start: list[str]) -> None:
    assert _wrong_frames(CLIPS / "codecs" / name, number) == [] and len(from_start) == 1


def test_an_index_leaves_out_the_number_of_frames_where_jumps_give_others(tmp_path: Path, say: Say) -> None:
    write_grey(tmp_path / "whole.mkv", "libx264")
    (tmp_path / "videos/a").mkdir(parents=True)
    _remux(tmp_path / "whole.mkv", tmp_path / "videos/a/odd.mkv", _show_some_later)
    write_grey(tmp_path / "videos/a/right.mkv", "libx264")
    facts = {path: examine(str(tmp_path / "videos"), path) for path in ("a/odd.mkv", "a/right.mkv")}
    assert all(isinstance(one, VideoInfo) for one in facts.values())
    rows, left_out = index_clips([ManifestRow(path, 0) for path in facts], facts)
    assert [row.num_frames for row in rows] == [None, NUM_FRAMES] and left_out == []
    status, out, err = say("data", "index", tmp_path / "videos", "--out", tmp_path / "clips.csv", "--workers", 0)
    assert status == 0 and "2 videos, 96 frames, 1 classes" in out, err
    assert "read from their start, as jumps give wrong frames: 1\n  a/odd.mkv is read from its start: its cont" in out
    assert "right" not in out


def _write_tracks(path: Path, *tracks: tuple[tuple[int, int], bool]) -> None:
    """Tracks of these sizes, one after the other; of each whether it is the default one. The first has one frame."""
    with av.open(str(path), "w") as container:
        streams = []
        for (width, height), is_default in tracks:
            stream = container.add_stream("libx264", rate=25)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            stream.disposition = av.stream.Disposition.default if is_default else av.stream.Disposition(0)
            streams.append(stream)
        for number, stream in enumerate(streams):
            for time in range(1 if number == 0 else 10):
                picture = np.full((stream.height, stream.width, 3), 20 * time, np.uint8)
                frame = av.VideoFrame.from_ndarray(picture, "rgb24")
                frame.pts = time
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))


@pytest.mark.parametrize(
    ("name", "tracks", "size"),
    [
        ("a.mp4", [((96, 64), False), ((192, 128), True)], (192, 128)),
        ("a.mkv", [((96, 64), False), ((192, 128), True)], (192, 128)),
        ("a.mkv", [((96, 64), False), ((192, 128), False)], (192, 128)),
        ("a.mkv", [((96, 64), False), ((192, 128), False), ((64, 64), True)], (64, 64)),  # by up to 5 million pixels
        ("a.mkv", [((192, 128), False), ((192, 128), False)], (192, 128)),
    ],
)
def test_the_track_is_that_which_ffmpeg_takes(
    tmp_path: Path, name: str, tracks: list[tuple[tuple[int, int], bool]], size: tuple[int, int]
) -> None:
    _write_tracks(tmp_path / name, *tracks)
    info = probe(tmp_path / name)
    assert (info.width, info.height, info.num_frames) == (*size, 1 if size == tracks[0][0] else 10)
    assert info.notes == (f"has {len(tracks)} video tracks; that of {size[0]} x {size[1]} is read",)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_packet_without_a_frame_is_not_counted(tmp_path: Path, is_reversed: bool) -> None:
    """The frames that are chosen are those that a list with num_frames gives."""
    path = write_not_coded(tmp_path, key_every=NUM_FRAMES)
    assert probe(path).num_frames == NUM_FRAMES
    seen = list[int]()

    def last_third(number: int) -> np.ndarray:
        seen.append(number)
        frames = np.array([number // 3, 2 * number // 3])
        return number - 1 - frames if is_reversed else frames

    shown = [read_clip(path, last_third, all_of, known) for known in (None, NUM_FRAMES)]
    assert np.array_equal(*shown) and seen[-1] == NUM_FRAMES and seen[0] == NUM_FRAMES + 1
