"""Which clips a batch holds, in training and in the test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from summit_train.core import rng
from summit_train.data.batches import loader
from summit_train.data.batches.order import Order
from summit_train.data.batches.stores import open_store
from summit_train.data.manifest import Manifest
from summit_train.data.video import augment
from summit_train.spec import EvaluateSpec
from tests.data.batches.conftest import NUM_FRAMES, data_spec, grey, open_batches, plain, reader
from tests.data.clips import read_clip

# Training.


def test_a_micro_batch_holds_the_clips_that_the_keys_say(manifest: Manifest, videos: Path) -> None:
    batches = list(open_batches(manifest, data_spec(), virtual_gpus=2, clips_per_gpu=2))
    assert [(b.step, b.virtual_gpu) for b in batches[:4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for batch in batches:
        assert (batch.clips.dtype, batch.clips.shape) == (torch.uint8, (2, 4, 24, 24, 3))
        assert (batch.labels.dtype, batch.ids.dtype) == (torch.int64, torch.int64)
        assert batch.labels.tolist() == [video % 4 for video in batch.ids.tolist()]
        for clip, video in zip(batch.clips.numpy(), batch.ids.tolist(), strict=True):
            epoch, backwards = batch.step // 2, video % 3 == 2
            frames = augment.train_frames("dense", NUM_FRAMES, 4, 2, rng.key(5, "sampling", epoch, video))
            frames = NUM_FRAMES - 1 - frames if backwards else frames
            view = augment.train_view(data_spec(), 48, 32, rng.key(5, "augment", epoch, video))
            expected = read_clip(videos / f"{video}.mp4", lambda _, frames=frames: frames, lambda *_, view=view: view)
            assert grey(clip) == frames.tolist() and np.array_equal(clip, expected)


@pytest.mark.parametrize("kind", ["scale_jitter", "rand_augment"])
def test_repeats_are_views_of_the_same_frames(manifest: Manifest, kind: str) -> None:
    """The first view of a clip is that of a run without repeats; each view has draws of its own."""
    once, thrice = (
        list(open_batches(manifest, data_spec(augment=kind, repeats=repeats), virtual_gpus=2, clips_per_gpu=2))
        for repeats in (1, 3)
    )
    for single, batch in zip(once, thrice, strict=True):
        assert batch.ids.tolist() == np.repeat(single.ids.numpy(), 3).tolist()
        assert batch.labels.tolist() == np.repeat(single.labels.numpy(), 3).tolist()
        assert batch.clips.shape == (6, 4, 24, 24, 3)
        assert torch.equal(batch.clips[::3], single.clips)
        if kind == "scale_jitter":
            assert [grey(clip) for clip in batch.clips.numpy()] == [
                grey(one) for one in single.clips.numpy() for _ in "123"
            ]
    assert sum(not torch.equal(batch.clips[0], batch.clips[1]) for batch in thrice) > 5
    assert plain(open_batches(manifest, data_spec(2, augment=kind, repeats=3), virtual_gpus=2, clips_per_gpu=2)) == [
        (b.step, b.virtual_gpu, b.ids.tolist(), b.labels.tolist(), b.clips.numpy().tobytes()) for b in thrice
    ]


def test_a_clip_that_balance_draws_again_is_seen_differently(manifest: Manifest) -> None:
    """Each draw of a rare clip has pixels of its own; RandAugment and repeats go on from there."""
    data = data_spec(balance="classes", augment="rand_augment", repeats=2)
    order = Order(len(manifest), 5, 4, 2, 1, classes=(np.array([3], np.int32), np.array([0, 1], np.int32)))
    with reader(data, open_store(data, manifest), order).batches(order, 0, 1, range(1)) as batches:
        seen = [clip.numpy().tobytes() for b in batches for clip, at in zip(b.clips, b.ids, strict=True) if at == 3]
    assert len(seen) == 8 and len(set(seen)) > 4


def test_workers_ranks_and_a_start_in_mid_epoch_change_no_batch(manifest: Manifest) -> None:
    alone = plain(open_batches(manifest, data_spec()))
    assert len(alone) == 20
    for ranks in (2, 4):
        shares = [plain(open_batches(manifest, data_spec(), rank=rank, ranks=ranks)) for rank in range(ranks)]
        assert sorted(batch for share in shares for batch in share) == alone
    assert plain(open_batches(manifest, data_spec(workers=2))) == alone
    assert plain(open_batches(manifest, data_spec(workers=2), start_step=3)) == alone[12:]


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_draws_nothing_from_the_global_generators(manifest: Manifest, workers: int) -> None:
    before, numpy_before = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    plain(open_batches(manifest, data_spec(workers), end_step=1))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == numpy_before


# The test.


@pytest.mark.parametrize("workers", [0, 2])
def test_test_views_come_in_the_order_asked(manifest: Manifest, workers: int) -> None:
    evaluate = EvaluateSpec(clips=3, crops=1, short_side=24)
    batches = list(loader.test_batches(data_spec(workers), evaluate, open_store(data_spec(), manifest), [7, 2, 2, 0]))
    assert [b.video for b in batches] == [7, 2, 2, 0]
    # Window 8 of 12 frames: starts 0, 2, 4.
    starts = [[0, 2, 4, 6], [2, 4, 6, 8], [4, 6, 8, 10]]
    backwards = [[NUM_FRAMES - 1 - frame for frame in clip] for clip in starts]
    for batch in batches:
        assert (batch.views.dtype, batch.views.shape) == (torch.uint8, (3, 4, 24, 24, 3))
        wanted = backwards if batch.video == 2 else starts
        assert [grey(view) for view in batch.views.numpy()] == wanted
        assert batch.frames.tolist() == wanted
    assert not list(loader.test_batches(data_spec(workers), evaluate, open_store(data_spec(), manifest), []))
