"""That the `webdataset` library reads what is packed here."""

from __future__ import annotations

import json
import warnings
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from summit_train.data.manifest import read_manifest
from tests.data.packed.conftest import NUM_FRAMES, NUM_VIDEOS, PackSet

webdataset = pytest.importorskip("webdataset")


def _samples(folder: Path) -> list[dict[str, bytes]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(webdataset.WebDataset([str(path) for path in sorted(folder.glob("*.tar"))], shardshuffle=False))


def test_packed_bytes(videos: Path, pack_set: PackSet) -> None:
    manifest, samples = read_manifest(pack_set()), _samples(pack_set("other"))
    assert [sample["__key__"] for sample in samples] == [f"{clip:09}" for clip in range(NUM_VIDEOS)]
    for clip, sample in enumerate(samples):
        about = json.loads(sample["json"])
        assert about["path"] == manifest.path(clip)
        assert int(sample["cls"]) == about["label"] == manifest.labels[clip]
        assert sample["avi" if clip == 4 else "mp4"] == (videos / about["path"]).read_bytes()


def test_packed_pictures(pack_set: PackSet) -> None:
    samples = _samples(pack_set(kind="jpeg"))
    assert len(samples) == NUM_VIDEOS
    for sample in samples:
        ends = [0, *json.loads(sample["json"])["picture_ends"]]
        assert len(ends) == NUM_FRAMES + 1 and ends[-1] == len(sample["mjpeg"])
        pictures = [Image.open(BytesIO(sample["mjpeg"][start:end])) for start, end in pairwise(ends)]
        assert {picture.size for picture in pictures} == {(52, 40)}
