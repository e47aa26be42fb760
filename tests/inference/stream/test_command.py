"""`summit-train stream`: JSON lines and text, pipes, live sources, the video that shows it, wrong input."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from summit_train.__main__ import main
from summit_train.data.video.encode import with_caption, write_video
from summit_train.data.video.render import Renderer, upright_size
from summit_train.data.video.stream import Progress, StreamFrame, file_frames
from summit_train.inference.stream.command import drawn_in
from tests.data.clips import all_of, write_as
from tests.data.video.test_stream import noise
from tests.runs import changed_copy
from tests.worlds import PATIENCE_S, ROOT, Said, Say, main_said, refused

KEYS = ["frame", "seconds", "label", "name", "score", "latency_ms"]
NO_VIDEO = "video in a supported format, or its header is damaged"
CLIPS = ROOT.parent / "shared" / "clips" / "codecs"


@pytest.fixture
def say(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Say]:
    """Runs `stream RUN ...` in this process, with these bytes on standard input: (status, stdout, stderr)."""
    kept = os.dup(0)

    def say(*words: str | Path, content: bytes | None = None, run: Path = trained_run) -> Said:
        if content is not None:
            assert len(content) < 1 << 16, "what a pipe holds"
            read, write = os.pipe()
            os.write(write, content)
            os.dup2(read, 0)
            os.close(read)
            os.close(write)
        return main_said(capsys, "stream", run, *words)

    yield say
    os.dup2(kept, 0)
    os.close(kept)


@pytest.fixture(scope="module")
def video(motion_set: Path) -> Path:
    return motion_set / "videos/val_000001.mp4"


def lines(said: Said) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said[1].splitlines()]


def mkv(folder: Path, num_frames: int = 12) -> bytes:
    write_video(folder / "noise.mkv", noise(num_frames, 32, 32), b_frames=0)
    return (folder / "noise.mkv").read_bytes()


def test_one_line_a_frame(say: Say, video: Path, motion_set: Path) -> None:
    said = say(video, "--json")
    assert said[0] == 0
    names = (motion_set / "classes.txt").read_text().split()
    assert [line["frame"] for line in lines(said)] == list(range(8))
    for line in lines(said):
        assert list(line) == KEYS
        assert line["name"] == names[line["label"]] and 0.25 <= line["score"] <= 1 and line["latency_ms"] > 0
        assert line["seconds"] == pytest.approx(line["frame"] / 25)
    first, summary = said[2].splitlines()
    assert "tsm resnet18, every frame, the average of the last 4" in first
    assert summary.startswith("8 frames (8 seen, 0 skipped by the stride, 0 dropped, 0 damaged); latency median ")


def test_stride_and_window(say: Say, video: Path) -> None:
    every, strided = (lines(say(video, "--json", "--window", "1", *more)) for more in ([], ["--stride", "3"]))
    assert [line["frame"] for line in strided] == [0, 3, 6]
    assert strided[0]["score"] == every[0]["score"] and strided[1]["score"] != every[3]["score"]
    said = say(video, "--json", "data.frame_stride=3", "--window", "0", "evaluate.crops=3")
    assert [line["frame"] for line in lines(said)] == [0, 3, 6]
    assert "evaluate.crops is 3: a stream sees the centre crop alone" in said[2]
    assert "1 frame in 3, the average of all since the start" in said[2]
    assert "8 frames (3 seen, 5 skipped by the stride, 0 dropped, 0 damaged)" in said[2]


def test_without_json_a_line_where_the_label_changes(
    say: Say, video: Path, trained_run: Path, motion_set: Path, tmp_path: Path
) -> None:
    labels = [line["name"] for line in lines(say(video, "--json"))]
    alone = changed_copy(trained_run, tmp_path / "alone.pt", classes=None)
    status, out, err = say(video, "--classes", motion_set / "classes.txt", run=alone)
    assert "lacks the names" not in err
    changes = [name for n, name in enumerate(labels) if n == 0 or labels[n - 1] != name]
    assert status == 0 and [line.split()[3] for line in out.splitlines()] == changes


def _without_times(said: Said) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "latency_ms"} for line in lines(said)]


def test_a_container_on_standard_input_is_as_its_file(say: Say, tmp_path: Path) -> None:
    content = mkv(tmp_path)
    piped, read = (_without_times(say(source, "--json", content=content)) for source in ("-", tmp_path / "noise.mkv"))
    assert piped == read and len(piped) == 12


def test_raw_frames_on_standard_input(say: Say) -> None:
    content = noise(5, 40, 36).tobytes()
    found = lines(say("-", "--raw", "36x40", "--fps", "10", "--json", content=content))
    assert [line["seconds"] for line in found] == [0, 0.1, 0.2, 0.3, 0.4]
    assert lines(say("-", "--raw", "36x40", "--json", content=content))[4]["seconds"] == 0.16


@pytest.mark.parametrize("raw", [(), ("--raw", "32x32")])
def test_a_stream_that_ends_in_the_middle_of_a_frame(say: Say, tmp_path: Path, raw: tuple[str, ...]) -> None:
    content = noise(12, 32, 32).tobytes() if raw else mkv(tmp_path)
    said = say("-", *raw, "--json", content=content[: len(content) * 3 // 4 - 7])
    _, summary, reason = said[2].splitlines()
    assert said[0] == 1 and 4 < len(lines(said)) < 12
    assert f"({len(lines(said))} seen" in summary
    wanted = "ends in the middle of frame 8: 3,065 of its 3,072 bytes" if raw else "File ended prematurely"
    assert reason.startswith("summit-train: standard input: ") and wanted in reason
    assert reason.endswith(f"; {len(lines(said))} whole frames were read")


@pytest.mark.parametrize("live", [(), ("--live",)])
def test_a_signal_ends_the_stream_in_order(trained_run: Path, tmp_path: Path, live: tuple[str, ...]) -> None:
    """In a forked process, which need not import torch again, between two pipes."""
    words = ("stream", str(trained_run), "-", "--raw", "32x32", "--json", *live)
    out, errors = tmp_path / "show.mp4", tmp_path / "errors"
    (theirs, to_it), (from_it, printed) = os.pipe(), os.pipe()

    def work() -> None:
        os.close(to_it)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
        for number, stream in enumerate((theirs, printed, os.open(errors, os.O_CREAT | os.O_WRONLY))):
            os.dup2(stream, number)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        os._exit(main([*words, "--draw", str(out)]))

    process = get_context("fork").Process(target=work)
    process.start()
    os.close(theirs)
    os.close(printed)
    with open(to_it, "wb") as pictures, open(from_it) as told:
        found = []
        for picture in noise(4, 32, 32):
            pictures.write(picture.tobytes())
            pictures.flush()
            found.append(json.loads(told.readline()))
        assert [line["frame"] for line in found] == [0, 1, 2, 3] and not out.exists()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM if live else signal.SIGINT)
        process.join(PATIENCE_S)
    said = errors.read_text()
    assert process.exitcode == 130 and "4 frames (4 seen" in said and "Traceback" not in said, said
    assert len(list(file_frames(str(out), Progress()))) == 4


def test_the_shown_video_has_every_frame(say: Say, video: Path, tmp_path: Path) -> None:
    said = say(video, "--draw", tmp_path / "show.mp4", "--stride", "3")
    assert said[0] == 0
    shown, frames = (list(file_frames(str(path), Progress())) for path in (tmp_path / "show.mp4", video))
    assert [frame.seconds for frame in shown] == pytest.approx([frame.seconds for frame in frames])
    live = say(video, "--draw", tmp_path / "live.mp4", "--stride", "3", "--live")
    assert live[0] == 0 and len(list(file_frames(str(tmp_path / "live.mp4"), Progress()))) == 3


@pytest.mark.parametrize(
    ("words", "content", "reason"),
    [
        ("", b"", "is empty"),
        ("--raw 4x4", b"", "is empty"),
        ("", b"a line of text\n" * 99, NO_VIDEO),
        ("--live", b"a line of text\n" * 99, NO_VIDEO),
    ],
)
def test_standard_input_that_is_no_video(say: Say, words: str, content: bytes, reason: str) -> None:
    line = refused(say("-", *words.split(), content=content))
    assert line.startswith("standard input: ") and line.endswith(reason)


@pytest.mark.skipif(not CLIPS.is_dir(), reason="the real clips in ../shared/clips are not here")
def test_a_real_clip_that_is_damaged(say: Say) -> None:
    said = say(CLIPS / "40_corrupted.mp4", "--json")
    assert said[0] == 1 and len(lines(said)) == 48 and "40_corrupted.mp4: decoding fails after frame 28" in said[2]


LEVELS = 20 + 10 * np.arange(20)


@pytest.fixture
def turned(tmp_path: Path) -> Path:
    """20 grey frames of 96 x 64 pixels, stored turned by 90 degrees, of variable rate."""
    pictures = np.broadcast_to(LEVELS[:, None, None, None].astype(np.uint8), (20, 96, 64, 3))
    times = [n if n < 10 else 3 * n for n in range(20)]
    write_as(tmp_path / "a.mkv", np.ascontiguousarray(pictures), 10, rotation=90, times=times)
    return tmp_path / "a.mkv"


def read(path: Path) -> tuple[list[StreamFrame], NDArray[np.uint8]]:
    found = list(file_frames(str(path), Progress()))
    render = Renderer([all_of(*upright_size(found[0].decoded))])
    return found, np.stack([render(frame.decoded)[0] for frame in found])


def captioned(picture: NDArray[np.uint8], values: dict[str, Any]) -> NDArray[np.uint8]:
    return with_caption(picture, values["text"])


def test_every_frame_is_shown_upright_and_on_time(turned: Path, tmp_path: Path) -> None:
    out, progress = tmp_path / "show.mp4", Progress()
    with drawn_in(str(out), str(turned), progress, captioned) as add:
        for frame in file_frames(str(turned), progress):
            add(frame, {"text": "walk 0.93"} if frame.number >= 5 else None)
            assert not out.exists()
    (source, _), (found, pictures) = read(turned), read(out)
    assert [frame.seconds for frame in found] == pytest.approx([frame.seconds for frame in source], abs=1e-3)
    assert pictures.shape == (20, 64, 96, 3)
    assert pictures[:, 40:, 50:].mean((1, 2, 3)) == pytest.approx(LEVELS, abs=2)
    corner = pictures[:, :8, :20].min((1, 2, 3))
    assert (corner[5:] < 12).all() and corner[:5] == pytest.approx(LEVELS[:5], abs=6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mkv", "show.mp4"]


def test_two_frames_of_one_time_and_an_error(turned: Path, tmp_path: Path) -> None:
    source, _ = read(turned)
    with drawn_in(str(tmp_path / "show.mkv"), str(turned), Progress(), captioned) as add:
        for number in (0, 1, 1, 0, 2):
            add(source[number], None)
    seconds = [frame.seconds for frame in read(tmp_path / "show.mkv")[0]]
    assert len(seconds) == 5 and seconds == sorted(seconds) and seconds[-1] == pytest.approx(0.2, abs=1e-3)
    with (
        pytest.raises(ZeroDivisionError),
        drawn_in(str(tmp_path / "torn.mp4"), str(turned), Progress(), captioned) as add,
    ):
        add(source[0], None)
        _ = 1 / 0
    with drawn_in(str(tmp_path / "empty.mp4"), str(turned), Progress(), captioned):
        pass  # without a frame there is no video
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mkv", "show.mkv"]
