from __future__ import annotations

import csv
import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
from av.video.frame import PictureType, VideoFrame
from numpy.typing import NDArray
from PIL import Image

from summit_train.data.video import decode
from summit_train.data.video.augment import View
from summit_train.data.video.clips import VideoClip
from summit_train.data.video.encode import write_video
from summit_train.data.video.render import Renderer
from summit_train.data.video.source import LIMITS, Budget, DecodeError, Encoded, Limits, PacketIndex
from summit_train.data.video.span import WHOLE, Span
from tests.data.clips import CLIPS, all_of, as_film, needs_clips, probe, read_clip, write_as, write_sound

Frames = NDArray[np.uint8]
NUM_FRAMES = 40
BITS = 6  # a frame's number is drawn in it: 2 x 3 blocks of 16 pixels


def _numbered(num_frames: int = NUM_FRAMES) -> Frames:
    """Frames (T, 32, 48, 3) whose six blocks are the bits of their number, row by row from the top left."""
    bits = (np.arange(num_frames)[:, None] >> np.arange(BITS)) & 1
    return np.repeat((40 + 170 * bits).reshape(-1, 2, 3).repeat(16, 1).repeat(16, 2)[..., None], 3, 3).astype(np.uint8)


def _numbers(frames: Frames) -> list[int]:
    """What is drawn in frames (..., T, 32, 48, 3)."""
    bits = frames[..., 8::16, 8::16, 0].reshape(*frames.shape[:-3], BITS) > 125
    return (bits << np.arange(BITS)).sum(-1).tolist()  # type: ignore[no-any-return]


def _these(*numbers: int) -> Callable[[int], NDArray[np.int64]]:
    return lambda num_frames: np.array(numbers)


def _every(num_frames: int) -> NDArray[np.int64]:
    return np.arange(num_frames)


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 numbered frames, a key frame every 12, B-frames between."""
    path = tmp_path_factory.mktemp("decode") / "numbered.mp4"
    write_video(path, _numbered(), b_frames=3)
    return path


def _damaged(video: Path, target: Path, place: float) -> Path:
    """A copy with 40 bytes of the compressed pictures changed at a fraction of the file."""
    data = bytearray(video.read_bytes())
    start = int(len(data) * place)
    data[start : start + 40] = bytes(byte ^ 0x5A for byte in data[start : start + 40])
    target.write_bytes(data)
    return target


# Which frame is which.


@pytest.mark.parametrize("seek", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.mp4", {"b_frames": 3}),
        ("a.mp4", {"b_frames": 0, "key_every": 7}),
        ("a.mp4", {"b_frames": 0, "key_every": 1}),
        ("a.mp4", {"b_frames": 2, "key_every": 250}),
        ("a.mkv", {"b_frames": 3, "key_every": 9}),
        ("a.mov", {"codec": "mpeg4", "b_frames": 2}),
        ("a.avi", {"codec": "mpeg4", "b_frames": 0}),
        ("a.avi", {"codec": "mpeg4", "b_frames": 2}),  # AVI has no presentation times
        ("a.ts", {"b_frames": 2}),
        ("a.mpg", {"codec": "mpeg2video", "b_frames": 2}),
        ("a.webm", {"codec": "libvpx-vp9", "b_frames": 0}),
        ("a.mkv", {"times": [number * number for number in range(NUM_FRAMES)]}),  # variable frame rate
    ],
)
def test_frame_i_is_the_ith_in_presentation_order(
    tmp_path: Path, name: str, options: dict[str, object], seek: bool
) -> None:
    if options.get("codec", "mpeg4") not in av.codecs_available:
        pytest.skip(f"this PyAV has no {options['codec']}")
    write_as(tmp_path / name, _numbered(), **options)
    known = NUM_FRAMES if seek else None
    in_memory, whole = Encoded(name, (tmp_path / name).read_bytes()), read_clip(tmp_path / name, _every, all_of)
    film = as_film(tmp_path / name, known)
    for number in range(0, NUM_FRAMES, 1 if seek else 7):
        for video in (in_memory, film):
            assert _numbers(read_clip(video, _these(number), all_of, known)) == [number]
    for chosen in ([0, 39], [38, 1, 20, 20], [11, 12, 13]):
        for video in (tmp_path / name, in_memory, film):
            clip = read_clip(video, _these(*chosen), all_of, known)
            assert _numbers(clip) == chosen
            np.testing.assert_array_equal(clip, whole[chosen])


# Jumps. Two groups of pictures in decoding order, as an encoder with B-frames orders them: I P B B, I P B B, ...
# Presentation:   0  3  1  2   4  7  5  6   8  ...
TIMES = [0, 30, 10, 20, 40, 70, 50, 60, 80, 110, 90, 100]
KEYS = [True, False, False, False] * 3


def _index(packets: list[tuple[int | None, bool, bool]]) -> PacketIndex:
    names = ("pts", "is_keyframe", "is_discard")
    made = [SimpleNamespace(**dict(zip(names, packet, strict=True)), dts=None) for packet in packets]
    return decode.index_of(map(decode.packet_row, made))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chosen", "jumps"),
    [
        ([9], [(slice(8, 11), {90: 9})]),  # from its key frame
        ([6, 7], [(slice(4, 8), {60: 6, 70: 7})]),  # frame 7 is decoded before frames 5 and 6
        ([2, 5], [(slice(0, 7), {20: 2, 50: 5})]),  # too short a jump
        ([8], [(slice(8, 9), {80: 8})]),
        ([4, 8], [(slice(4, 9), {40: 4, 80: 8})]),
        ([3, 8], [(slice(0, 2), {30: 3}), (slice(8, 9), {80: 8})]),
        ([10, 0], [(slice(0, 1), {0: 0}), (slice(8, 12), {100: 10})]),
    ],
)
def test_a_jump_is_to_the_nearest_key_frame(chosen: list[int], jumps: list[tuple[slice, dict[int, int]]]) -> None:
    packets = [(time, is_key, False) for time, is_key in zip(TIMES, KEYS, strict=True)]
    assert decode.plan_jumps(_index(packets), 12, chosen) == jumps
    hidden = [(-20, True, True), (-10, False, True), *packets]  # two packets that are not shown have no number
    later = [(slice(at.start + 2 if at.start else 0, at.stop + 2), times) for at, times in jumps]
    assert decode.plan_jumps(_index(hidden), 12, chosen) == later
    # A decoder drops what is before the first key frame, so the numbers of frames are not known.
    late_keys = [(time, place == 8, False) for place, time in enumerate(TIMES)]
    assert decode.plan_jumps(_index(late_keys), 12, [5]) is None


@pytest.mark.parametrize(
    ("times", "first_key", "num_frames"),
    [
        ([0, 1, 2], True, 4),
        ([0, 1, 2], True, 2),
        ([0, None, 2], True, 3),
        ([0, None, 2], True, 2),
        ([0, 1, 1], True, 3),
        ([0, 1, 2], False, 3),
        ([], True, 0),
    ],
)
def test_times_that_do_not_tell_which_frame_is_which(times: list[int | None], first_key: bool, num_frames: int) -> None:
    packets = [(time, first_key and place == 0, False) for place, time in enumerate(times)]
    assert decode.plan_jumps(_index(packets), num_frames, [0]) is None


def test_a_jump_passes_over_damage_that_the_frames_do_not_need(video: Path, tmp_path: Path) -> None:
    damaged = _damaged(video, tmp_path / "damaged.mp4", 0.35)  # in the first 12 frames
    last = _these(30, 39)
    assert _numbers(read_clip(damaged, last, all_of, NUM_FRAMES)) == [30, 39]
    with pytest.raises(DecodeError, match=r"damaged\.mp4"):
        read_clip(damaged, _every, all_of, NUM_FRAMES)


@pytest.mark.parametrize("name", ["numbered.mp4", "numbered.mkv", "numbered.ts"])
def test_a_jump_opens_h264_without_a_picture_and_gives_the_same_ones(tmp_path: Path, name: str) -> None:
    write_video(tmp_path / name, _numbered(), b_frames=3, codec="libx264")
    encoded, render = Encoded(str(tmp_path / name)), Renderer([all_of(48, 32)])
    for in_order in (True, False):
        with decode.open_video(encoded, Budget(name, LIMITS), in_order=in_order) as (_, stream):
            assert (stream.width, stream.height) == (48, 32)
            # A picture has been decoded if its pixels' format is known; the header lacks it.
            assert (stream.codec_context.pix_fmt is None) == (not in_order)
            assert stream.codec_context.skip_frame == "DEFAULT"
    budget, wanted = Budget(name, LIMITS), [3, 17, 18, 39]
    jumps = decode.frames_by_jumps(encoded, wanted, NUM_FRAMES, budget)
    decoded = decode.wanted_frames(name, enumerate(decode.every_frame(encoded, budget)), wanted)
    for number, jumped, right in zip(wanted, jumps, decoded, strict=True):
        assert jumped[0] == right[0] == number
        assert np.array_equal(render(jumped[1]), render(right[1]))


def test_an_avi_that_begins_to_reorder_its_frames_late_is_decoded_from_its_start(tmp_path: Path) -> None:
    """B-frames behind the seconds that FFmpeg looks at when it opens the file; AVI has no presentation times."""
    path = tmp_path / "late.avi"
    with av.open(str(path), "w") as container:
        options = {"bf": "3", "x264-params": "mbtree=0:b-adapt=0"}
        stream = container.add_stream("libx264", rate=25, options=options)
        stream.width, stream.height, stream.pix_fmt, stream.codec_context.gop_size = 48, 32, "yuv420p", 20
        for number, picture in enumerate(_numbered(220)):
            frame = VideoFrame.from_ndarray(picture, "rgb24")
            if number < 180:
                frame.pict_type = PictureType.P if number % 20 else PictureType.I
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    choose = _these(200, 203, 206, 209)
    assert np.array_equal(read_clip(path, choose, all_of, 220, is_checked=True), read_clip(path, choose, all_of))


def test_a_large_file_is_decoded_from_its_start(video: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MAX_HELD_BYTES", 100)
    assert _numbers(read_clip(video, _these(30, 2), all_of, NUM_FRAMES)) == [30, 2]


# Counts that are wrong or not known.


def test_fewer_frames_in_the_manifest_than_in_the_file_or_no_number(video: Path) -> None:
    assert _numbers(read_clip(video, _every, all_of, num_frames=20)) == list(range(20))
    assert _numbers(read_clip(video, _every, all_of)) == list(range(NUM_FRAMES))


# Pictures.


def test_views_are_crops_of_the_scaled_picture_clip_by_clip(video: Path) -> None:
    whole = read_clip(video, _these(5, 6, 7), lambda w, h: View(24, 16, 0, 0, 24, 16), NUM_FRAMES)
    left, right = View(24, 16, 0, 2, 10, 12), View(24, 16, 14, 2, 10, 12, flip=True)
    with VideoClip(Encoded(str(video)), NUM_FRAMES) as opened:
        views = opened.read(np.array([[5, 6], [7, 5]]), [left, right])
    assert views.shape == (4, 2, 12, 10, 3) and views.flags.c_contiguous and views.dtype == np.uint8
    np.testing.assert_array_equal(views[0], whole[[0, 1], 2:14, :10])
    np.testing.assert_array_equal(views[1], whole[[0, 1], 2:14, 14:][:, :, ::-1])
    np.testing.assert_array_equal(views[2], whole[[2, 0], 2:14, :10])
    np.testing.assert_array_equal(views[3], whole[[2, 0], 2:14, 14:][:, :, ::-1])


@pytest.mark.parametrize(("degrees", "turns"), [(90, 1), (-90, 3)])
def test_the_display_matrix_turns_pictures_upright(tmp_path: Path, degrees: int, turns: int) -> None:
    write_video(tmp_path / "stored.mp4", _numbered(14))
    write_as(tmp_path / "turned.mp4", _numbered(14), rotation=degrees)
    stored = read_clip(tmp_path / "stored.mp4", _every, all_of, 14)
    upright = read_clip(tmp_path / "turned.mp4", _every, all_of, 14)
    np.testing.assert_array_equal(upright, np.rot90(stored, turns, (1, 2)))  # counterclockwise
    part = read_clip(tmp_path / "turned.mp4", _every, lambda w, h: View(w, h, 2, 3, 10, 20, flip=True), 14)
    np.testing.assert_array_equal(part, upright[:, 3:23, 2:12][:, :, ::-1])
    info = probe(tmp_path / "turned.mp4")
    with av.open(str(tmp_path / "turned.mp4")) as container:
        assert abs(next(container.decode(video=0)).rotation) == abs(degrees)
    assert (info.width, info.height) == upright.shape[2:0:-1]


@pytest.mark.parametrize(
    ("pixels", "black", "white", "neutral"),
    [("yuv420p", 16, 235, 128), ("yuvj420p", 0, 255, 128), ("yuv420p10le", 64, 940, 512)],
)
def test_limited_and_full_range_and_ten_bits_give_the_same_grey(
    pixels: str, black: int, white: int, neutral: int
) -> None:
    frame = VideoFrame(16, 16, pixels)
    levels = [black + 3 * (white - black) // 4, neutral, neutral]
    for plane, level in zip(frame.planes, levels, strict=True):
        sample = np.dtype(np.uint16 if pixels.endswith("le") else np.uint8)
        plane.update(np.full(plane.buffer_size // sample.itemsize, level, sample).tobytes())
    [picture] = Renderer([all_of(16, 16)])(frame)
    np.testing.assert_allclose(picture, 191, atol=3)  # swscale's fast path is off by 2


# Files that are no whole videos.


def _write_playlist(path: Path) -> None:
    (path.parent / "numbered.mp4").touch()
    path.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nnumbered.mp4\n#EXT-X-ENDLIST\n")


NO_VIDEO = "is not a video in a supported format"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "No such file"),
        (Path.mkdir, "is a directory"),
        (os.mkfifo, "is not a regular file"),
        (Path.touch, "is empty"),
        (write_sound, "has no video stream"),
        (lambda path: Image.new("RGB", (16, 16)).save(path, "PNG"), NO_VIDEO),
        (lambda path: path.write_text("words " * 200), NO_VIDEO),
        (lambda path: path.write_bytes(bytes(5000)), NO_VIDEO),
        (lambda path: path.write_text(f"ffconcat version 1.0\nfile '{path.parent}/numbered.mp4'\n"), NO_VIDEO),
        (_write_playlist, NO_VIDEO),
    ],
)
def test_what_is_no_video_says_why(tmp_path: Path, make: Callable[[Path], object], reason: str) -> None:
    path = tmp_path / "thing.mp4"
    make(path)
    for read in (probe, lambda path: read_clip(path, _every, all_of), lambda path: read_clip(path, _every, all_of, 9)):
        with pytest.raises(DecodeError, match=reason) as caught:
            read(path)
        assert caught.value.path == str(path) and str(path) in str(caught.value)


def test_damage_in_the_middle_is_found(video: Path, tmp_path: Path) -> None:
    damaged = _damaged(video, tmp_path / "damaged.mp4", 0.5)
    with pytest.raises(DecodeError, match=r"damaged\.mp4: .*frames decoded"):
        probe(damaged)


@pytest.mark.parametrize("name", ["a:b.mp4", "http:x%03d.mp4", "-i.mp4", "ä 視.mp4", os.fsdecode(b"n\xff.mp4")])
def test_names_are_names(tmp_path: Path, video: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_bytes(video.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert probe(name).num_frames == NUM_FRAMES
    assert _numbers(read_clip(name, _these(30), all_of, NUM_FRAMES)) == [30]


# Memory.


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to read the memory from")
def test_memory_stays_flat_also_without_the_garbage_collector(tmp_path: Path) -> None:
    write_as(tmp_path / "a.mp4", _numbered(8), rotation=90)

    def read(times: int) -> int:
        for _ in range(times):
            read_clip(tmp_path / "a.mp4", _these(1, 6), all_of, 8)
            read_clip(tmp_path / "a.mp4", lambda n: np.array([n - 1]), all_of, 9)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    gc.disable()
    try:
        grown = read(260) - read(60)
    finally:
        gc.enable()
    assert grown < 2.7e6


# The real clips.


def _codec_clips() -> list[tuple[str, int]]:
    if not CLIPS.is_dir():
        return []
    with open(CLIPS / "codecs" / "codecs.csv", newline="") as file:
        rows = [(row["file"], int(row["decoded"])) for row in csv.DictReader(file)]
    return [(name, count) for name, count in rows if not name.startswith("40_")]


def _small(width: int, height: int) -> View:
    return all_of(width // 8, height // 8)


@needs_clips
@pytest.mark.parametrize(("name", "num_frames"), _codec_clips())
def test_real_clips_by_jumps_and_from_the_start(name: str, num_frames: int) -> None:
    path = CLIPS / "codecs" / name
    whole = read_clip(path, _every, _small)
    assert len(whole) == num_frames
    in_memory = Encoded(str(path), path.read_bytes())
    assert probe(in_memory) == probe(path)
    film = as_film(path, num_frames)
    for chosen in np.random.default_rng(0).integers(0, num_frames, (2, 2)).tolist():
        for video in (path, in_memory, film):
            clip = read_clip(video, _these(*chosen), _small, num_frames)
            np.testing.assert_array_equal(clip, whole[chosen])
    keys = [0] if film.index is None or not len(film.index.keys) else film.index.keys.tolist()
    for number in {*keys[-6:], *(max(0, key - 1) for key in keys[-6:]), num_frames - 1}:
        clip = read_clip(film, _these(number), _small, num_frames)
        np.testing.assert_array_equal(clip, whole[[number]])


# Limits, and the error.


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(pixels=32 * 48 - 1), "a frame of 48 x 32 pixels is not read"),
        (Limits(packets=39), "does not end after 39 packets"),
        (Limits(seconds=0), "takes longer than 0 s to read"),
    ],
)
def test_a_video_beyond_a_limit_is_refused(video: Path, limits: Limits, reason: str) -> None:
    for count in (None, NUM_FRAMES):
        with pytest.raises(DecodeError, match=reason):
            read_clip(video, lambda n: np.array([n - 1]), all_of, count, limits=limits)
    with pytest.raises(DecodeError, match=reason):
        probe(video, limits)


def test_the_decoder_itself_refuses_a_size_that_only_comes_later(tmp_path: Path) -> None:
    # Two raw streams in one: the header's size is the first one's.
    small, large = np.zeros((3, 32, 32, 3), np.uint8), np.zeros((3, 64, 64, 3), np.uint8)
    for name, frames in (("small.mpg", small), ("large.mpg", large)):
        write_video(tmp_path / name, frames, codec="mpeg1video", b_frames=0)
    both = (tmp_path / "small.mpg").read_bytes()[:-4] + (tmp_path / "large.mpg").read_bytes()
    (tmp_path / "both.mpg").write_bytes(both)
    with pytest.raises(DecodeError):
        probe(tmp_path / "both.mpg", Limits(pixels=33 * 33))


def test_an_error_travels_between_processes_with_its_span() -> None:
    error = pickle.loads(pickle.dumps(DecodeError("a.mp4", "is outside", Span(3, 9))))
    assert (error.path, error.reason, error.span) == ("a.mp4", "is outside", Span(3, 9))
    assert str(error) == "a.mp4: is outside" and DecodeError("a", "b").span == WHOLE
