"""The pictures that an exported graph is tried on: of one video file, or of the spec's validation set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from summit_train.core.errors import UserError
from summit_train.data.batches.loader import TestBatch, test_batches
from summit_train.data.batches.stores import Store, file_store, open_store
from summit_train.data.manifest import read_manifest
from summit_train.data.manifest.files import plain_manifest
from summit_train.data.manifest.quarantine import kept_clips
from summit_train.data.video import augment
from summit_train.spec import DataSpec, Spec

# Of the validation videos, how many may be unreadable before one is tried no more.
_MOST_TRIES = 16


@dataclass(frozen=True)
class Picture:
    """The part of a frame that the network sees: the centre, `height` x `width` pixels.

    The frame is scaled so that its shorter side has `short_side` pixels, or more where it would not cover the centre.
    """

    short_side: int
    height: int
    width: int

    def views(self, width: int, height: int) -> list[augment.View]:
        """Return the one view of an upright frame of `width` x `height` pixels."""
        shorter = min(width, height)
        least = max(-(-self.width * shorter // width), -(-self.height * shorter // height))
        scaled = augment.scaled_size(width, height, max(self.short_side, least))
        x, y = (scaled[0] - self.width) // 2, (scaled[1] - self.height) // 2
        return [augment.View(*scaled, x, y, self.width, self.height)]


@dataclass(frozen=True)
class Clips:
    """Clips of one video, uint8 (K, T, H, W, C), and the path that they come from."""

    path: str
    clips: torch.Tensor


def clips_of(path: str, data: DataSpec, num_clips: int, picture: Picture) -> Clips:
    """Read test clips of a video file, or of a folder of pictures or of flow. Raises DecodeError."""

    def choose(num_frames: int) -> np.ndarray:
        return augment.test_frames(data.sampling, num_frames, data.num_frames, data.frame_stride, num_clips)

    frames = file_store(data, plain_manifest([path]), "").read_views(0, choose, picture.views)
    return Clips(path, torch.from_numpy(frames))


@dataclass(frozen=True)
class Validation:
    """The validation set of a spec, as far as it can be read here.

    store: None where it cannot; `reason` says why, and is empty otherwise. videos: places in its list, without those
    that data.quarantine names.
    """

    spec: Spec
    store: Store | None
    videos: tuple[int, ...] = ()
    reason: str = ""

    def batches(self, videos: Iterable[int], data: DataSpec, num_clips: int, picture: Picture) -> Iterator[TestBatch]:
        """Yield the test clips of videos; one that cannot be read has `bad` and no clips."""
        assert self.store is not None
        settings = self.spec.evaluate.model_copy(update={"clips": num_clips})
        skipping = data.model_copy(update={"on_bad_clip": "skip"})
        yield from test_batches(skipping, settings, self.store, list(videos), picture.views)

    def spread(self, most: int | None) -> tuple[int, ...]:
        """Return all videos, or `most` of them in equal distances: a list is often sorted by class."""
        if most is None or most >= len(self.videos):
            return self.videos
        return tuple(self.videos[number * len(self.videos) // most] for number in range(most))

    def first_clips(
        self, data: DataSpec, num_clips: int, picture: Picture, tell: Callable[[str], None]
    ) -> tuple[Clips | None, str]:
        """Return clips of the first video that can be read, and tell the others before it; or None, and why."""
        if self.store is None:
            return None, self.reason
        here = data.model_copy(update={"workers": 0})
        tried = self.videos[:_MOST_TRIES]
        for batch in self.batches(tried, here, num_clips, picture):
            if batch.bad is None:
                return Clips(self.store.manifest.path(batch.video), batch.views), ""
            tell(f"left out: {batch.bad.path}: {batch.bad.reason}")
        return None, f"none of the first {len(tried)} videos of {self.spec.data.val} can be read"


def open_validation(spec: Spec) -> Validation:
    """Open the spec's validation set. Whatever is wrong with it is the reason why it is not used."""
    path = spec.data.val
    if not Path(path).exists():
        return Validation(spec, None, reason=f"there is no validation set {path} here")
    try:
        manifest = read_manifest(path)
        manifest.check_labels(spec.model.num_classes)
        store = open_store(spec.data, manifest)
        kept = kept_clips(spec.data, manifest)
    except UserError as error:
        return Validation(spec, None, reason=str(error))
    return Validation(spec, store, tuple(kept.ids(np.arange(len(kept))).tolist()))
