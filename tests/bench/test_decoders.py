from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from summit_train.data.video.encode import write_video
from tests.worlds import bench_script


def test_the_decoders_give_the_same_frames_and_stand_in_one_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "grey.mp4")
    frames = np.broadcast_to(np.arange(60, dtype=np.uint8)[:, None, None, None] * 3 + 30, (60, 48, 64, 3))
    write_video(path, np.ascontiguousarray(frames))
    bench = bench_script("decoders")
    wanted = range(2, 59, 8)
    for read in (bench.with_summit_train, bench.with_pyav):
        found = read((path, 60, (341, 256)), wanted)
        assert found.shape == (8, 224, 224, 3)
        assert np.abs(found.mean((1, 2, 3)) - frames[list(wanted), 0, 0, 0]).max() < 1.5
    monkeypatch.setattr("sys.argv", ["decoders.py", "--repeats", "1", path])
    bench.main()
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].split()[0] == "summit_train" and rows[1].split()[-1] == "1.00" and rows[-1].startswith("PyAV")
