"""One shard as it is written, clip by clip, and what the index and the record will say of it."""

from __future__ import annotations

import hashlib
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from summit_train.data.shards.index import CLIP_ROW, PICTURE_ROW
from summit_train.data.shards.layout import clip_checksum, picture_checksum, sample, shard_end
from summit_train.data.shards.payload import Payload
from summit_train.files import replacing


class Part:
    """The bytes of a shard in their order, and the rows of its clips."""

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self._clips: list[tuple[int, ...]] = []
        self._pictures: list[tuple[int, int]] = []
        self._frame_counts: list[int] = []
        self._size = 0
        self._digest = hashlib.sha256()

    def add(self, clip: int, payload: Payload) -> bytes:
        """The bytes of the next clip."""
        facts, base = payload.facts, payload.facts.checksum()
        content = b"".join(payload.pictures) or payload.content
        ends = list(accumulate(map(len, payload.pictures)))
        more = {"picture_ends": ends} if ends else {}
        encoded, start = sample(clip, payload.ending, content, facts, more)
        checksum = base if ends else clip_checksum(facts, content)
        row = (self._shard, checksum, self._size + start, len(content), len(self._pictures), facts.width, facts.height)
        self._clips.append(row)
        sums = (picture_checksum(base, number, picture) for number, picture in enumerate(payload.pictures))
        self._pictures += zip(ends, sums, strict=True)
        self._frame_counts.append(facts.num_frames)
        return self._took(encoded)

    def end(self) -> bytes:
        """The bytes that end the shard."""
        return self._took(shard_end())

    def save(self, path: Path) -> None:
        """Write what the index and the record need, whole or not at all."""
        with replacing(path) as file:
            np.savez(
                file,
                clips=np.array(self._clips, CLIP_ROW),
                pictures=np.array(self._pictures, PICTURE_ROW),
                frame_counts=np.array(self._frame_counts, np.int32),
                about=np.array([str(self._shard), str(self._size), self._digest.hexdigest()]),
            )

    def _took(self, content: bytes) -> bytes:
        self._size += len(content)
        self._digest.update(content)
        return content


class LoadedPart(NamedTuple):
    """A part that was saved: rows as in the index, frame counts int32 (clips,), the shard's size and SHA-256."""

    shard: int
    clips: NDArray[Any]
    pictures: NDArray[Any]
    frame_counts: NDArray[np.int32]
    size: int
    sha256: str


def load_part(path: Path) -> LoadedPart:
    """What `save` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        shard, size, digest = arrays["about"].tolist()
        return LoadedPart(int(shard), arrays["clips"], arrays["pictures"], arrays["frame_counts"], int(size), digest)
