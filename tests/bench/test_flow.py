"""bench/flow.py reads ground truth as its makers wrote it, and measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.data.video.test_flow import shifted
from tests.worlds import bench_script

bench = bench_script("flow")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A texture that moves by (3, -2) as one pair of each kind; the truth says (3, -2) and (23, -2)."""
    middlebury, kitti = tmp_path / "middlebury" / "Texture", tmp_path / "kitti"
    middlebury.mkdir(parents=True)
    kitti.mkdir()
    before, after = shifted(3, -2)
    height, width = before.shape
    truth = np.broadcast_to(np.float32([3, -2]), (height, width, 2)).copy()
    truth[0] = 1.7e9  # unknown
    header = b"PIEH" + np.array([width, height], "<i4").tobytes()
    (middlebury / "flow10.flo").write_bytes(header + truth.astype("<f4").tobytes())
    coded = np.zeros((height, width, 3), np.uint16)  # B, G, R
    coded[:] = 1, 32768 - 2 * 64, 32768 + 23 * 64
    coded[:, width // 2 :, 0] = 0  # unknown
    cv2.imwrite(str(kitti / "flow_gt.png"), coded)
    for folder, numbers in ((middlebury, (10, 11)), (kitti, (1, 2))):
        for number, picture in zip(numbers, (before, after), strict=True):
            cv2.imwrite(str(folder / f"frame{number}.png"), picture)
    return tmp_path


def test_the_error_is_the_distance_to_the_truth(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["flow.py", "--data", str(data), "--repeats", "1", "--json"])
    assert bench.main() == 0
    values = json.loads(capsys.readouterr().out)
    texture, kitti = values["pairs"]
    assert texture["known"] == pytest.approx(1 - 1 / texture["height"]) and kitti["known"] == 0.5
    assert texture["mean_motion"] == pytest.approx(13**0.5) and texture["beyond_bound"] == 0
    assert kitti["largest_motion"] == pytest.approx((23**2 + 2**2) ** 0.5) and kitti["beyond_bound"] == 1
    assert [row["method"] for row in values["rows"][:4]] == ["tvl1", "dis ultrafast", "dis fast", "dis medium"]
    for row in values["rows"]:
        wrong = 20 if row["pair"] == "KITTI" else 0
        assert row["error"] == pytest.approx(wrong, abs=0.5)
        assert abs(row["error_coded"] - row["error"]) < 0.3
        assert row["pairs_per_second"] > 0 and row["cut"] < 0.05


def test_a_folder_without_pairs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["flow.py", "--data", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"must have middlebury/NAME/flow10\.flo"):
        bench.main()
