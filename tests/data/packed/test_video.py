"""Clips packed as small videos: frame i is the clip's frame i, whatever the file is, and no other frame is there."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.video.frame import VideoFrame

from summit_train.core.files import file_sha256
from summit_train.data.manifest import ManifestRow
from summit_train.data.packed.format import Packing
from summit_train.data.packed.read import ShardStore
from summit_train.data.video import films
from summit_train.data.video.encode import write_video
from summit_train.data.video.render import Frames
from summit_train.data.video.source import Encoded
from summit_train.data.video.span import WHOLE, Span
from tests.data.clips import CLIPS, all_of, needs_clips, probe, stored_clip, write_as
from tests.data.packed.conftest import all_frames, bad_clips, packed_store, stored

NUM_FRAMES = 21
# Scenes of soft blocks that differ by far more than any coding does.
FRAMES = np.random.default_rng(2).integers(0, 256, (NUM_FRAMES, 3, 4, 3), np.uint8).repeat(16, 1).repeat(16, 2)
VIDEO = Packing("video", gop=4)


def _nearest(packed: Any, frames: Any) -> list[int]:
    """Of which of these frames is each packed one? By the middles of blocks, where no colour mixes."""
    packed, frames = (np.asarray(one, int)[:, 8::16, 8::16] for one in (packed, frames))
    return [int(np.abs(frames - one).mean((1, 2, 3)).argmin()) for one in packed]


# Files by name: their frames, and how they are encoded.
SOURCES: dict[str, tuple[Frames, dict[str, Any]]] = {
    "b.mp4": (FRAMES, {"b_frames": 2, "codec": "mpeg4"}),
    "t.mp4": (FRAMES, {"times": [n * n for n in range(NUM_FRAMES)]}),
    "turned.mp4": (np.rot90(FRAMES, -1, (1, 2)), {"rotation": 90}),
    "odd.mkv": (FRAMES[:, :47, :61], {}),
}


@pytest.mark.parametrize("name", [*SOURCES, "pictures"])
def test_frame_i_is_the_clips_frame_i(tmp_path: Path, name: str) -> None:
    if name in SOURCES:
        frames, how = SOURCES[name]
        write_as(tmp_path / name, frames, **how)
    else:
        (tmp_path / name).mkdir()
        for number, frame in enumerate(FRAMES):
            VideoFrame.from_ndarray(frame, "rgb24").save(str(tmp_path / name / f"{number:05}.jpg"))
    spans = [WHOLE, Span(3, 10), Span(5, 6), Span(8), Span(3, 10)]
    store = stored(tmp_path, [ManifestRow(name, 0, span=span) for span in spans])
    for every in (1, 3):
        packed = packed_store(store, tmp_path / str(every), Packing("video", every=every, gop=4))
        assert packed.manifest.frame_counts.tolist() == [NUM_FRAMES] * len(spans)
        with tarfile.open(tmp_path / str(every) / "000000.tar") as tar:
            members = [tar.extractfile(f"{clip:09}.mp4").read() for clip in range(len(spans))]  # type: ignore[union-attr]
        for clip, span in enumerate(spans):
            whole, ours = all_frames(store, clip), all_frames(packed, clip)
            assert ours.shape == whole.shape
            assert _nearest(ours, whole) == [n // every * every for n in range(len(whole))]
            kept = probe(Encoded("a.mp4", members[clip]))
            height, width = (side // 2 * 2 for side in whole.shape[1:3])
            numbers = span.frames("", NUM_FRAMES)[::every]
            assert (kept.num_frames, kept.width, kept.height) == (len(numbers), width, height)


@needs_clips
@pytest.mark.parametrize(
    "name", ["13_decord_rot270_3frames.mov", "17_exo_camera_rot90_vfr.mp4", "25_exo_vp9_odd_161x121.webm"]
)
def test_real_clips_keep_their_frames(tmp_path: Path, name: str) -> None:
    store = stored(tmp_path, [ManifestRow(str(CLIPS / "codecs" / name), 0)])
    whole, ours = (all_frames(one, 0).astype(int) for one in (store, packed_store(store, tmp_path / "out", VIDEO)))
    errors = np.array([[np.abs(one - other).mean() for other in whole] for one in ours])
    # A real clip may show two frames that are the same.
    assert ours.shape == whole.shape and np.all(errors.diagonal() <= 1.01 * errors.min(1))


@pytest.mark.parametrize(("colours", "is_full"), [("ITU709", False), ("ITU601", True), ("ITU709", True)])
def test_colours_are_the_files(tmp_path: Path, colours: str, is_full: bool) -> None:
    """Read with another matrix or range, these colours would differ by 8 and more."""
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.color_range = 2 if is_full else 1
        stream.codec_context.colorspace = 1 if colours == "ITU709" else 5
        for frame in FRAMES[:3]:
            how = {"dst_colorspace": colours, "dst_color_range": "JPEG" if is_full else "MPEG"}
            container.mux(stream.encode(VideoFrame.from_ndarray(frame, "rgb24").reformat(format="yuv420p", **how)))
        container.mux(stream.encode(None))
    store = stored(tmp_path, [ManifestRow("a.mp4", 0)])
    middles = lambda one: all_frames(one, 0)[:, 8::16, 8::16].astype(int)  # noqa: E731
    ours, files = middles(packed_store(store, tmp_path / "out", VIDEO)), middles(store)
    assert np.abs(files - FRAMES[:3, 8::16, 8::16]).mean() < 2
    assert np.abs(ours - files).mean() < 2


def test_one_frame_and_the_smallest_frames(tmp_path: Path) -> None:
    write_video(tmp_path / "one.mp4", FRAMES[:1])
    write_video(tmp_path / "tiny.mkv", FRAMES[:2, :1, :1], codec="ffv1", b_frames=0)
    write_video(tmp_path / "wide.mkv", FRAMES[:2].repeat(10, 2)[:, :40], codec="ffv1", b_frames=0)
    packed = packed_store(
        stored(tmp_path, [ManifestRow(name, 0) for name in ("one.mp4", "tiny.mkv", "wide.mkv")]),
        tmp_path / "out",
        Packing("video", short_side=10),
    )
    sizes = [all_frames(packed, clip).shape[:3] for clip in range(3)]
    assert sizes == [(1, 48, 64), (2, 1, 1), (2, 40, 640)]


def test_a_long_video_is_read_by_its_index(tmp_path: Path, kept_indexes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(tmp_path / "a.mp4", FRAMES)
    packed = packed_store(stored(tmp_path, [ManifestRow("a.mp4", 0)]), tmp_path / "out", VIDEO)
    held = all_frames(packed, 0)
    monkeypatch.setattr(films, "_MIN_FRAMES", NUM_FRAMES)
    np.testing.assert_array_equal(all_frames(ShardStore(packed.manifest), 0), held)
    assert len(list(kept_indexes.iterdir())) == 1


def test_every_gop_th_frame_is_a_key_frame(tmp_path: Path) -> None:
    moving = np.stack([np.roll(FRAMES[0], n, 1) for n in range(NUM_FRAMES)])
    write_video(tmp_path / "a.mp4", moving)
    packed_store(stored(tmp_path, [ManifestRow("a.mp4", 0)]), tmp_path / "out", VIDEO)
    with tarfile.open(tmp_path / "out" / "000000.tar") as tar:
        member = tar.extractfile("000000000.mp4")
        assert member is not None
        content = io.BytesIO(member.read())
    with av.open(content) as container:
        shown = [(packet.pts, packet.is_keyframe) for packet in container.demux(video=0) if packet.size]
    assert shown == [(shown[1][0] * n, n % 4 == 0) for n in range(NUM_FRAMES)]


def test_a_frame_that_is_too_long_is_named(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mkv", np.zeros((1, 160, 8200, 3), np.uint8), codec="ffv1", b_frames=0)
    write_video(tmp_path / "b.mp4", FRAMES)
    found = bad_clips(stored(tmp_path, [ManifestRow(f"{n}", 0) for n in ("a.mkv", "b.mp4")]), tmp_path / "out", VIDEO)
    assert found == ["a.mkv: a side of an MPEG-4 video must be at most 8,190 pixels, got 8200 x 160"]


@pytest.mark.parametrize("is_indexed", [True, False])
def test_a_file_that_was_checked_is_read_from_its_key_frames_in_a_set_of_bytes_too(
    tmp_path: Path, from_start: list[str], is_indexed: bool
) -> None:
    frames = np.random.default_rng(3).integers(0, 256, (200, 3, 4, 3), np.uint8).repeat(16, 1).repeat(16, 2)
    write_video(tmp_path / "a.mp4", frames, codec="mpeg4", b_frames=2, key_every=10)
    digest = file_sha256(tmp_path / "a.mp4") if is_indexed else None
    files = stored(tmp_path, [ManifestRow("a.mp4", 0, len(frames), sha256=digest)])
    packed = packed_store(files, tmp_path / "out", Packing("bytes"))
    shown = [stored_clip(store, 0, lambda _: np.array([190]), all_of) for store in (packed, files)]
    assert np.array_equal(*shown) and len(from_start) == (0 if is_indexed else 2)
