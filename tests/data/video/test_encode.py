"""The small encoder."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from summit_train.data.video.encode import write_video


def test_the_same_frames_give_the_same_bytes(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (40, 32, 48, 3), np.uint8)
    for name in ("once", "again"):
        (tmp_path / name).mkdir()
        write_video(tmp_path / name / "a.mp4", frames, b_frames=3)
        assert [path.name for path in (tmp_path / name).iterdir()] == ["a.mp4"]
    assert (tmp_path / "once/a.mp4").read_bytes() == (tmp_path / "again/a.mp4").read_bytes()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="MALLOC_PERTURB_ is glibc's")
def test_what_lay_in_memory_does_not_get_into_the_bytes(tmp_path: Path) -> None:
    program = (
        "import sys, numpy as np\nfrom summit_train.data.video.encode import write_video\n"
        "t, y, x, c = np.meshgrid(*map(np.arange, (6, 24, 32, 3)), indexing='ij')\n"
        "ramp = (x * 255 / 31 + 9 * t + 3 * y + 40 * c).astype(np.uint8)\n"
        "write_video(sys.argv[1], ramp, b_frames=3)\n"
    )
    for fill in ("1", "170", "255"):
        environ = os.environ | {"MALLOC_PERTURB_": fill}
        words = [sys.executable, "-c", program, tmp_path / f"{fill}.mp4"]
        subprocess.run(words, cwd=Path(__file__).parents[3], env=environ, check=True)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_a_video_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_video(tmp_path / "a.mp4", np.zeros((2, 16, 16, 4), np.uint8))
    assert not list(tmp_path.iterdir())
