"""That the `webdataset` library reads what is packed here."""

from __future__ import annotations

import json
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from summit_train.data.manifest import read_manifest
from tests.data.packed.conftest import NUM_FRAMES, NUM_VIDEOS, PackSet

webdataset = pytest.importorskip("webdataset")


def _samples(folder: Path) -> list[dict[str, bytes]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        urls = [str(path) for path in sorted(folder.glob("*.tar"))]
        return list(webdataset.WebDataset(urls, shardshuffle=False))


def test_packed_bytes(videos: Path, pack_set: PackSet) -> None:
    out = pack_set()
    manifest, samples = read_manifest(out), _samples(out)
    assert [sample["__key__"] for sample in samples] == [f"{clip:09}" for clip in range(NUM_VIDEOS)]
    for clip, sample in enumerate(samples):
        about = json.loads(sample["json"])
        assert about["path"] == manifest.path(clip)
        assert int(sample["cls"]) == about["label"] == manifest.label(clip)
        assert sample["avi" if clip == 4 else "mp4"] == (videos / about["path"]).read_bytes()


def test_packed_pictures(pack_set: PackSet) -> None:
    from io import BytesIO

    from PIL import Image

    samples = _samples(pack_set(kind="jpeg"))
    assert len(samples) == NUM_VIDEOS
    for sample in samples:
        ends = [0, *json.loads(sample["json"])["picture_ends"]]
        assert len(ends) == NUM_FRAMES + 1 and ends[-1] == len(sample["mjpeg"])
        pictures = [sample["mjpeg"][start:end] for start, end in pairwise(ends)]
        assert {np.asarray(Image.open(BytesIO(picture))).shape for picture in pictures} == {(40, 52, 3)}
