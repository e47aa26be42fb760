"""Micro-batches of clips for training, and views or all frames of test videos, decoded by worker processes.

A batch is a function of (seed, epoch, clip) and of its place in the order, not of the rank or the worker that reads it.
Pixels stay uint8; the device normalises them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from summit_train.core import rng
from summit_train.data.batches.order import MicroBatchKey, Order
from summit_train.data.batches.stores import Store
from summit_train.data.batches.workers import Batches, Reading
from summit_train.data.manifest.boxes import stacked_targets
from summit_train.data.manifest.quarantine import Kept
from summit_train.data.video import augment
from summit_train.data.video.clips import Frames, ViewsOf
from summit_train.data.video.rand_augment import apply_operations, draw_operations
from summit_train.data.video.source import DecodeError
from summit_train.spec import DataSpec, EvaluateSpec

# The number of clips that are tried in place of an unreadable one.
_MAX_SUBSTITUTES = 16
PICTURES_AT_ONCE = 384  # frames times crops of a block of a whole video: 75 MB at 256 x 256 pixels, fewer larger ones
_NOTHING = torch.empty(0)
AnyBatch = TypeVar("AnyBatch", bound="Pinned")
# From the number of a video's frames to the wanted ones, in any order and with repeats. Pure, and can be pickled.
ChooseFrames = Callable[[int], NDArray[np.int64]]


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
    """The clips of one virtual GPU in one step; with data.repeats those of one video follow one another.

    clips: uint8 (n, T, H, W, C); smaller ones are padded with 0 at the right and at the bottom. labels: int64 (n,), or
    (n, most), see Manifest.label_rows. Of a list with boxes float32 (n, T, most, 5): left, top, right, bottom in pixels
    of the clip and the label, -2 if the box is ignored; a row without a box is -1. ids: int64 (n,), places in the
    manifest. bad: the unreadable clips; `ids` has their substitutes.
    """

    step: int
    virtual_gpu: int
    clips: torch.Tensor
    labels: torch.Tensor
    ids: torch.Tensor
    bad: tuple[BadClip, ...] = ()

    def without_clips(self) -> MicroBatch:
        """Return it without clips and labels, its ids copied: each tensor of a worker holds a file descriptor."""
        return replace(self, clips=_NOTHING, labels=_NOTHING, ids=self.ids.clone())


@dataclass(frozen=True)
class TestBatch(Pinned):
    """One video of the test: its place in the manifest, and its views, uint8 (clips * crops, T, h, w, C).

    bad: why it has no view. frames: the clips' frame numbers in the video, int64 (clips, T).
    """

    __test__ = False  # not a test case, whatever pytest makes of the name

    video: int
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
    return Batches(_TrainingClips(data, store, order.seed, kept), clips, data.num_workers(), data.clip_seconds)


Targets = list[list[NDArray[np.float32]]]  # of each view, of each frame, see Boxes.targets; none without boxes
Draw = tuple[int, ...]  # (epoch, clip), with data.balance: classes (epoch, clip, step, virtual GPU, place)


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
        # A clip that is drawn more than once in an epoch has other draws each time.
        turns = [(step, virtual_gpu, i) if self.data.balance == "classes" else () for i in range(len(ids))]
        draws = [(epoch, clip, *turn) for clip, turn in zip(ids.tolist(), turns, strict=True)]
        read = [self._clip_or_substitute(draw, bad, reading) for draw in draws]
        used = np.repeat(np.array([clip for clip, _, _ in read], np.int64), self.data.repeats)
        manifest, targets = self.store.manifest, [target for _, _, targets in read for target in targets]
        labels = torch.from_numpy(manifest.label_rows(used) if manifest.boxes is None else stacked_targets(targets))
        clips = torch.from_numpy(_padded([views for _, views, _ in read]))
        return MicroBatch(step, virtual_gpu, clips, labels, torch.from_numpy(used), tuple(bad))

    def _clip_or_substitute(self, draw: Draw, bad: list[BadClip], reading: Reading) -> tuple[int, Frames, Targets]:
        """Read a clip, or where it is bad a substitute, and add those that are bad to `bad`."""
        failed: list[BadClip] = []
        # The substitutes are a function of (seed, draw).
        places = rng.key(self.seed, "substitute", *draw).integers(len(self.kept), size=_MAX_SUBSTITUTES)
        for tried in (draw[1], *(other for other in self.kept.ids(places).tolist() if other != draw[1])):
            try:
                found = self._clip(tried, draw, reading)
            except DecodeError as error:
                if self.data.on_bad_clip == "fail":
                    raise
                failed.append(BadClip(tried, error.path, error.reason, None))
            else:
                bad += [replace(one, substitute=tried) for one in failed[:1]] + failed[1:]
                return tried, *found
        reason = f"{failed[0].reason}; nor can {_MAX_SUBSTITUTES} others be read in its place"
        raise DecodeError(failed[0].path, reason)

    def _clip(self, clip: int, drawn: Draw, reading: Reading) -> tuple[Frames, Targets]:
        """Read `data.repeats` views of a clip, uint8 (repeats, T, H, W, C), and what they show of its boxes.

        drawn: whose draws it has: those of another clip where it is a substitute, which may have its own turn.
        """
        data, manifest, draw = self.data, self.store.manifest, partial(rng.key, self.seed)
        # The first view has the draws of a clip that is not repeated.
        places = [(*drawn, *([repeat] if repeat else [])) for repeat in range(data.repeats)]

        # The last choices, which are those that are read.
        num_frames, frames, size, views = 0, np.zeros(0, np.int64), (0, 0), list[augment.View]()

        def choose(number: int) -> NDArray[np.int64]:
            nonlocal num_frames, frames
            generator = draw("sampling", *drawn)
            frames = augment.train_frames(data.sampling, number, data.num_frames, data.frame_stride, generator)
            num_frames, frames = number, number - 1 - frames if manifest.is_reversed(clip) else frames
            return frames[None]

        def views_of(width: int, height: int) -> list[augment.View]:
            nonlocal size, views
            size = width, height
            views = [augment.train_view(data, width, height, draw("augment", *place)) for place in places]
            return views

        with reading(clip, manifest.path(clip)):
            pixels = self.store.read_views(clip, choose, views_of)
        targets: Targets = []
        if manifest.boxes is not None:
            start = manifest.span(clip).start
            manifest.boxes.check(clip, manifest.path(clip), start + num_frames, *size)
            targets = [manifest.boxes.targets(clip, start + frames, view, size) for view in views]
        if data.augment != "rand_augment":
            return pixels, targets
        operations = [draw_operations(data.rand_augment_settings, draw("rand_augment", *place)) for place in places]
        return np.stack([apply_operations(own, view) for own, view in zip(operations, pixels, strict=True)]), targets


def _padded(clips: Sequence[Frames]) -> Frames:
    """Return clips (n, T, H, W, C) as one array, of the largest height and width."""
    height, width = (max(clip.shape[axis] for clip in clips) for axis in (2, 3))
    if all(clip.shape[2:4] == (height, width) for clip in clips):
        return np.concatenate(clips)
    behind = [((0, 0), (0, 0), (0, height - clip.shape[2]), (0, width - clip.shape[3]), (0, 0)) for clip in clips]
    return np.concatenate([np.pad(clip, widths) for clip, widths in zip(clips, behind, strict=True)])


def test_batches(
    data: DataSpec, evaluate: EvaluateSpec, store: Store, videos: Sequence[int], views_of: ViewsOf | None = None
) -> Batches[TestBatch]:
    """Return the test views of the given videos, in their order: clips times crops each, clip by clip.

    Nothing is random. views_of: other views than the crops of `evaluate`; workers pickle it. A bad video raises
    DecodeError, or with data.on_bad_clip "skip" has no views, and no substitute.
    """
    views_of = views_of or partial(augment.test_views, evaluate.short_side, evaluate.crops, long_side=data.long_side)
    make = partial(_test_batch, data, store, evaluate.clips, views_of)
    return Batches(make, [int(video) for video in videos], min(data.num_workers(), len(videos)), data.clip_seconds)


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

    try:
        with reading(video, manifest.path(video)):
            views = store.read_views(video, choose, views_of)
    except DecodeError as error:
        if data.on_bad_clip == "fail":
            raise
        bad = BadClip(video, error.path, error.reason, None)
        return TestBatch(video, torch.zeros(0, dtype=torch.uint8), bad)
    return TestBatch(video, torch.from_numpy(views), frames=manifest.span(video).start + chosen)


# Whole videos of a test, from the first frame to the last, in bounded memory. A long one is read in blocks of frames,
# each on its own: from the key frame before it if the manifest has the number of frames, else from the video's start.


@dataclass(frozen=True)
class FrameBlock(Pinned):
    """Some frames of one video.

    num_frames: of the video, 0 with an error. num_chosen: how many of them are chosen in all. numbers: of the frames
    here, in order of playing. size: width and height of the upright frame as it is stored. views: uint8 (crops,
    len(numbers), height, width, C). error: why it has no views.
    """

    video: int
    num_frames: int
    num_chosen: int
    numbers: NDArray[np.int64]
    size: tuple[int, int]
    views: torch.Tensor
    error: DecodeError | None = None


@dataclass(frozen=True)
class WholeVideo:
    """One video, `video` its place in the manifest, of which the first block is read."""

    video: int
    first: FrameBlock
    blocks_at: Callable[[Sequence[tuple[int, int]]], Batches[FrameBlock]]
    size: int

    def blocks(self) -> Iterator[FrameBlock]:
        """Yield the video's blocks. Raises DecodeError at one that could not be read."""
        if self.first.error is not None:
            raise self.first.error
        yield self.first
        later = [(self.video, start) for start in range(self.size, self.first.num_chosen, self.size)]
        if later:
            with self.blocks_at(later) as blocks:
                for block in blocks:
                    if block.error is not None:
                        raise block.error
                    yield block


def whole_videos(
    data: DataSpec, evaluate: EvaluateSpec, store: Store, videos: Sequence[int], choose_frames: ChooseFrames
) -> Iterator[WholeVideo]:
    """Yield each of the given videos, in their order, in the crops that `evaluate` asks for.

    The blocks have the chosen frames in order, each once. Those of a video that cannot be read raise DecodeError.
    """
    crops, pixels = evaluate.crops if isinstance(evaluate.crops, int) else 1, max(256, evaluate.short_side) ** 2
    size = max(1, PICTURES_AT_ONCE * 256**2 // pixels // crops)
    views_of = partial(augment.test_views, evaluate.short_side, evaluate.crops, long_side=data.long_side)
    read = partial(_read_block, views_of, store, choose_frames, size)

    def blocks_at(keys: Sequence[tuple[int, int]]) -> Batches[FrameBlock]:
        return Batches(read, keys, min(data.num_workers(), len(keys)), data.clip_seconds)

    with blocks_at([(int(video), 0) for video in videos]) as firsts:
        for first in firsts:
            yield WholeVideo(first.video, first, blocks_at, size)


def _read_block(
    views_of: ViewsOf, store: Store, choose_frames: ChooseFrames, size: int, key: tuple[int, int], reading: Reading
) -> FrameBlock:
    """Read at most `size` frames of a video. key: the video, and the place among its chosen frames of the first."""
    (video, start), manifest = key, store.manifest
    # As the last choice had it, which is the one that counts: the first may begin with a wrong number of frames.
    num_frames, frames, num_anchors, size_stored = 0, np.zeros(0, np.int64), 0, (0, 0)

    def choose(number: int) -> NDArray[np.int64]:
        nonlocal num_frames, frames, num_anchors
        num_frames, frames = number, np.unique(choose_frames(number))
        stored = number - 1 - frames if manifest.is_reversed(video) else frames
        here = stored[start : start + size]
        # Every block reads the first and the last frame too: the one gives the size of the picture, the other shows a
        # number of frames that is too high.
        anchors = np.array([stored.min(), stored.max()]) if len(stored) > size else here[:0]
        num_anchors = len(anchors)
        return np.concatenate([anchors, here])[None]

    def noted(width: int, height: int) -> Sequence[augment.View]:
        nonlocal size_stored
        size_stored = width, height
        return views_of(width, height)

    try:
        with reading(video, manifest.path(video)):
            views = store.read_views(video, choose, noted)
    except DecodeError as error:
        return FrameBlock(video, 0, 0, frames[:0], size_stored, torch.zeros(0, dtype=torch.uint8), error)
    here = frames[start : start + size]
    return FrameBlock(video, num_frames, len(frames), here, size_stored, torch.from_numpy(views[:, num_anchors:]))
