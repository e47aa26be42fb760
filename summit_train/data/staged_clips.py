"""Single clips of a packed set copied to a node's disk, where the whole set has no room there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from summit_train.data.manifest import read_manifest
from summit_train.data.order import epoch_order
from summit_train.data.shards.index import Place, ShardIndex, is_whole
from summit_train.data.shards.layout import INDEX_FOLDER, shard_name
from summit_train.data.shards.local import HAVE, PARTIAL_FOLDER
from summit_train.data.shards.record import Pack, PackError
from summit_train.data.shards.store import facts_of
from summit_train.files import replacing

Clips = NDArray[np.int64]

_BLOCK = 4096
_CLIPS_AT_ONCE = 4096


def room(size: int) -> int:
    """The bytes of a disk that a file of this size takes: whole blocks."""
    return -(-size // _BLOCK) * _BLOCK


class ClipCopier:
    """Copies clips into files with holes, at the places that they have in their shards.

    A clip is noted as there when all of it is written, so work that was killed can go on.
    """

    def __init__(self, packed: Path, folder: Path, pack: Pack, threads: int) -> None:
        self._packed, self._folder, self._pack, self._threads = packed, folder, pack, threads
        self._manifest = read_manifest(packed)
        self._index = ShardIndex(packed / INDEX_FOLDER, pack.clips)
        (folder / PARTIAL_FOLDER).mkdir(exist_ok=True)
        path = folder / PARTIAL_FOLDER / HAVE
        if not path.exists():
            # Not a file with holes: a page that a full disk has no room for would kill this process when it is mapped.
            with replacing(path) as file:
                file.write(bytes(pack.clips))
        self._have = np.memmap(path, np.uint8, "r+")
        # Whole shards that were copied before.
        self._whole = [(folder / shard.name).is_file() for shard in pack.shards]

    def copy(self, needed: Iterable[Clips], budget: int) -> Iterator[int]:
        """Copy clips in this order until `budget` bytes are taken; how many bytes, from time to time.

        Raises PackError for a clip that is damaged in the shared set, OSError where the disk takes no more.
        """
        chosen = self._chosen(needed, budget)
        with ThreadPoolExecutor(self._threads) as pool:
            try:
                for start in range(0, len(chosen), _CLIPS_AT_ONCE):
                    # By their place in the shards: the shared file system then reads forwards.
                    batch = sorted(chosen[start : start + _CLIPS_AT_ONCE], key=_position)
                    groups = [list(group) for _, group in groupby(batch, lambda item: item[1].shard)]
                    yield sum(pool.map(self._copy_clips, groups))
            finally:
                pool.shutdown(cancel_futures=True)
                self._have.flush()

    def _chosen(self, needed: Iterable[Clips], budget: int) -> list[tuple[int, Place]]:
        """The first of the needed clips that are not here and fit, each once, with their places."""
        seen = self._have.astype(bool)
        chosen = list[tuple[int, Place]]()
        for clips in needed:
            fresh = clips[~seen[clips]]
            seen[fresh] = True
            for clip in fresh.tolist():
                place = self._index.place(clip)
                if self._whole[place.shard]:
                    continue
                budget -= room(place.length) + _BLOCK  # it may begin within a block
                if budget < 0:
                    return chosen
                chosen.append((clip, place))
            if seen.all():
                break
        return chosen

    def _copy_clips(self, clips: list[tuple[int, Place]]) -> int:
        """Copy some clips of one shard; their bytes."""
        name, total = shard_name(clips[0][1].shard), 0
        target = os.open(self._folder / PARTIAL_FOLDER / name, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            for clip, place in clips:
                content = self._read(name, clip, place)
                written = os.pwrite(target, content, place.start)
                while written < len(content):
                    written += os.pwrite(target, content[written:], place.start + written)
                self._have[clip] = 1
                total += len(content)
        finally:
            os.close(target)
        return total

    def _read(self, name: str, clip: int, place: Place) -> bytes:
        path = self._packed / name
        try:
            with open(path, "rb") as file:
                file.seek(place.start)
                content = file.read(place.length)
        except OSError as error:
            raise PackError(f"{path}: {error.strerror}") from error
        if not is_whole(place, self._index.pictures(place), facts_of(self._manifest, clip, place), content):
            named = self._manifest.path(clip)
            raise PackError(f"{path}: {named} is not what was packed; `data verify` says more")
        return content


def _position(item: tuple[int, Place]) -> tuple[int, int]:
    return item[1].shard, item[1].start


def clips_of_ranks(
    num_clips: int,
    seed: int,
    virtual_gpus: int,
    clips_per_gpu: int,
    steps_per_epoch: int,
    accumulation: int,
    ranks: Iterable[int],
    start_step: int,
    end_step: int,
) -> Iterator[Clips]:
    """The clips that some ranks train on from `start_step` on, an epoch at a time, in the order of their steps."""
    mine = np.zeros(virtual_gpus, bool)
    for rank in ranks:
        mine[rank * accumulation : (rank + 1) * accumulation] = True
    for epoch in range(start_step // steps_per_epoch, -(-end_step // steps_per_epoch)):
        order = epoch_order(num_clips, seed, epoch)[: steps_per_epoch * virtual_gpus * clips_per_gpu]
        by_gpu = order.reshape(steps_per_epoch, virtual_gpus, clips_per_gpu)
        first = max(0, start_step - epoch * steps_per_epoch)
        yield by_gpu[first:, mine].ravel().astype(np.int64)
