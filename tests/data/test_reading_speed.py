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
        found = clips_per_second(store, data)
        assert found is not None and found[0] == "64x48 mpeg4"
        assert found[1:] == pytest.approx([1000 / MEGAPIXELS / number for number in (decoded, packed)])


def test_each_cost_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(tmp_path / "a.mp4", FRAMES, codec="mpeg4", b_frames=0)
    store, data = stored(tmp_path, [ManifestRow("a.mp4", 0, 40)]), _data()
    before = clips_per_second(store, data)
    assert before is not None
    costs = {"_CLIP": 9, "_LISTED": 9, "_RENDER": (9, 9), "_DECODE_MPEG4": (9, 9), "_PROBED_FRAMES": 900}
    for name, cost in costs.items():
        with monkeypatch.context() as patch:
            patch.setattr(reading_speed, name, cost)
            after = clips_per_second(store, data)
        assert after is not None and after[1] < before[1] and after[2] < before[2], name


def test_without_the_facts_there_is_no_estimate(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", FRAMES[:2])
    write_video(tmp_path / "p.mp4", FRAMES[:2])
    (tmp_path / "p").mkdir()
    assert clips_per_second(stored(tmp_path, [ManifestRow("a.mp4", 0)]), _data()) is None
    assert clips_per_second(stored(tmp_path, [ManifestRow("p", 0, 2)]), _data()) is None
