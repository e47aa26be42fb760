"""Open clips: the two steps of a read, and what happens where a container is wrong, or a file changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from av.video.frame import VideoFrame

from summit_train.core.files import file_sha256, read_file
from summit_train.data.loading import read_open
from summit_train.data.video import clips, source
from summit_train.data.video.augment import View
from summit_train.data.video.clips import ArrayClip, ChooseAgain, DerivedClip, PartClip, VideoClip
from summit_train.data.video.decode import NumberedFrame
from summit_train.data.video.encode import write_video
from summit_train.data.video.source import Budget, DecodeError, Encoded, Limits, load_video
from summit_train.data.video.span import Span
from tests.data.clips import all_of, as_film

NUM_FRAMES = 24
PIXELS = np.arange(0, 240, 10, dtype=np.uint8)[:, None, None, None] * np.ones((1, 32, 48, 3), np.uint8)


@pytest.fixture
def video(tmp_path: Path) -> Encoded:
    write_video(tmp_path / "a.mp4", PIXELS)
    return Encoded(str(tmp_path / "a.mp4"))


def _numbers(pixels: np.ndarray) -> list[list[int]]:
    """Which frames of PIXELS are decoded."""
    return np.rint(pixels.mean((2, 3, 4)) / 10).astype(int).tolist()


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What `VideoClip` begins to decode: "start", or the frames of jumps."""
    found = list[object]()
    by_jumps, every_frame = clips.frames_by_jumps, clips.every_frame
    monkeypatch.setattr(clips, "frames_by_jumps", lambda *a, **k: found.append(a[1]) or by_jumps(*a, **k))
    monkeypatch.setattr(clips, "every_frame", lambda *a: found.append("start") or every_frame(*a))
    return found


@pytest.mark.parametrize("num_frames", [None, NUM_FRAMES])
def test_a_read_goes_on_from_the_frame_whose_size_was_asked_for(
    video: Encoded, num_frames: int | None, begun: list[object]
) -> None:
    frames = np.array([[7, 3, 3], [20, 4, 5]])
    with VideoClip(video, num_frames) as opened:
        assert opened.num_frames == NUM_FRAMES
        assert opened.size(frames) == (48, 32)
        assert _numbers(opened.read(frames, [all_of(48, 32)])) == frames.tolist()
        assert begun == ["start" if num_frames is None else [3, 4, 5, 7, 20]]
        assert _numbers(opened.read(frames, [all_of(48, 32)])) == frames.tolist()


@pytest.mark.parametrize(
    ("skipped", "reads", "starts"),
    [
        (1000, ([0, 23], [0, 1, 2], [3, 4], [9, 23], [1, 2]), [[0, 23], "start", [1, 2]]),
        (10, ([20], [1, 2], [12], [23], [22]), [[20], "start", [23]]),  # a read far ahead jumps too
    ],
)
def test_later_reads_decode_on_and_jump(
    video: Encoded,
    begun: list[object],
    monkeypatch: pytest.MonkeyPatch,
    skipped: int,
    reads: Sequence[list[int]],
    starts: list[object],
) -> None:
    monkeypatch.setattr(clips, "_MAX_SKIPPED_FRAMES", skipped)
    with VideoClip(video, NUM_FRAMES) as opened:
        for numbers in reads:
            assert _numbers(opened.read(np.array([numbers]), [all_of(48, 32)])) == [numbers]
    assert begun == starts


def test_the_time_in_which_a_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, 1000, 1009.9, 1020])  # ten seconds of the first thousand count
    monkeypatch.setattr(source, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    budget = Budget("a.mp4", Limits(seconds=20))
    for _ in range(3):
        budget.check()
    with pytest.raises(DecodeError, match="takes longer than 20 s to read"):
        budget.check()


def test_each_read_after_the_first_has_its_own_seconds(video: Encoded, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(seconds=1.0, step=0.0)

    def monotonic() -> float:
        clock.seconds += clock.step
        return clock.seconds

    monkeypatch.setattr(source, "time", SimpleNamespace(monotonic=monotonic))
    frames, views = np.array([[3]]), [all_of(48, 32)]
    with VideoClip(video, NUM_FRAMES, Limits(seconds=20)) as opened:
        for _ in range(3):
            assert _numbers(opened.read(frames, views)) == [[3]]
            clock.seconds += 2000
        clock.step = 9
        with pytest.raises(DecodeError, match="takes longer than 20 s to read"):
            opened.read(frames, views)


@pytest.mark.parametrize("claimed", [NUM_FRAMES + 6, 2 * NUM_FRAMES])
@pytest.mark.parametrize("film", [False, True])
def test_a_wrong_number_of_frames_misleads_once(tmp_path: Path, video: Encoded, claimed: int, film: bool) -> None:
    if film:
        video = as_film(tmp_path / "a.mp4", claimed)
    last = np.array([[claimed - 1]])
    with VideoClip(video, claimed) as opened:
        with pytest.raises(ChooseAgain):
            opened.size(last)
        assert opened.num_frames == NUM_FRAMES
        assert opened.size(np.array([[23]])) == (48, 32)
    with VideoClip(video, claimed) as opened, pytest.raises(ChooseAgain):
        opened.read(np.array([[0, claimed - 1]]), [all_of(48, 32)])
    asked = list[int]()
    with PartClip(VideoClip(video, claimed), Span(2), "a.mp4") as span:
        decoded = read_open(span, lambda n: asked.append(n) or np.array([[0, n - 1]]), lambda w, h: [all_of(w, h)])
    assert asked == [claimed - 2, NUM_FRAMES - 2]
    assert (decoded.num_frames, decoded.frames.tolist(), _numbers(decoded.pixels)) == (22, [[0, 21]], [[2, 23]])
    with PartClip(VideoClip(video, claimed), Span(2, NUM_FRAMES + 1), "a.mp4") as span:
        with pytest.raises(ChooseAgain):
            span.size(last - 3)
        with pytest.raises(DecodeError, match="has 24 frames, and the span 2:25 does not lie among them"):
            print(span.num_frames)


def test_a_number_of_frames_that_proves_wrong_after_a_read_is_an_error(video: Encoded) -> None:
    """What was shown was chosen of another number of frames."""
    with VideoClip(video, NUM_FRAMES + 6) as opened:
        assert _numbers(opened.read(np.array([[0, 5]]), [all_of(48, 32)])) == [[0, 5]]
        with pytest.raises(DecodeError, match="decoded from the start, it has 24 frames instead of 30"):
            opened.read(np.array([[29]]), [all_of(48, 32)])


def test_frames_of_another_size_after_a_jump_that_failed_are_cropped_anew(
    video: Encoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container promises 40 x 20, and the decoder contradicts it in the middle."""

    def jumps(video: Encoded, wanted: Sequence[int], *_: object, **__: object) -> Iterator[NumberedFrame]:
        yield wanted[0], VideoFrame.from_ndarray(np.zeros((20, 40, 3), np.uint8), "rgb24")
        raise DecodeError(video.name, "is damaged")

    monkeypatch.setattr(clips, "frames_by_jumps", jumps)
    sizes = list[tuple[int, int]]()

    def crop(width: int, height: int) -> list[View]:
        sizes.append((width, height))
        return [all_of(width, height)]

    with VideoClip(video, NUM_FRAMES) as opened:
        decoded = read_open(opened, lambda n: np.array([[5, 6]]), crop)
    assert sizes == [(40, 20), (48, 32)]
    assert (decoded.size, decoded.pixels.shape, _numbers(decoded.pixels)) == ((48, 32), (1, 2, 32, 48, 3), [[5, 6]])


@pytest.mark.parametrize("numbers", [[], [-1], [NUM_FRAMES]])
def test_frames_that_are_not_there_are_a_mistake_of_the_caller(numbers: list[int]) -> None:
    with ArrayClip(PIXELS) as opened, pytest.raises(ValueError, match="chosen of 24 do not lie among them"):
        opened.read(np.array([numbers], np.int64), [all_of(48, 32)])


def test_what_is_made_of_a_clip_closes_it(video: Encoded) -> None:
    opened = VideoClip(video, NUM_FRAMES)
    with DerivedClip(opened) as derived:
        assert derived.num_frames == NUM_FRAMES
        opened.size(np.array([[3]]))
    assert opened._begun is None


def test_a_file_that_is_written_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(b"old bytes")
    video = Encoded(str(path), state=Encoded(str(path)).check())
    assert load_video(str(path), None).content == b"old bytes" and video.sha256() == file_sha256(path)

    def read_then_written(name: str) -> bytes:
        content = read_file(name)
        path.write_bytes(b"more bytes than before")
        return content

    monkeypatch.setattr(source, "read_file", read_then_written)
    with pytest.raises(DecodeError, match=r"a\.mp4: has changed while it was read"):
        load_video(str(path), None)
    with pytest.raises(DecodeError, match=r"a\.mp4: has changed while it was read"):
        video.sha256()
