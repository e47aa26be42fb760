"""Which clips a batch holds, in training and in the test, of spans too, and what the user's own augmentations see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from summit_train.core import rng
from summit_train.core.errors import UserError
from summit_train.data.batches import loader
from summit_train.data.batches.loader import MicroBatch
from summit_train.data.batches.order import Order
from summit_train.data.batches.stores import open_store
from summit_train.data.manifest import Manifest, ManifestRow, read_manifest, write_manifest
from summit_train.data.video import augment
from summit_train.data.video.encode import write_video
from summit_train.data.video.span import WHOLE, Span
from summit_train.spec import DataSpec, EvaluateSpec
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


# Spans.

FRAMES = np.random.default_rng(3).integers(0, 256, (14, 4, 5, 3), np.uint8).repeat(8, 1).repeat(8, 2)


@st.composite
def _some_span(draw: st.DrawFn) -> Span:
    start = draw(st.integers(0, len(FRAMES) - 1))
    return draw(st.sampled_from([WHOLE, Span(start), Span(start, draw(st.integers(start + 1, len(FRAMES))))]))


def _batches(folder: Path, row: ManifestRow, data: DataSpec) -> tuple[Any, Any]:
    """The pixels of two epochs of training and of the test's views of a manifest's only clip."""
    write_manifest(folder / "list.csv", [row])
    store = open_store(data, read_manifest(folder / "list.csv"))
    order = Order(1, 7, virtual_gpus=1, clips_per_gpu=1, steps_per_epoch=1)
    drawn = [batch.clips.numpy() for batch in reader(data, store, order).batches(order, 0, 1, range(2))]
    (tested,) = loader.test_batches(data, EvaluateSpec(clips=3, crops=1, short_side=24), store, [0])
    return np.concatenate(drawn), tested.views.numpy()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    span=_some_span(),
    sampling=st.sampled_from(["dense", "uniform"]),
    stride=st.integers(1, 4),
    is_reversed=st.booleans(),
    is_counted=st.booleans(),
)
def test_a_span_gives_the_frames_of_the_cut_file(
    tmp_path: Path, span: Span, sampling: Any, stride: int, is_reversed: bool, is_counted: bool
) -> None:
    frames = FRAMES[span.start :] if span.end < 0 else FRAMES[span.start : span.end]
    for name, content in (("whole.mkv", FRAMES), ("cut.mkv", frames)):  # without loss, and each frame by itself
        write_video(tmp_path / name, content, codec="ffv1", b_frames=0)
    data = data_spec(frame_stride=stride, sampling=sampling)
    whole = ManifestRow("whole.mkv", 0, len(FRAMES) if is_counted else None, reversed=is_reversed, span=span)
    cut = ManifestRow("cut.mkv", 0, len(frames) if is_counted else None, reversed=is_reversed)
    found, wanted = _batches(tmp_path, whole, data), _batches(tmp_path, cut, data)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1], wanted[1])


# Augmentations of the user's own.

# Writes its draw into the first pixels of all frames, one place further for each augmentation.
AUGMENT = """
def mark(clip, generator, place=0):
    clip[:, 0, place] = generator.integers(1, 256)
    return clip

def late(clip, generator):
    return clip[1:] if clip.mean() > 0 else clip
"""


def _own(tmp_path: Path, *items: dict[str, Any] | str, first: str = "scale_jitter") -> list[Any]:
    (tmp_path / "own.py").write_text(AUGMENT)
    named = [item if isinstance(item, dict) else {"kind": item, "options": {}} for item in items]
    return [{"kind": first}, *({**item, "kind": f"{tmp_path}/own.py:{item['kind']}"} for item in named)]


def _marks(batch: MicroBatch) -> np.ndarray[Any, Any]:
    """The draws of the two augmentations of each clip."""
    marks = batch.clips[:, :, 0, :2, 0].numpy()
    assert (marks == marks[:, :1]).all(), "all frames of a clip have one draw"
    return np.asarray(marks[:, 0])


@pytest.fixture
def two(tmp_path: Path) -> list[Any]:
    return _own(tmp_path, "mark", {"kind": "mark", "options": {"place": 1}})


def test_draws_are_a_function_of_epoch_and_clip_on_any_rank_and_worker(manifest: Manifest, two: list[Any]) -> None:
    found: list[dict[Any, list[int]]] = []
    for ranks, workers in ((1, 0), (2, 0), (2, 1)):
        drawn: dict[Any, list[int]] = {}
        for rank in range(ranks):
            with open_batches(manifest, data_spec(workers, augment=two), rank=rank, ranks=ranks) as batches:
                for batch in batches:
                    marks = zip(batch.ids.tolist(), _marks(batch).tolist(), strict=True)
                    drawn |= {(batch.step, clip): row for clip, row in marks}
        found.append(drawn)
    assert found[0] == found[1] == found[2]
    # One draw each of 20 clips and two augmentations: some are equal by chance.
    first, second = zip(*found[0].values(), strict=True)
    assert len(set(first)) > 10 and len(set(second)) > 10 and sum(map(int.__eq__, first, second)) < 5


def test_they_follow_the_built_in_one_and_change_none_of_its_draws(manifest: Manifest, two: list[Any]) -> None:
    for first in ("scale_jitter", "multi_scale_crop", "rand_augment"):
        plain, own = data_spec(augment=first), data_spec(augment=[{"kind": first}, *two[1:]])
        with open_batches(manifest, plain, end_step=1) as one, open_batches(manifest, own, end_step=1) as other:
            for batch, varied in zip(one, other, strict=True):
                assert np.array_equal(batch.clips[:, :, 1:], varied.clips[:, :, 1:])
                assert (batch.clips[:, :, 0, :2, 0] != varied.clips[:, :, 0, :2, 0]).any()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wrong_clip_is_named_in_one_line(manifest: Manifest, tmp_path: Path, workers: int) -> None:
    data, message = data_spec(workers, augment=_own(tmp_path, "late")), r"^data\.augment: .*late must return .*, got ui"
    with open_batches(manifest, data) as batches, pytest.raises(UserError, match=message) as raised:
        next(batches)
    assert "\n" not in str(raised.value)
