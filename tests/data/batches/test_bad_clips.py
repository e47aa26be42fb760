"""Clips that cannot be read, or bring their reader down."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summit_train.data.batches import loader
from summit_train.data.batches.order import Order
from summit_train.data.batches.stores import open_store
from summit_train.data.loading import Store, read_clip
from summit_train.data.manifest import Manifest
from summit_train.data.video import augment
from summit_train.data.video.clips import OpenClip
from summit_train.data.video.source import DecodeError
from summit_train.spec import EvaluateSpec
from tests.data.batches.conftest import all_keys, data_spec, open_batches, reader


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_video_is_named_when_its_batch_is_asked_for(broken: Manifest, workers: int) -> None:
    path = str(Path(broken.source).parent / "3.mp4")
    good: list[float] = []
    batches = open_batches(broken, data_spec(workers), end_step=6)
    with pytest.raises(DecodeError) as caught:
        good.extend(batch.ids.item() for batch in batches)
    assert (caught.value.path, str(caught.value).count("\n")) == (path, 0) and caught.value.reason
    asked = [ids.item() for *_, ids in all_keys(broken)]
    assert good == asked[: asked.index(3)]
    assert list(batches) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_video_of_the_test_ends_it_or_is_left_out(broken: Manifest, workers: int) -> None:
    evaluate, store = EvaluateSpec(clips=1, short_side=24), open_store(data_spec(), broken)
    failing = loader.test_batches(data_spec(workers), evaluate, store, [2, 3, 4])
    assert next(failing).video == 2
    with pytest.raises(DecodeError, match=r"3\.mp4"):
        next(failing)
    batches = list(loader.test_batches(data_spec(workers, on_bad_clip="skip"), evaluate, store, [2, 3, 4]))
    assert [(batch.video, batch.bad and batch.bad.clip) for batch in batches] == [(2, None), (3, 3), (4, None)]
    assert not len(batches[1].views) and len(batches[2].views)


# Substitutes for what cannot be read.


def _substituted(broken: Manifest, workers: int, **changes: int) -> list[Any]:
    with open_batches(broken, data_spec(workers, on_bad_clip="skip"), end_step=6, **changes) as batches:
        return [
            (b.step, b.virtual_gpu, b.ids.tolist(), b.labels.tolist(), b.clips.numpy().tobytes(), b.bad)
            for b in batches
        ]


def test_a_bad_clip_is_replaced_and_named(broken: Manifest) -> None:
    batches = _substituted(broken, 0)
    for (*_, wanted), (_, _, ids, labels, _, bad) in zip(all_keys(broken), batches, strict=True):
        if wanted.item() != 3:
            assert (ids, bad) == (wanted.tolist(), ())
            continue
        assert len(bad) == 1
        assert (bad[0].clip, bad[0].path, bad[0].substitute) == (3, str(Path(broken.source).parent / "3.mp4"), ids[0])
        assert bad[0].reason and ids[0] != 3 and labels == [ids[0] % 4]
    assert any(bad for *_, bad in batches)


def test_substitutes_are_the_same_on_all_ranks_workers_and_from_any_step(broken: Manifest) -> None:
    alone = _substituted(broken, 0)
    assert _substituted(broken, 2) == alone
    shares = [_substituted(broken, 0, rank=rank, ranks=2) for rank in range(2)]
    assert sorted(batch for share in shares for batch in share) == alone
    assert _substituted(broken, 0, start_step=3) == alone[12:]


def _truncate(manifest: Manifest, *videos: int) -> None:
    for video in videos:
        os.truncate(Path(manifest.source).parent / f"{video}.mp4", 300)


def test_a_substitute_that_is_bad_too_is_named_and_another_taken(broken: Manifest) -> None:
    _truncate(broken, 0, 1, 2, 7, 8)
    tried = set[int]()
    for *_, ids, labels, _, bad in _substituted(broken, 0):
        assert ids[0] in (4, 5, 6) and labels == [ids[0] % 4]
        assert not bad or bad[0].substitute == ids[0]
        tried |= {clip.clip for clip in bad[1:]}
        assert all(clip.substitute is None for clip in bad[1:])
    assert tried and not tried & {4, 5, 6}
    _truncate(broken, 4, 5, 6)
    with pytest.raises(DecodeError, match="nor can 7 other clips be read in its place"):
        _substituted(broken, 0)


# Clips that bring their reader down.


@dataclass(frozen=True)
class Trap:
    """A store whose clip 3 holds its reader for ever."""

    store: Store

    @property
    def manifest(self) -> Manifest:
        return self.store.manifest

    def open(self, clip: int) -> OpenClip:
        if clip == 3:
            time.sleep(1000)
        return self.store.open(clip)


def test_the_run_goes_on_without_a_clip_that_holds_its_reader(manifest: Manifest) -> None:
    data = data_spec(workers=2, on_bad_clip="skip", clip_seconds=2)
    run = Order(len(manifest), 5, virtual_gpus=4, clips_per_gpu=1, steps_per_epoch=2)
    read = reader(data, Trap(open_store(data, manifest)), run)
    with read.batches(run, 0, 1, range(3)) as batches:
        found = list(batches)
    assert [(b.step, b.virtual_gpu) for b in found] == [(step, gpu) for step in range(3) for gpu in range(4)]
    bad = [clip for batch in found for clip in batch.bad]
    assert {clip.clip for clip in bad} == {3}
    reason = r"takes longer than 2 s to read: its reader never came back; raise data\.clip_seconds"
    assert all(re.match(reason, clip.reason) for clip in bad)
    asked = [ids.item() for *_, ids in all_keys(manifest)][:12]
    assert [b.ids.item() for b in found if not b.bad] == [clip for clip in asked if clip != 3]


def test_a_clip_that_takes_too_long_names_the_key_and_the_way_out(manifest: Manifest) -> None:
    store = open_store(data_spec(clip_seconds=1e-6), manifest)
    with pytest.raises(DecodeError, match=r"longer than 1e-06 s to read; raise data\.clip_seconds, .*data index"):
        read_clip(store, 0, lambda n: np.array([[n - 1]]), lambda w, h: augment.test_views(24, 1, w, h))
