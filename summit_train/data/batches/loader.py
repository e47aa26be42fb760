"""Micro-batches of clips for training and views of videos for the test, decoded by worker processes.

A batch is a function of (seed, epoch, clip) and of its place in the order, not of the rank or the worker that reads it.
Pixels stay uint8; the device normalises them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from summit_train import rng
from summit_train.data.batches.order import MicroBatchKey, Order
from summit_train.data.batches.store import Store
from summit_train.data.batches.workers import Batches, Board, Failure
from summit_train.data.manifest.quarantine import Kept
from summit_train.data.video import augment
from summit_train.data.video.clips import single
from summit_train.data.video.source import DecodeError
from summit_train.spec import DataSpec, EvaluateSpec

# The number of clips that are tried in place of an unreadable one.
_MAX_SUBSTITUTES = 16


@dataclass(frozen=True)
class BadClip:
    """An unreadable clip: its place in the manifest, its path, the reason, and the clip that was read instead.

    substitute is None where there is none: the clip was itself tried as a substitute, or belongs to the test.
    """

    clip: int
    path: str
    reason: str
    substitute: int | None


@dataclass(frozen=True)
class MicroBatch:
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

    def pin_memory(self) -> MicroBatch:
        """Return the batch in page-locked memory; called by the DataLoader."""
        pinned = {name: getattr(self, name).pin_memory() for name in ("clips", "labels", "ids")}
        return replace(self, **pinned)


@dataclass(frozen=True)
class TestBatch:
    """One video of the test: its place in the manifest, and its views, uint8 (clips * crops, T, h, w, C).

    bad: why there is no view.
    """

    __test__ = False  # not a test case, whatever pytest makes of the name

    video: int
    label: int
    views: torch.Tensor
    bad: BadClip | None = None

    def pin_memory(self) -> TestBatch:
        """Return the batch in page-locked memory; called by the DataLoader."""
        return replace(self, views=self.views.pin_memory())


def training_batches(
    data: DataSpec, store: Store, order: Order, rank: int, ranks: int, steps: range, kept: Kept | None = None
) -> Batches[MicroBatch]:
    """Return a rank's micro-batches of `steps`, those of one step one after the other.

    order: of the kept clips. kept: the clips that are used, by default all. The workers live through the whole run,
    so epochs end without a pause. Raises ValueError as `Order.micro_batches` does. With data.on_bad_clip "fail" it
    raises DecodeError when the batch with a bad video is asked for; with "skip" the batch names the substitutes.
    """
    if kept is None:
        kept = Kept(len(store.manifest), np.zeros(0, np.int64))
    keys = order.micro_batches(rank, ranks, steps)
    clips = ((step, virtual_gpu, epoch, kept.ids(places)) for step, virtual_gpu, epoch, places in keys)
    return Batches(_TrainingClips(data, store, order.seed, kept), clips, data.workers, data.clip_seconds)


def test_batches(
    data: DataSpec,
    evaluate: EvaluateSpec,
    store: Store,
    videos: Sequence[int],
    clips: int | None = None,
    crops: int | str | None = None,
) -> Batches[TestBatch]:
    """Return the test views of the given videos, in their order: `clips` times `crops` each, clip by clip.

    clips, crops: by default those of `evaluate`. Nothing is random. A bad video raises DecodeError, or with
    data.on_bad_clip "skip" has no views; there are no substitutes.
    """
    dataset = _TestVideos(
        data,
        store,
        evaluate.short_side,
        evaluate.clips if clips is None else clips,
        evaluate.crops if crops is None else crops,
    )
    workers = min(data.workers, len(videos))
    return Batches(dataset, [int(video) for video in videos], workers, data.clip_seconds)


test_batches.__test__ = False  # type: ignore[attr-defined]  # nor is this one


ReadsT = TypeVar("ReadsT", bound="_Reads")


@dataclass(frozen=True)
class _Reads:
    """The common part of both datasets. board: notes which clip is being read. given_up: clips that killed a worker."""

    data: DataSpec
    store: Store
    board: Board | None = field(default=None, kw_only=True)
    given_up: Mapping[int, str] = field(default_factory=dict, kw_only=True)

    def on_board(self: ReadsT, board: Board) -> ReadsT:
        """Return a copy, see workers.Reads."""
        return replace(self, board=board)

    def without(self: ReadsT, clip: int, reason: str) -> ReadsT:
        """Return a copy, see workers.Reads."""
        return replace(self, given_up={**self.given_up, clip: reason})

    def _reading(self, clip: int) -> AbstractContextManager[None]:
        """Note a clip on the board while it is read. Raises DecodeError for one that was given up."""
        if clip in self.given_up:
            raise DecodeError(self.store.manifest.path(clip), self.given_up[clip])
        return nullcontext() if self.board is None else self.board.reading(clip)


@dataclass(frozen=True)
class _TrainingClips(_Reads):
    """Reads the micro-batch of a key."""

    seed: int
    kept: Kept

    def __getitem__(self, key: MicroBatchKey) -> MicroBatch | Failure:
        step, virtual_gpu, epoch, ids = key
        bad: list[BadClip] = []
        try:
            read = [self._clip_or_substitute(epoch, clip, bad) for clip in ids.tolist()]
        except DecodeError as error:
            return Failure(error)
        used = np.array([clip for clip, _ in read], np.int64)
        labels = torch.from_numpy(self.store.manifest.labels[used].astype(np.int64))
        clips = torch.from_numpy(np.stack([frames for _, frames in read]))
        return MicroBatch(step, virtual_gpu, clips, labels, torch.from_numpy(used), tuple(bad))

    def _clip_or_substitute(self, epoch: int, clip: int, bad: list[BadClip]) -> tuple[int, NDArray[np.uint8]]:
        """Read a clip, or where it is bad a substitute, which is a function of (seed, epoch, clip).

        The substitute uses the random draws of the clip it replaces, as it may have its own turn in the same epoch.
        """
        try:
            return clip, self._clip(epoch, clip, clip)
        except DecodeError as error:
            if self.data.on_bad_clip == "fail":
                raise
            reason = error
        generator = rng.key(self.seed, "substitute", epoch, clip)
        places = generator.integers(len(self.kept), size=_MAX_SUBSTITUTES)
        failed: list[BadClip] = []
        for other in self.kept.ids(places).tolist():
            if other == clip:
                continue
            try:
                frames = self._clip(epoch, other, clip)
            except DecodeError as error:
                failed.append(BadClip(other, error.path, error.reason, None))
                continue
            bad += [BadClip(clip, reason.path, reason.reason, other), *failed]
            return other, frames
        raise DecodeError(reason.path, f"{reason.reason}; nor can {_MAX_SUBSTITUTES} others be read in its place")

    def _clip(self, epoch: int, clip: int, drawn_for: int) -> NDArray[np.uint8]:
        data, manifest, seed = self.data, self.store.manifest, self.seed

        def choose(num_frames: int) -> NDArray[np.int64]:
            generator = rng.key(seed, "sampling", epoch, drawn_for)
            frames = augment.train_frames(data.sampling, num_frames, data.num_frames, data.frame_stride, generator)
            return _in_direction(frames, num_frames, manifest.is_reversed(clip))

        def view_of(width: int, height: int) -> augment.View:
            generator = rng.key(seed, "augment", epoch, drawn_for)
            return augment.train_view(data.augment, data.short_side, data.crop, data.flip, width, height, generator)

        with self._reading(clip):
            one: NDArray[np.uint8] = self.store.read_views(clip, *single(choose, view_of))[0]
        return one


@dataclass(frozen=True)
class _TestVideos(_Reads):
    """Reads the views of a video."""

    short_side: int
    clips: int
    crops: int | str

    def __getitem__(self, video: int) -> TestBatch | Failure:
        data, manifest = self.data, self.store.manifest

        def choose(num_frames: int) -> NDArray[np.int64]:
            frames = augment.test_frames(data.sampling, num_frames, data.num_frames, data.frame_stride, self.clips)
            return _in_direction(frames, num_frames, manifest.is_reversed(video))

        def views_of(width: int, height: int) -> list[augment.View]:
            return augment.test_views(self.short_side, self.crops, width, height)

        label = manifest.label(video)
        try:
            with self._reading(video):
                views = self.store.read_views(video, choose, views_of)
        except DecodeError as error:
            if data.on_bad_clip == "fail":
                return Failure(error)
            bad = BadClip(video, error.path, error.reason, None)
            return TestBatch(video, label, torch.zeros(0, dtype=torch.uint8), bad)
        return TestBatch(video, label, torch.from_numpy(views))


def _in_direction(frames: NDArray[np.int64], num_frames: int, backwards: bool) -> NDArray[np.int64]:
    """Return the frame numbers, counted from the end where the video is played backwards."""
    return num_frames - 1 - frames if backwards else frames
