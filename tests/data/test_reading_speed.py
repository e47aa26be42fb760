"""The estimate of a core's clips per second counts what has to be decoded; its fit to a machine is measured by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from summit_train.data import reading_speed
from summit_train.data.manifest import ManifestRow
from summit_train.data.reading_speed import clips_per_second
from summit_train.data.video.encode import write_video
from summit_train.spec import DataSpec
from tests.data.packed.conftest import stored

MOVING = np.stack([np.roll(np.linspace(0, 255, 64).astype(np.uint8), n) for n in range(40)])
FRAMES = np.broadcast_to(MOVING[:, None, :, None], (40, 48, 64, 3))
MEGAPIXELS = 64 * 48 / 1e6


def _data(**how: object) -> DataSpec:
    return DataSpec(train="x", val="x", num_frames=4, **how)  # type: ignore[arg-type]


def test_frames_are_counted_from_their_key_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CLIP", "_LISTED", "_PROBED_FRAMES"):
        monkeypatch.setattr(reading_speed, name, 0)
    monkeypatch.setattr(reading_speed, "_RENDER", (0, 0))
    monkeypatch.setattr(reading_speed, "_DECODE_H264", (1, 0))
    monkeypatch.setattr(reading_speed, "_DECODE_MPEG4", (1, 0))
    write_video(tmp_path / "a.mp4", FRAMES, key_every=10, codec="mpeg4", b_frames=0)
    store = stored(tmp_path, [ManifestRow("a.mp4", 0, 40)])
    dense, spread = _data(frame_stride=2), _data(sampling="uniform")
    # 4 x 2 from the first to the last, and on average 5 before; and 4 times 5.5. Packed, 4 times 4.5 of 8.
    for data, decoded, packed in ((dense, 13, 12), (spread, 22, 18)):
        found = clips_per_second(store, data, 0)
        assert found is not None and found[0] == "64x48 mpeg4"
        assert [found[2]["files"], found[2]["video"]] == pytest.approx(
            [1000 / MEGAPIXELS / number for number in (decoded, packed)]
        )


def test_each_cost_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(tmp_path / "a.mp4", FRAMES, codec="mpeg4", b_frames=0)
    store, data = stored(tmp_path, [ManifestRow("a.mp4", 0, 40)]), _data()
    before = clips_per_second(store, data, 0)
    assert before is not None
    videos = {"files", "video"}
    costs: dict[str, tuple[object, set[str]]] = {
        "_CLIP": (9, videos), "_LISTED": (9, videos), "_DECODE_MPEG4": ((9, 9), videos),
        "_PROBED_FRAMES": (900, videos), "_RENDER": ((9, 9), {*videos, "jpeg"}), "_JPEG": (9, {"jpeg"}),
        "_PACKED_KB": (900, {"video"}),
    }  # fmt: skip
    for name, (cost, slower) in costs.items():
        with monkeypatch.context() as patch:
            patch.setattr(reading_speed, name, cost)
            after = clips_per_second(store, data, 0)
        assert after is not None and {kind for kind in before[2] if after[2][kind] < before[2][kind]} == slower, name


def test_pictures_are_as_fast_as_measured(tmp_path: Path) -> None:
    """docs/data.md: 182 clips/s of 1280x720 and 262 of 256x256, packed with a short side of 256."""
    data = DataSpec(train="x", val="x", num_frames=8, short_side=(224, 256))
    for width, height, measured in ((1280, 720, 182), (256, 256, 262)):
        write_video(tmp_path / f"{width}.mp4", np.zeros((2, height, width, 3), np.uint8))
        found = clips_per_second(stored(tmp_path, [ManifestRow(f"{width}.mp4", 0, 2)]), data, 0)
        assert found is not None and found[1] == 256 and found[2]["jpeg"] == pytest.approx(measured, rel=0.1)


def test_frames_are_packed_as_large_as_training_takes_them(tmp_path: Path) -> None:
    """And no larger than they are."""
    write_video(tmp_path / "a.mp4", np.zeros((2, 400, 400, 3), np.uint8))
    store, data = stored(tmp_path, [ManifestRow("a.mp4", 0, 2)]), {"crop": 32, "short_side": (32, 40)}
    sizes = [data, {**data, "short_side": (320, 340)}, {**data, "crop": 448}, {**data, "crop": 500}]
    found = [clips_per_second(store, _data(**how), 0) for how in sizes]
    assert [one and one[1] for one in found] == [256, 320, 448, 500]
    jpeg = [one[2]["jpeg"] for one in found if one is not None]
    assert jpeg[0] > jpeg[1] > jpeg[2] == jpeg[3]


def test_packing_may_not_help(tmp_path: Path) -> None:
    """Small videos of key frames alone are packed with fewer."""
    write_video(tmp_path / "a.mp4", FRAMES, key_every=1, codec="mpeg4", b_frames=0)
    found = clips_per_second(stored(tmp_path, [ManifestRow("a.mp4", 0, 40)]), _data(sampling="uniform"), 0)
    assert found is not None and found[2]["files"] > found[2]["video"]


def test_the_clip_counts_that_is_asked_for(tmp_path: Path) -> None:
    write_video(tmp_path / "b.mp4", FRAMES)
    store = stored(tmp_path, [ManifestRow("a.mp4", 0, 40), ManifestRow("b.mp4", 0, 40)])
    assert clips_per_second(store, _data(), 0) is None and clips_per_second(store, _data(), 1) is not None


@pytest.mark.parametrize(
    ("name", "num_frames"),
    [("a.mp4", None), ("a.mp4", 99), ("a.mkv", 40), ("a.ts", 40), ("none.mp4", 40), ("bad.mp4", 40), ("p", 40)],
)
def test_without_the_facts_there_is_no_estimate(tmp_path: Path, name: str, num_frames: int | None) -> None:
    """Matroska's header lists a frame, that of a transport stream none."""
    if name.startswith("a."):
        write_video(tmp_path / name, FRAMES)
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    (tmp_path / "p").mkdir()
    assert clips_per_second(stored(tmp_path, [ManifestRow(name, 0, num_frames)]), _data(), 0) is None
