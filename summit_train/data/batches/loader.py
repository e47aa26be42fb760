"""Micro-batches of clips for training and views of videos for the test, decoded by worker processes.

A batch is a function of (seed, epoch, clip) and of its place in the order, not of the rank or the worker that reads it.
Pixels stay uint8; the device normalises them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from summit_train.core import rng
from summit_train.data.batches.order import MicroBatchKey, Order
from summit_train.data.batches.stores import Store
from summit_train.data.batches.workers import Batches, Reading
from summit_train.data.manifest.quarantine import Kept
from summit_train.data.video import augment
from summit_train.data.video.clips import Frames, ViewsOf
from summit_train.data.video.source import DecodeError
from summit_train.spec import DataSpec, EvaluateSpec

# The number of clips that are tried in place of an unreadable one.
_MAX_SUBSTITUTES = 16
AnyBatch = TypeVar("AnyBatch", bound="Pinned")


@dataclass(frozen=True)
class BadClip:
    """An unreadable clip: its place in the manifest, its path, the reason, and the clip that was read instead.

    substitute is None if the clip was itself tried as a substitute, or belongs to the test.
    """

    clip: int
    path: str
    reason: str
    substitute: int | None


class Pinned:
    """A dataclass whose tensors the DataLoader puts into page-locked memory."""

    def pin_memory(self: AnyBatch) -> AnyBatch:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return cast(AnyBatch, replace(cast(Any, self), **{name: one.pin_memory() for name, one in tensors.items()}))


@dataclass(frozen=True)
class MicroBatch(Pinned):
    """The clips of one virtual GPU in one step.

    clips: uint8 (n, T, H, W, C). labels: int64 (n,). ids: int64 (n,), places in the manifest. bad: the unreadable
    clips; `ids` has their substitutes.
    """

    step: int
    virtual_gpu: int
    clips: torch.Tensor
    labels: torch.Tensor
    ids: torch.Tensor
    bad: tuple[BadClip, ...] = ()


@dataclass(frozen=True)
class TestBatch(Pinned):
    """One video of the test: its place in the manifest, and its views, uint8 (clips * crops, T, h, w, C).

    bad: why it has no view. frames: the clips' frame numbers in the video, int64 (clips, T).
    """

    __test__ = False  # not a test case, whatever pytest makes of the name

    video: int
    label: int
    views: torch.Tensor
    bad: BadClip | None = None
    frames: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))


def training_batches(
    data: DataSpec, store: Store, order: Order, rank: int, ranks: int, steps: range, kept: Kept | None = None
) -> Batches[MicroBatch]:
    """Return a rank's micro-batches of `steps`, those of one step one after the other.

    order: of the kept clips. kept: the clips in use, by default all. The workers live through the whole run, so epochs
    end without a pause. With data.on_bad_clip "fail" the batch with a bad video raises DecodeError when it is asked
    for; with "skip" it names the substitutes.
    """
    if kept is None:
        kept = Kept(len(store.manifest), np.zeros(0, np.int64))
    keys = order.micro_batches(rank, ranks, steps)
    clips = ((step, virtual_gpu, epoch, kept.ids(places)) for step, virtual_gpu, epoch, places in keys)
    return Batches(_TrainingClips(data, store, order.seed, kept), clips, data.workers, data.clip_seconds)


@dataclass(frozen=True)
class _TrainingClips:
    """Reads the micro-batch of a key."""

    data: DataSpec
    store: Store
    seed: int
    kept: Kept

    def __call__(self, key: MicroBatchKey, reading: Reading) -> MicroBatch:
        step, virtual_gpu, epoch, ids = key
        bad: list[BadClip] = []
        read = [self._clip_or_substitute(epoch, clip, bad, reading) for clip in ids.tolist()]
        used = np.array([clip for clip, _ in read], np.int64)
        labels = torch.from_numpy(self.store.manifest.labels[used].astype(np.int64))
        clips = torch.from_numpy(np.stack([frames for _, frames in read]))
        return MicroBatch(step, virtual_gpu, clips, labels, torch.from_numpy(used), tuple(bad))

    def _clip_or_substitute(self, epoch: int, clip: int, bad: list[BadClip], reading: Reading) -> tuple[int, Frames]:
        """Read a clip, or where it is bad a substitute, and add those that are bad to `bad`."""
        failed: list[BadClip] = []
        for tried in chain([clip], self._substitutes(epoch, clip)):
            try:
                frames = self._clip(epoch, tried, clip, reading)
            except DecodeError as error:
                if self.data.on_bad_clip == "fail":
                    raise
                failed.append(BadClip(tried, error.path, error.reason, None))
            else:
                bad += [replace(one, substitute=tried) for one in failed[:1]] + failed[1:]
                return tried, frames
        reason = f"{failed[0].reason}; nor can {_MAX_SUBSTITUTES} others be read in its place"
        raise DecodeError(failed[0].path, reason)

    def _substitutes(self, epoch: int, clip: int) -> Iterator[int]:
        """Yield what is tried in place of a clip, a function of (seed, epoch, clip)."""
        places = rng.key(self.seed, "substitute", epoch, clip).integers(len(self.kept), size=_MAX_SUBSTITUTES)
        yield from (other for other in self.kept.ids(places).tolist() if other != clip)

    def _clip(self, epoch: int, clip: int, drawn_for: int, reading: Reading) -> Frames:
        """Read a clip with the draws of another one: a substitute may have its own turn in the same epoch."""
        data, manifest, draw = self.data, self.store.manifest, partial(rng.key, self.seed)

        def choose(num_frames: int) -> NDArray[np.int64]:
            generator = draw("sampling", epoch, drawn_for)
            frames = augment.train_frames(data.sampling, num_frames, data.num_frames, data.frame_stride, generator)
            return (num_frames - 1 - frames if manifest.is_reversed(clip) else frames)[None]

        def views_of(width: int, height: int) -> list[augment.View]:
            return [augment.train_view(data, width, height, draw("augment", epoch, drawn_for))]

        with reading(clip, manifest.path(clip)):
            one: Frames = self.store.read_views(clip, choose, views_of)[0]
        return one


def test_batches(
    data: DataSpec, evaluate: EvaluateSpec, store: Store, videos: Sequence[int], views_of: ViewsOf | None = None
) -> Batches[TestBatch]:
    """Return the test views of the given videos, in their order: clips times crops each, clip by clip.

    Nothing is random. views_of: other views than the crops of `evaluate`; workers pickle it. A bad video raises
    DecodeError, or with data.on_bad_clip "skip" has no views, and no substitute.
    """
    views_of = views_of or partial(augment.test_views, evaluate.short_side, evaluate.crops)
    make = partial(_test_batch, data, store, evaluate.clips, views_of)
    return Batches(make, [int(video) for video in videos], min(data.workers, len(videos)), data.clip_seconds)


test_batches.__test__ = False  # type: ignore[attr-defined]  # nor is this one


def _test_batch(
    data: DataSpec, store: Store, num_clips: int, views_of: ViewsOf, video: int, reading: Reading
) -> TestBatch:
    """Read the views of a video."""
    manifest, chosen = store.manifest, np.zeros((0, 0), np.int64)

    def choose(num_frames: int) -> NDArray[np.int64]:
        nonlocal chosen  # the last choice is the one that is read
        frames = augment.test_frames(data.sampling, num_frames, data.num_frames, data.frame_stride, num_clips)
        chosen = num_frames - 1 - frames if manifest.is_reversed(video) else frames
        return chosen

    label = int(manifest.labels[video])
    try:
        with reading(video, manifest.path(video)):
            views = store.read_views(video, choose, views_of)
    except DecodeError as error:
        if data.on_bad_clip == "fail":
            raise
        bad = BadClip(video, error.path, error.reason, None)
        return TestBatch(video, label, torch.zeros(0, dtype=torch.uint8), bad)
    return TestBatch(video, label, torch.from_numpy(views), frames=manifest.span(video).start + chosen)
