"""Frames one by one, of files and pipes: which they are, when they are shown, and what a cut stream still gives."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from summit_train.data.video.encode import write_video
from summit_train.data.video.render import Renderer, upright_size
from summit_train.data.video.source import DecodeError
from summit_train.data.video.stream import Progress, StreamFrame, duration_of, file_frames, pipe_frames, raw_frames
from tests.data.clips import CLIPS, all_of, needs_clips, read_clip, write_as

Frames = NDArray[np.uint8]
Read = Callable[[Path, Progress], Iterator[StreamFrame]]
NUM_FRAMES = 30


class Arriving(io.RawIOBase):
    """A pipe that gives at most 700 bytes at a time, and counts them."""

    def __init__(self, content: bytes) -> None:
        self._content = io.BytesIO(content)
        self.given = 0

    def read(self, size: int = -1) -> bytes:
        content = self._content.read(min(size, 700))
        self.given += len(content)
        return content

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


def noise(num_frames: int = NUM_FRAMES, height: int = 32, width: int = 48) -> Frames:
    return np.random.default_rng(5).integers(0, 256, (num_frames, height, width, 3), np.uint8)


def of_file(path: Path, progress: Progress) -> Iterator[StreamFrame]:
    return file_frames(str(path), progress)


def of_pipe(path: Path, progress: Progress) -> Iterator[StreamFrame]:
    return pipe_frames(Arriving(path.read_bytes()), progress)


def pictures(frames: Iterator[StreamFrame]) -> Frames:
    decoded = [frame.decoded for frame in frames]
    render = Renderer([all_of(*upright_size(decoded[0]))])
    return np.stack([render(frame)[0] for frame in decoded])


def stored(path: Path) -> Frames:
    return read_clip(path, np.arange, all_of)


each_way = pytest.mark.parametrize("read", [of_file, of_pipe])


@each_way
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.mkv", {"b_frames": 3}),
        ("a.ts", {"b_frames": 2}),  # its times begin above 0
        ("a.webm", {"codec": "libvpx-vp9", "b_frames": 0}),
        ("a.avi", {"codec": "mpeg4", "b_frames": 0}),
        ("a.avi", {"codec": "mpeg4", "b_frames": 2}),  # AVI has no presentation times
        ("a.mkv", {"key_every": 250, "rotation": 90}),
        ("a.h264", {"b_frames": 0}),  # has no times
    ],
)
def test_every_frame_comes_once_in_order(tmp_path: Path, read: Read, name: str, options: dict[str, object]) -> None:
    if options.get("codec", "mpeg4") not in av.codecs_available:
        pytest.skip(f"this PyAV has no {options['codec']}")
    write_as(tmp_path / name, noise(), **options)
    progress = Progress()
    frames = list(read(tmp_path / name, progress))
    assert [frame.number for frame in frames] == list(range(NUM_FRAMES))
    assert [frame.seconds for frame in frames] == pytest.approx([n / 25 for n in range(NUM_FRAMES)], abs=1e-3)
    assert (pictures(iter(frames)) == stored(tmp_path / name)).all()
    assert progress == Progress(NUM_FRAMES, 0, None, Fraction(25))


def test_times_are_the_containers(tmp_path: Path) -> None:
    write_as(tmp_path / "a.mkv", noise(4), 10, times=[5, 15, 35, 36])
    frames = list(of_file(tmp_path / "a.mkv", Progress()))
    assert [frame.seconds for frame in frames] == pytest.approx([0, 1.0, 3.0, 3.1])


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        ([(20, 3), (25, 3), (22, 3)], 0.8),  # to the end of the last frame
        ([(0, 0), (1, 0), (4, 0)], 0.6),  # without its duration a mean interval
        ([(5, 0)], None),
        ([], None),
    ],
)
def test_the_duration_follows_the_frames_times(times: list[tuple[int, int]], seconds: float | None) -> None:
    assert duration_of(times, Fraction(1, 10)) == pytest.approx(seconds)


def test_a_pipe_is_read_as_far_as_it_is_needed(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mkv", noise(80, 64, 64), b_frames=0)
    pipe = Arriving((tmp_path / "a.mkv").read_bytes())
    frames = pipe_frames(pipe, Progress())
    next(frames)
    assert 0 < pipe.given < (tmp_path / "a.mkv").stat().st_size / 2
    frames.close()


def test_an_mp4_with_its_index_behind_is_refused_on_a_pipe(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", noise(30))
    assert len(list(of_file(tmp_path / "a.mp4", Progress()))) == 30
    with pytest.raises(DecodeError, match=r"standard input: no frame of this mp4 .* pipe matroska, mpegts"):
        list(of_pipe(tmp_path / "a.mp4", Progress()))


@each_way
@pytest.mark.parametrize("name", ["a.mkv", "a.ts", "a.avi"])
def test_a_cut_stream_gives_what_was_whole(tmp_path: Path, read: Read, name: str) -> None:
    write_video(tmp_path / name, noise(), b_frames=0, **({"codec": "mpeg4"} if name == "a.avi" else {}))
    all_of_it, content = stored(tmp_path / name), (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) * 3 // 5])
    progress = Progress()
    ours = pictures(read(tmp_path / name, progress))
    assert progress.damage is not None
    assert NUM_FRAMES / 4 < len(ours) == progress.num_frames - progress.num_damaged < NUM_FRAMES * 3 / 4
    assert (ours == all_of_it[: len(ours)]).all()


def test_damage_in_the_middle_is_counted_and_the_rest_goes_on(tmp_path: Path) -> None:
    write_video(tmp_path / "a.avi", noise(), codec="mpeg4", b_frames=0, key_every=4)
    content = bytearray((tmp_path / "a.avi").read_bytes())
    half = len(content) // 2
    content[half : half + 400] = bytes(byte ^ 0x5A for byte in content[half : half + 400])
    (tmp_path / "a.avi").write_bytes(content)
    progress = Progress()
    numbers = [frame.number for frame in of_file(tmp_path / "a.avi", progress)]
    assert progress.damage is not None and 0 < progress.num_damaged < 4
    assert len(numbers) == progress.num_frames - progress.num_damaged and numbers[-1] == progress.num_frames - 1


def test_raw_frames_are_their_pixels() -> None:
    progress, content = Progress(), noise(5)
    frames = list(raw_frames(Arriving(content.tobytes()), (48, 32), Fraction(30000, 1001), progress))
    assert [frame.seconds for frame in frames] == pytest.approx([n * 1001 / 30000 for n in range(5)])
    assert (pictures(iter(frames)) == content).all()
    assert progress == Progress(5, 0, None, Fraction(30000, 1001))
    cut = Progress()
    assert len(list(raw_frames(Arriving(content.tobytes()[:-100]), (48, 32), Fraction(25), cut))) == cut.num_frames == 4
    assert cut.damage == "ends in the middle of frame 4: 4,508 of its 4,608 bytes"


@pytest.mark.parametrize(
    ("content", "size", "reason"),
    [
        (b"", None, "standard input: is empty"),
        (bytes(range(256)) * 40, None, "standard input: is not a video in a supported format"),
        (b"#EXTM3U\n/etc/passwd\n", None, "standard input: is not a video"),
        (b"", (4, 4), "standard input: is empty"),
        (bytes(47), (4, 4), "ends in the middle of frame 0: 47 of its 48 bytes"),
        (b"", (99999, 99999), "99999 x 99999 pixels"),
    ],
)
def test_what_is_not_a_video_or_a_raw_frame(content: bytes, size: tuple[int, int] | None, reason: str) -> None:
    pipe, progress = Arriving(content), Progress()
    with pytest.raises(DecodeError, match=reason):
        list(pipe_frames(pipe, progress) if size is None else raw_frames(pipe, size, Fraction(25), progress))


def test_a_video_without_a_whole_frame(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mkv", noise(1))
    content = (tmp_path / "a.mkv").read_bytes()
    with pytest.raises(DecodeError, match="standard input: "):
        list(pipe_frames(Arriving(content[: len(content) * 2 // 3]), Progress()))
    with pytest.raises(DecodeError, match="No such file"):
        list(file_frames(str(tmp_path / "none.mkv"), Progress()))


def test_an_interrupt_within_ffmpeg_is_not_lost(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mkv", noise())
    content = (tmp_path / "a.mkv").read_bytes()

    class Interrupted(Arriving):
        def read(self, size: int = -1) -> bytes:
            if self.given > len(content) / 2:
                raise KeyboardInterrupt
            return super().read(size)

    for given in (0, len(content)):  # while it plays, and while it is opened
        pipe, progress = Interrupted(content), Progress()
        pipe.given = given
        with pytest.raises(KeyboardInterrupt):
            list(pipe_frames(pipe, progress))
        assert (progress.num_frames > 10) == (given == 0)


@needs_clips
@each_way
def test_real_clips_of_many_codecs(read: Read) -> None:
    for name, num_frames in (
        ("03_hmdb_divx_bframes_560x240.avi", 72),
        ("17_exo_camera_rot90_vfr.mp4", 23),
        ("14_decord_unordered_4frames.mov", 4),
        ("25_exo_vp9_odd_161x121.webm", 30),
        ("26_exo_vp9_10bit.webm", 72),
        ("27_exo_fragmented.mp4", 30),
        ("38_asl_again_mkv_fullrange.mkv", 77),
    ):
        progress = Progress()
        seconds = [frame.seconds for frame in read(CLIPS / "codecs" / name, progress)]
        assert (len(seconds), progress.damage) == (num_frames, None), name
        assert seconds == sorted(seconds) and seconds[0] == 0, name
