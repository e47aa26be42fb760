"""Where clips are read from: one protocol for files of their own and for packed sets."""

from __future__ import annotations

from typing import Protocol

from summit_train.data.manifest import Manifest
from summit_train.data.manifest.files import FileStore, located_root
from summit_train.data.packed.format import PackError
from summit_train.data.packed.read import ShardStore, staged_folder
from summit_train.data.video.clips import Choose, Frames, ViewsOf
from summit_train.data.video.source import Limits
from summit_train.spec import DataSpec


class Store(Protocol):
    """The clips of a manifest. It is pickled to the loader's workers, so it opens files where it reads."""

    @property
    def manifest(self) -> Manifest:
        """Return the list of the clips."""

    def read_views(self, clip: int, choose: Choose, views_of: ViewsOf) -> Frames:
        """Read K clips in C views, uint8 RGB (K * C, T, height, width, 3), as `clips.read_views` does."""


def open_store(data: DataSpec, manifest: Manifest) -> Store:
    """Return the store of a manifest's clips. Raises PackError for a packed set that is damaged or does not fit."""
    limits = Limits(seconds=data.clip_seconds)
    if not manifest.is_packed:
        return FileStore(manifest, located_root(data.root, manifest), limits)
    local = None if data.stage in (None, "auto") else staged_folder(data.stage, manifest.source)
    store = ShardStore(manifest, local, limits)
    every = store.pack.packing.every
    if data.sampling == "dense" and data.frame_stride % every:
        raise PackError(
            f"{manifest.source}: has one frame in {every}, and data.frame_stride is {data.frame_stride}: a multiple of "
            f"{every} is wanted"
        )
    return store
