"""Packed optical flow: right, the same bytes however it is made, and the flow folders of others."""

from __future__ import annotations

import shutil
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from summit_train.core.errors import UserError
from summit_train.data.manifest import ManifestRow, write_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.packed.format import Packing, read_pack
from summit_train.data.packed.pack import begin
from summit_train.data.packed.read import ShardStore
from summit_train.data.video.encode import write_video
from summit_train.data.video.span import Span
from tests.data.clips import all_of, stored_clip
from tests.data.packed.conftest import bad_clips, complaints, content_of, packed_store, stored
from tests.data.video.test_flow import textured
from tests.flows import decode
from tests.worlds import Say

DIS = Packing("jpeg", quality=95, modality="flow", bound=20.0, method="dis", preset="medium")
NUM_FRAMES, WIDTH, HEIGHT = 6, 80, 64
STEPS = [(3, -2), (-1, 2), (0, 0), (2, 1)]  # of each video's texture, pixels right and down a frame


def _frames(step: tuple[int, int], seed: int) -> NDArray[np.uint8]:
    large = textured(HEIGHT + 60, WIDTH + 60, seed)
    places = [(30 - number * step[1], 30 - number * step[0]) for number in range(NUM_FRAMES)]
    grey = np.array([large[top : top + HEIGHT, left : left + WIDTH] for top, left in places])
    return grey[..., None].repeat(3, -1)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four videos of a moving texture, the first also as a folder of JPEG frames, and their manifest."""
    folder = tmp_path_factory.mktemp("moving")
    for number, step in enumerate(STEPS):
        write_video(folder / f"{number}.mkv", _frames(step, number), codec="ffv1", b_frames=0)
    (folder / "frames").mkdir()
    for number, frame in enumerate(_frames(STEPS[0], 0)):
        Image.fromarray(frame).save(folder / "frames" / f"{number:05}.png")
    names = [*(f"{number}.mkv" for number in range(len(STEPS))), "frames"]
    write_manifest(folder / "list.csv", [ManifestRow(name, number) for number, name in enumerate(names)])
    return folder


def _pictures(store: ShardStore, clip: int) -> NDArray[np.uint8]:
    """All pictures of a clip, (F, H, W, 2)."""
    pictures = stored_clip(store, clip, np.arange, all_of)
    return pictures[..., 0].reshape(-1, 2, *pictures.shape[1:3]).transpose(0, 2, 3, 1)


# What is packed.


@pytest.mark.parametrize("method", ["tvl1", "dis"])
def test_the_flow_is_the_motion(videos: Path, tmp_path: Path, method: str) -> None:
    packing = Packing("jpeg", quality=95, modality="flow", bound=20.0, method=method, preset=DIS.preset)
    packed = packed_store(stored(videos), tmp_path / "out", packing)
    for clip, step in enumerate([*STEPS, STEPS[0]]):
        flow = decode(_pictures(packed, clip))
        assert flow.shape == (NUM_FRAMES - 1, HEIGHT, WIDTH, 2)
        assert np.abs(flow[:, 16:-16, 16:-16] - step).max() < 0.5, clip
    # A video, and the same frames in a folder, whose colours are rounded differently.
    assert np.abs(_pictures(packed, 0).astype(int) - _pictures(packed, 4)).max() <= 3


def test_the_record_says_how(videos: Path, tmp_path: Path) -> None:
    packed = packed_store(stored(videos), tmp_path / "out", DIS)
    assert packed.manifest.frame_counts.tolist() == [NUM_FRAMES - 1] * 5
    assert packed.pack.packing == DIS
    pixels = "jpeg short side 256, every 1, quality 95, full colour, flow dis medium, bound 20"
    assert packed.manifest.pixels == pixels
    index = tmp_path / "out" / "index"
    assert np.load(index / "clips.npy")["width"].tolist() == [WIDTH] * 5
    assert len(np.load(index / "pictures.npy")) == 5 * 2 * (NUM_FRAMES - 1)
    assert complaints(tmp_path / "out") == []


def test_frames_are_scaled_before_their_flow(videos: Path, tmp_path: Path) -> None:
    half = Packing(**{**DIS.entries(), "short_side": HEIGHT // 2})
    packed = packed_store(stored(videos), tmp_path / "out", half)
    pictures = stored_clip(packed, 0, lambda pictures: np.arange(2), all_of)
    assert pictures.shape[1:3] == (HEIGHT, WIDTH)  # views are chosen for the video's own size
    assert np.median(decode(pictures[..., 0]), (1, 2)) == pytest.approx([1.5, -1], abs=0.2)


def test_the_command_packs_the_same(videos: Path, tmp_path: Path, say: Say) -> None:
    assert len(packed_store(stored(videos), tmp_path / "alone", DIS, 20_000).pack.shards) >= 2
    words = ("--method", "dis", "--shard-size", 20000, "--workers", 1)
    status, printed, _ = say("data", "flow", videos / "list.csv", tmp_path / "out", *words)
    assert status == 0 and "5 clips in" in printed and "data.modality=flow" in printed
    assert content_of(tmp_path / "out") == content_of(tmp_path / "alone")


# What cannot be packed.


def test_bad_clips_are_named(videos: Path, tmp_path: Path) -> None:
    write_video(tmp_path / "one.mp4", np.zeros((1, 40, 40, 3), np.uint8))
    write_video(tmp_path / "small.mp4", np.zeros((3, 24, 40, 3), np.uint8))
    shutil.copy(videos / "0.mkv", tmp_path / "good.mkv")
    (tmp_path / "frames").mkdir()
    shutil.copy(videos / "frames" / "00000.png", tmp_path / "frames")
    rows = [ManifestRow(name, 0) for name in ("one.mp4", "small.mp4", "good.mkv", "frames")]
    rows.append(ManifestRow("good.mkv", 0, span=Span(2, 3)))
    store = stored(videos, [ManifestRow("0.mkv", 0), ManifestRow("1.mkv", 0, reversed=True)], "backwards.csv")
    with pytest.raises(UserError, match=r"backwards\.csv:3: this clip is played backwards"):
        begin(store, tmp_path / "out", DIS, 1, workers=0)
    one = "must have 2 frames or more, got 1: flow is the motion between frames"
    assert bad_clips(stored(tmp_path, rows), tmp_path / "out", DIS) == [
        f"one.mp4: {one}",
        "small.mp4: a picture of 40 x 24 pixels is too small for flow: a side must have 32",
        f"frames: {one}",
        f"good.mkv: {one}",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "tvl1", "--preset", "fast"], "--preset must be used with --method dis, got --method tvl1"),
        (["--bound", "0"], "bound must be more than 0 and at most 1024 pixels, got 0.0"),
        (["--quality", "100"], "quality must be 1 to 95, got 100"),
        ([], "pip install 'summit_train[flow]'"),
    ],
)
def test_what_cannot_be_computed_is_refused_before_the_work(
    videos: Path, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    if not words:
        monkeypatch.setitem(sys.modules, "cv2", None)
    status, _, said = say("data", "flow", videos / "list.csv", tmp_path / "out", "--method", "dis", *words)
    assert status == 2 and message in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


# Flow that others computed.


@pytest.fixture
def given(tmp_path: Path) -> FileStore:
    """Two folders of flow: five fields as JPEG beside the frames, and four as PNG, with other names."""
    generator = np.random.default_rng(0)
    for name, prefix, kind, fields in (("a", "flow_", "jpg", 5), ("b", "", "png", 4)):
        (tmp_path / name).mkdir()
        for number, axis in product(range(1, fields + 1), "xy"):
            picture = generator.integers(0, 256, (20, 30), np.uint8)
            Image.fromarray(picture).save(tmp_path / name / f"{prefix}{axis}_{number:05}.{kind}")
    for number in range(1, 7):
        Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(tmp_path / "a" / f"img_{number:05}.jpg")
    rows = [ManifestRow("a", 0), ManifestRow("b", 1), ManifestRow("a", 0, span=Span(2, 4))]
    return stored(tmp_path, rows)


GIVEN = Packing("bytes", modality="flow", bound=32.0)


def test_flow_folders_are_packed_as_they_are(videos: Path, given: FileStore, tmp_path: Path) -> None:
    shutil.copy(videos / "0.mkv", tmp_path / "v.mkv")
    store = stored(tmp_path, [ManifestRow("a", 0), ManifestRow("v.mkv", 0)], "bad.csv")
    (bad,) = bad_clips(store, tmp_path / "bad", GIVEN)
    assert bad.startswith("v.mkv: must be a folder of flow pictures, got a video; try `summit-train data flow`")
    packed = packed_store(given, tmp_path / "out", GIVEN)
    assert packed.pack.packing.bound == 32.0 and packed.pack.packing.method is None
    assert packed.manifest.frame_counts.tolist() == [5, 4, 5]
    for clip, (prefix, kind, fields) in enumerate([("b/", "png", range(1, 5)), ("a/flow_", "jpg", range(3, 4))], 1):
        pictures = _pictures(packed, clip)
        for row, field in enumerate(fields):
            for component, axis in enumerate("xy"):
                own = np.asarray(Image.open(tmp_path / f"{prefix}{axis}_{field:05}.{kind}")).astype(int)
                assert np.abs(pictures[row, ..., component] - own).max() <= (kind == "jpg") * 2


def test_the_command_wants_the_bound(given: FileStore, tmp_path: Path, say: Say) -> None:
    write_manifest(tmp_path / "list.csv", [ManifestRow("b", 1)])
    for kind, bound, status, message in (
        ("bytes", (), 2, "b: must hold one series of frames such as 00001.jpg, got x_*.png, y_*.png"),
        ("jpeg", ("--bound", 20), 2, "--bound must be used with --kind bytes, got --kind jpeg"),
        ("bytes", ("--bound", 20), 0, ""),
    ):
        words = (tmp_path / "list.csv", tmp_path / "out", "--workers", 0, "--kind", kind, *bound)
        found, _, said = say("data", "pack", *words)
        assert found == status and message in said
    assert read_pack(tmp_path / "out").packing.modality == "flow"
