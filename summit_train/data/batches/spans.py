"""Training on spans of annotated videos: each span is a clip of its epoch."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from summit_train.data.loading import Store
from summit_train.data.manifest import Manifest
from summit_train.data.manifest.tables import DTYPES
from summit_train.data.video.clips import PartClip
from summit_train.data.video.span import TO_THE_END


@dataclass(frozen=True)
class SpanStore:
    """The clips of an annotated list, each cut into spans of `span_frames` frames or a few more (see loading.Store).

    Only a video with fewer frames gives a shorter span: a clip never starts over where it could have gone on. A video
    whose number of frames is not known is cut up to its last annotated frame. The workers cut the list for themselves.
    """

    whole: Store
    span_frames: int

    def __reduce__(self) -> tuple[Any, ...]:
        return SpanStore, (self.whole, self.span_frames)

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        """Return the number of frames of each video."""
        manifest = self.whole.manifest
        assert manifest.boxes is not None
        return np.where(manifest.frame_counts > 0, manifest.frame_counts, manifest.boxes.num_frames())

    @cached_property
    def _videos(self) -> NDArray[np.int64]:
        """Return each span's video."""
        return np.repeat(np.arange(len(self._lengths)), np.maximum(1, self._lengths // self.span_frames))

    @cached_property
    def manifest(self) -> Manifest:
        """The list of the spans. Each has the boxes of its frames, which keep their numbers in the video."""
        whole = self.whole.manifest
        videos = self._videos
        lengths = self._lengths[self._videos]
        counts = np.bincount(videos)[videos]
        places = np.arange(len(videos)) - np.searchsorted(videos, videos)
        spans = np.empty(len(videos), DTYPES["spans"])
        spans["start"] = places * lengths // counts
        spans["end"] = np.where(places + 1 < counts, (places + 1) * lengths // counts, TO_THE_END)
        assert whole.boxes is not None
        boxes = whole.boxes.cut(videos, spans["start"])
        paths = [os.fsencode(whole.clip(video).path) for video in range(len(whole))]
        sizes = np.diff(whole.offsets.astype(np.int64))[videos]
        identity = hashlib.blake2b(f"{whole.fingerprint()} {self.span_frames}".encode(), digest_size=16)
        columns: dict[str, Any] = boxes.clip_columns()
        return replace(
            whole,
            paths=np.frombuffer(b"".join(paths[video] for video in videos.tolist()), np.uint8),
            offsets=np.concatenate([[0], np.cumsum(sizes)]),
            frame_counts=whole.frame_counts[videos],
            reversed_flags=whole.reversed_flags[videos],
            lines=whole.lines[videos],
            digests=whole.digests[videos] if len(whole.digests) else whole.digests,
            spans=spans,
            boxes=boxes,
            stored_fingerprint=identity.hexdigest(),
            **columns,
        )

    def open(self, clip: int) -> PartClip:
        video = self.whole.open(int(self._videos[clip]))
        return PartClip(video, self.manifest.clip(clip).span, self.manifest.path(clip))
