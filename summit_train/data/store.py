"""Where clips are read from: one protocol, whether the clips are files of their own or lie packed in shards."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

from summit_train.data.clips import Choose, Frames, ViewOf, ViewsOf, read_clip, read_views
from summit_train.data.manifest import Manifest
from summit_train.spec import DataSpec


class Store(Protocol):
    """The clips of a manifest. It is pickled to the loader's workers, so it opens what it needs where it reads."""

    @property
    def manifest(self) -> Manifest:
        """The clips by number."""

    def read_clip(self, clip: int, choose: Choose, view_of: ViewOf) -> Frames:
        """One clip in one view, uint8 RGB (T, height, width, 3); see `clips.read_clip`. Raises DecodeError."""

    def read_views(self, clip: int, choose: Choose, views_of: ViewsOf) -> Frames:
        """Several clips in several views, uint8 RGB (K * C, T, height, width, 3). Raises DecodeError."""


@dataclass(frozen=True)
class FileStore:
    """Each clip is a video file; relative paths start at `root`."""

    manifest: Manifest
    root: str

    def path(self, clip: int) -> str:
        """Where a clip lies."""
        return os.path.join(self.root, self.manifest.path(clip))

    def read_clip(self, clip: int, choose: Choose, view_of: ViewOf) -> Frames:
        """See Store."""
        return read_clip(self.path(clip), choose, view_of, self.manifest.num_frames(clip))

    def read_views(self, clip: int, choose: Choose, views_of: ViewsOf) -> Frames:
        """See Store."""
        return read_views(self.path(clip), choose, views_of, self.manifest.num_frames(clip))


def open_store(data: DataSpec, manifest: Manifest) -> Store:
    """The store that holds a manifest's clips."""
    return FileStore(manifest, _root(data.root, manifest))


def _root(root: str | None, manifest: Manifest) -> str:
    """Where relative paths start: `root` (data.root) or the manifest's own folder where its first clip lies only there.

    Looked up once for all clips. Where it lies at neither, it is data.root, and the first clip read says so.
    """
    beside = os.path.dirname(manifest.source)
    if root is None:
        return beside
    first = manifest.path(0)
    is_beside = not os.path.exists(os.path.join(root, first)) and os.path.exists(os.path.join(beside, first))
    return beside if is_beside else root
