"""Micro-batches of clips for training, and views or all frames of test videos, decoded by worker processes.

A batch is a function of (seed, epoch, clip) and of its place in the order, not of the rank or the worker that reads it.
Pixels stay uint8; the device normalises them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from summit_train.core import rng
from summit_train.core.own_parts import OwnPart
from summit_train.core.pages import new_bytes
from summit_train.core.text import counted
from summit_train.core.workers import Make, Reading, ReadLimit, Workers
from summit_train.data.batches.order import MicroBatchKey, Order
from summit_train.data.loading import (
    Crop,
    Draw,
    Sample,
    Store,
    Targets,
    draws_of_views,
    read_clip,
    read_training_clip,
    whole_video,
)
from summit_train.data.video import augment
from summit_train.data.video.clips import Numbers
from summit_train.data.video.rand_augment import RandAugment
from summit_train.data.video.render import Frames
from summit_train.data.video.source import RAISE_SECONDS, DecodeError
from summit_train.spec import DataSpec, EvaluateSpec

if TYPE_CHECKING:
    import torch

# The number of clips that are tried in place of an unreadable one.
_MAX_SUBSTITUTES = 16
_OWN_AUGMENT = "summit_train.data.video.own_augment"
PICTURES_AT_ONCE = 384  # frames times crops of a block of a whole video: 75 MB at 256 x 256 pixels, fewer larger ones


AnyTensors = TypeVar("AnyTensors", bound="Tensors")


class Tensors:
    """A dataclass with tensors, in the fields `tensors`. A worker, which loads no torch, makes it with arrays there."""

    tensors: ClassVar[tuple[str, ...]]

    def moved(self: AnyTensors, move: Callable[[Any], torch.Tensor]) -> AnyTensors:
        moved = {name: move(getattr(self, name)) for name in self.tensors}
        return cast(AnyTensors, replace(cast(Any, self), **moved))

    def pin_memory(self: AnyTensors) -> AnyTensors:
        """Return it in page-locked memory, from which a GPU copies without waiting."""
        return self.moved(lambda tensor: tensor if tensor.is_pinned() else tensor.pin_memory())


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    """Take an array for the tensor that `Batches` makes of it."""
    return cast("torch.Tensor", array)


class Batches(Workers[AnyTensors]):
    """The batches that workers make of the keys, with tensors; where there is CUDA, in page-locked memory.

    seconds: that a clip may take. modules: more that `make` needs. Raises DecodeError, as raised in the worker, at the
    batch with the bad video.
    """

    def __init__(
        self,
        make: Make[AnyTensors],
        keys: Iterable[Any],
        num_workers: int,
        seconds: float,
        modules: Sequence[str] = (),
    ) -> None:
        import torch

        self._is_pinned = torch.cuda.is_available()
        self._blocks = WeakValueDictionary[int, torch.Tensor]()  # of page-locked memory, by their addresses
        super().__init__(
            make,
            keys,
            num_workers,
            modules=[__name__, *modules],
            limit=ReadLimit(DecodeError, seconds, RAISE_SECONDS),
            allocate=self._page_locked if self._is_pinned else new_bytes,
        )

    def __next__(self) -> AnyTensors:
        batch = super().__next__().moved(self._of_array)
        return batch.pin_memory() if self._is_pinned else batch

    def _page_locked(self, size: int) -> NDArray[np.uint8]:
        import torch

        block = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._blocks[block.data_ptr()] = block
        array: NDArray[np.uint8] = block.numpy()
        return array

    def _of_array(self, array: NDArray[Any]) -> torch.Tensor:
        """Return an array as a tensor; of page-locked memory a view of its block.

        Only so does CUDA's allocator learn that a copy of a slice is under way, and wait with using the block again.
        """
        import torch

        tensor = torch.from_numpy(array)
        block = self._blocks.get(tensor.data_ptr())
        if block is None or not array.flags.c_contiguous:
            return tensor
        return block.view(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True)
class BadClip:
    """An unreadable clip: its place in the manifest, its path, the reason, and the clip that was read instead.

    substitute is None if the clip was itself tried as a substitute, or belongs to the test.
    """

    clip: int
    path: str
    reason: str
    substitute: int | None


@dataclass(frozen=True)
class MicroBatch(Tensors):
    """The clips of one virtual GPU in one step; with data.repeats those of one video follow one another.

    clips: uint8 (n, T, H, W, C); smaller ones are padded with 0 at the right and at the bottom. labels: see
    Manifest.class_labels; of a list with boxes what the views show of these, see Boxes.stacked. ids: int64 (n,), places
    in the manifest. bad: the unreadable clips; `ids` has their substitutes.
    """

    tensors = ("clips", "labels", "ids")

    step: int
    virtual_gpu: int
    clips: torch.Tensor
    labels: torch.Tensor
    ids: torch.Tensor
    bad: tuple[BadClip, ...] = ()

    def without_clips(self) -> MicroBatch:
        nothing = self.clips.new_empty(0)
        return replace(self, clips=nothing, labels=nothing)


@dataclass(frozen=True)
class TestBatch(Tensors):
    """One video of the test: its place in the manifest, and its views, uint8 (clips * crops, T, h, w, C).

    bad: why it has no view. frames: the clips' frame numbers in the video, int64 (clips, T).
    """

    __test__ = False  # not a test case, whatever pytest makes of the name
    tensors = ("views",)

    video: int
    views: torch.Tensor
    bad: BadClip | None = None
    frames: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))


@dataclass(frozen=True)
class Variation:
    """Varies the pixels of a view by a generator. purpose, numbers: of its key, see `rng.key`."""

    vary: Callable[[Frames, np.random.Generator], Frames]
    purpose: str
    numbers: tuple[int, ...] = ()


def varied(pixels: Frames, variations: Sequence[Variation], seed: int, drawn: Draw) -> Frames:
    """Apply the variations to the views (repeats, T, H, W, C) of a training clip, each view with its own draws."""
    keys = draws_of_views(len(pixels), drawn)
    for variation in variations:
        generators = [rng.key(seed, variation.purpose, *variation.numbers, *key) for key in keys]
        pixels = np.stack([variation.vary(view, generator) for view, generator in zip(pixels, generators, strict=True)])
    return pixels


@dataclass(frozen=True)
class TrainingClips:
    """Reads the micro-batch of a key, or one clip.

    augment: the user's augmentations, as the run began with them. num_classes: of clips that may have several,
    see Manifest.class_labels.
    """

    data: DataSpec
    store: Store
    seed: int
    augment: tuple[OwnPart, ...] = ()
    num_classes: int | None = None

    @cached_property
    def _variations(self) -> list[Variation]:
        """Return the variations of a clip's crops, in the order in which they are applied."""
        variations: list[Variation] = []
        if self.data.built_in_augment == "rand_augment":
            vary = RandAugment(**self.data.rand_augment_settings.model_dump())
            variations.append(Variation(vary, "rand_augment"))
        if self.augment:
            from summit_train.data.video.own_augment import OwnAugment  # loads torch, to seed it

            for number, part in enumerate(self.augment):
                variations.append(Variation(OwnAugment(part), "own_augment", (number,)))
        return variations

    def batches(self, order: Order, rank: int, ranks: int, steps: range) -> Batches[MicroBatch]:
        """Return a rank's micro-batches of `steps`, those of one step one after the other. Close them after use.

        The workers live through the whole run, so epochs end without a pause. With data.on_bad_clip "fail" the batch
        with a bad video raises DecodeError when it is its turn; with "skip" it names the substitutes.
        """
        keys = order.micro_batches(rank, ranks, steps)
        modules = [_OWN_AUGMENT] if self.augment else []
        return Batches(self, keys, self.data.num_workers(), self.data.clip_seconds, modules)

    def __call__(self, key: MicroBatchKey, reading: Reading) -> MicroBatch:
        step, virtual_gpu, _, _ = key
        bad: list[BadClip] = []
        read = [self._clip_or_substitute(draw, bad, reading) for draw in self.draws(key)]
        used = np.repeat(np.array([clip for clip, _, _ in read], np.int64), self.data.repeats)
        manifest = self.store.manifest
        targets = [target for *_, of_clip in read for target in of_clip]
        if manifest.boxes is None:
            labels = _tensor(manifest.class_labels(used, self.num_classes))
        else:
            labels = _tensor(manifest.boxes.stacked(targets))
        clips = _tensor(_padded([views for _, views, _ in read]))
        return MicroBatch(step, virtual_gpu, clips, labels, _tensor(used), tuple(bad))

    def draws(self, key: MicroBatchKey) -> list[Draw]:
        step, virtual_gpu, epoch, ids = key
        # A clip that is drawn more than once in an epoch has other draws each time.
        turns = [(step, virtual_gpu, i) if self.data.balance == "classes" else () for i in range(len(ids))]
        return [(epoch, clip, *turn) for clip, turn in zip(ids.tolist(), turns, strict=True)]

    def _clip_or_substitute(self, draw: Draw, bad: list[BadClip], reading: Reading) -> tuple[int, Frames, Targets]:
        """Read a clip, or where it is bad a substitute, and add those that are bad to `bad`."""
        failed: list[BadClip] = []
        # The substitutes are a function of (seed, draw).
        others = rng.key(self.seed, "substitute", *draw).integers(len(self.store.manifest), size=_MAX_SUBSTITUTES)
        for tried in (draw[1], *(other for other in others.tolist() if other != draw[1])):
            try:
                views_and_boxes = self.clip(tried, draw, reading)
            except DecodeError as error:
                if self.data.on_bad_clip == "fail":
                    raise
                failed.append(BadClip(tried, error.path, error.reason, None))
            else:
                bad += [replace(first, substitute=tried) for first in failed[:1]] + failed[1:]
                return tried, *views_and_boxes
        num_others = len({bad_clip.clip for bad_clip in failed[1:]})
        reason = f"{failed[0].reason}; nor can {counted(num_others, 'other clip')} be read in its place"
        raise DecodeError(failed[0].path, reason if num_others else failed[0].reason)

    def clip(self, clip: int, drawn: Draw, reading: Reading) -> tuple[Frames, Targets]:
        """Return a clip's views, uint8 (repeats, T, H, W, C), and what they show of its boxes. Raises DecodeError."""
        manifest = self.store.manifest
        with reading(clip, manifest.path(clip)):
            decoded = read_training_clip(self.data, self.store, clip, self.seed, drawn)
        pixels = varied(decoded.pixels, self._variations, self.seed, drawn)
        return pixels, decoded.targets(manifest, clip)


def _padded(clips: Sequence[Frames]) -> Frames:
    """Return clips (n, T, H, W, C) as one array, of the largest height and width."""
    height, width = (max(clip.shape[axis] for clip in clips) for axis in (2, 3))
    if all(clip.shape[2:4] == (height, width) for clip in clips):
        return np.concatenate(clips)
    behind = [((0, 0), (0, 0), (0, height - clip.shape[2]), (0, width - clip.shape[3]), (0, 0)) for clip in clips]
    return np.concatenate([np.pad(clip, widths) for clip, widths in zip(clips, behind, strict=True)])


def test_batches(
    data: DataSpec, evaluate: EvaluateSpec, store: Store, videos: Sequence[int], crop: Crop | None = None
) -> Batches[TestBatch]:
    """Return the test views of the given videos, in their order: clips times crops each, clip by clip.

    Nothing is random. crop: other views than the crops of `evaluate`; workers pickle it. A bad video raises
    DecodeError, or with data.on_bad_clip "skip" has no views, and no substitute.
    """
    crop = crop or partial(augment.test_views, evaluate.short_side, evaluate.crops, long_side=data.long_side)
    make = partial(_test_batch, data, store, evaluate.clips, crop)
    return Batches(make, [int(video) for video in videos], min(data.num_workers(), len(videos)), data.clip_seconds)


test_batches.__test__ = False  # type: ignore[attr-defined]  # nor is this one


def _test_batch(data: DataSpec, store: Store, num_clips: int, crop: Crop, video: int, reading: Reading) -> TestBatch:
    """Read the views of a video."""

    def sample(num_frames: int) -> Numbers:
        return augment.test_frames(data.sampling, num_frames, data.num_frames, data.frame_stride, num_clips)

    try:
        with reading(video, store.manifest.path(video)):
            decoded = read_clip(store, video, sample, crop)
    except DecodeError as error:
        if data.on_bad_clip == "fail":
            raise
        return TestBatch(video, _tensor(np.zeros(0, np.uint8)), BadClip(video, error.path, error.reason, None))
    return TestBatch(video, _tensor(decoded.pixels), frames=decoded.frames)


# Whole videos of a test, from the first frame to the last, in bounded memory: each is read by one worker, in one pass
# (one that is played backwards in a pass for each block).


@dataclass(frozen=True)
class FrameBlock(Tensors):
    """Some frames of one video.

    num_frames: of the video, 0 with an error. numbers: of the frames here, in order of playing. size: width and height
    of the upright frame as it is stored. views: uint8 (crops, len(numbers), height, width, C). error: why it has no
    views.
    """

    tensors = ("views",)

    video: int
    num_frames: int
    numbers: NDArray[np.int64]
    size: tuple[int, int]
    views: torch.Tensor
    error: DecodeError | None = None


@dataclass(frozen=True)
class WholeVideo:
    """One video, `video` its place in the manifest, of which the first block is read. later: yields the others."""

    video: int
    first: FrameBlock
    later: Iterator[FrameBlock]

    def blocks(self) -> Iterator[FrameBlock]:
        """Yield the video's blocks. Raises DecodeError at one that could not be read."""
        for block in chain([self.first], self.later):
            if block.error is not None:
                raise block.error
            yield block


def whole_videos(
    data: DataSpec, evaluate: EvaluateSpec, store: Store, videos: Sequence[int], sample: Sample
) -> Iterator[WholeVideo]:
    """Yield each of the given videos, in their order, in the crops that `evaluate` asks for.

    The blocks have the chosen frames in order, each once. Those of a video that cannot be read raise DecodeError.
    """
    crops = evaluate.crops if isinstance(evaluate.crops, int) else 1
    pixels = max(256, evaluate.short_side) ** 2
    size = max(1, PICTURES_AT_ONCE * 256**2 // pixels // crops)
    crop = partial(augment.test_views, evaluate.short_side, evaluate.crops, long_side=data.long_side)
    read = _Blocks(store, sample, crop, size)
    keys = [int(video) for video in videos]
    with Batches(read, keys, min(data.num_workers(), len(keys)), data.clip_seconds) as blocks:
        for video, later in groupby(blocks, lambda block: block.video):
            yield WholeVideo(video, next(later), later)  # noqa: B031


@dataclass(frozen=True)
class _Blocks:
    """Reads the blocks of a video, the last of which has the error if it cannot be read. size: frames of a block."""

    store: Store
    sample: Sample
    crop: Crop
    size: int

    def __call__(self, video: int, reading: Reading) -> Iterator[FrameBlock]:
        blocks = self._read(video)
        try:
            while True:
                with reading(video, self.store.manifest.path(video)):
                    block = next(blocks, None)
                if block is None:
                    return
                yield block
        except DecodeError as error:
            yield FrameBlock(video, 0, np.zeros(0, np.int64), (0, 0), _tensor(np.zeros(0, np.uint8)), error)

    def _read(self, video: int) -> Iterator[FrameBlock]:
        for block in whole_video(self.store, video, self.sample, self.crop, self.size):
            pixels = _tensor(block.pixels)
            yield FrameBlock(video, block.num_frames, block.frames[0], block.size, pixels)
