from __future__ import annotations

import pytest

from summit_train.bench.loader import OTHER, core_rate, stage_of, verdict
from summit_train.data.video.decode import demuxed


@pytest.mark.parametrize(
    ("file", "function", "stage"),
    [
        ("/x/summit_train/data/packed/read.py", "_read", "read"),
        ("~", "<built-in method posix.pread>", "read"),
        ("~", "<built-in method zlib.crc32>", "read"),
        ("/x/summit_train/data/video/decode.py", demuxed.__name__, "seek"),
        ("/x/summit_train/data/video/decode.py", "_jumped", "decode"),
        ("/x/summit_train/data/video/render.py", "put", "resize"),
        ("~", "<method 'decode' of 'av.video.stream.VideoStream' objects>", "decode"),
        ("~", "<method 'reformat' of 'av.video.reformatter.VideoReformatter' objects>", "resize"),
        ("/x/summit_train/data/video/augment.py", "mirrored", "augment"),
        ("~", "<built-in method numpy.array>", OTHER),
    ],
)
def test_an_own_time_belongs_to_a_stage(file: str, function: str, stage: str) -> None:
    assert stage_of(file, function) == stage


def test_a_core_among_others_gives_no_more_than_one_alone() -> None:
    assert core_rate(20.0, 36.0, 2) == 18.0
    assert core_rate(20.0, 44.0, 2) == 20.0


def test_cores_of_a_rank() -> None:
    assert verdict(20.0, 99.0, 7) == {
        "gpu_clips_per_second": 99.0,
        "cores_per_gpu": 5,
        "cores_per_rank": 6,
        "cores_there": 6,
        "keeps_up": True,
    }
    assert verdict(20.0, 100.0, 6)["keeps_up"] is True
    assert verdict(20.0, 100.1, 6)["keeps_up"] is False
    assert verdict(20.0, 0.1, None)["cores_per_gpu"] == 1
    assert verdict(20.0, 0.1, None)["keeps_up"] is None
