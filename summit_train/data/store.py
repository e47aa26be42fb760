"""Where clips are read from: one protocol, whether the clips are files of their own or lie packed in shards."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from summit_train.data.clips import Choose, Frames, ViewOf, ViewsOf, read_views
from summit_train.data.decode import MAX_HELD_BYTES
from summit_train.data.limits import LIMITS, Limits
from summit_train.data.manifest import Manifest
from summit_train.data.pictures import read_folder_views
from summit_train.data.shards.local import staged_folder
from summit_train.data.shards.record import PackError
from summit_train.data.shards.store import ShardStore
from summit_train.data.video import DecodeError, Encoded, check_regular_file
from summit_train.spec import DataSpec

_READ_BYTES = 1 << 20


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
    """Each clip is a video file or a folder of pictures; relative paths start at `root`.

    A file is read at once: parallel file systems like one large read better than a decoder's many small ones. Where
    the manifest has its SHA-256, it has to be that: what a codec makes of changed bytes is often no error.
    """

    manifest: Manifest
    root: str
    limits: Limits = LIMITS

    def path(self, clip: int) -> str:
        """Where a clip lies."""
        return os.path.join(self.root, self.manifest.path(clip))

    def read_clip(self, clip: int, choose: Choose, view_of: ViewOf) -> Frames:
        """See Store."""
        views = self.read_views(clip, lambda n: choose(n)[None], lambda w, h: [view_of(w, h)])
        one: Frames = views[0]
        return one

    def read_views(self, clip: int, choose: Choose, views_of: ViewsOf) -> Frames:
        """See Store."""
        path, num_frames = self.path(clip), self.manifest.num_frames(clip)
        if os.path.isdir(path):
            return read_folder_views(path, choose, views_of, num_frames, self.limits)
        video = load_video(path, self.manifest.sha256(clip))
        return read_views(video, choose, views_of, num_frames, limits=self.limits)


def load_video(path: str, sha256: bytes | None) -> Encoded:
    """A file's bytes, or where it is too large to hold, its name. Raises DecodeError where its digest is another."""
    check_regular_file(path)
    try:
        with open(path, "rb") as file:
            content = file.read() if os.fstat(file.fileno()).st_size <= MAX_HELD_BYTES else None
            if sha256 is not None and sha256 != _sha256(iter([content]) if content is not None else _blocks(file)):
                raise DecodeError(path, "has changed since it was indexed: its SHA-256 is not the manifest's")
    except OSError as error:
        raise DecodeError(path, error.strerror or str(error)) from error
    return Encoded(path, content)


def file_sha256(path: str) -> str:
    """A file's SHA-256 in hexadecimal digits. Raises OSError."""
    with open(path, "rb") as file:
        return _sha256(_blocks(file)).hex()


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.read(_READ_BYTES), b"")


def _sha256(blocks: Iterator[bytes]) -> bytes:
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.digest()


def open_store(data: DataSpec, manifest: Manifest) -> Store:
    """The store that holds a manifest's clips. Raises PackError for a packed set that is damaged or does not fit."""
    if manifest.is_packed:
        return _shard_store(data, manifest)
    return FileStore(manifest, located_root(data.root, manifest), Limits(seconds=data.clip_seconds))


def _shard_store(data: DataSpec, manifest: Manifest) -> ShardStore:
    local = None if data.stage in (None, "auto") else staged_folder(data.stage, manifest.source)
    store = ShardStore(manifest, local, Limits(seconds=data.clip_seconds))
    every = store.pack.packing.every
    if data.sampling == "dense" and data.frame_stride % every:
        raise PackError(
            f"{manifest.source}: has one frame in {every}, and data.frame_stride is {data.frame_stride}: a multiple of "
            f"{every} is wanted"
        )
    return store


def located_root(root: str | None, manifest: Manifest) -> str:
    """Where relative paths start: `root` (data.root) or the manifest's own folder where its first clip lies only there.

    Looked up once for all clips. Where it lies at neither, it is data.root, and the first clip read says so.
    """
    beside = os.path.dirname(manifest.source)
    if root is None:
        return beside
    first = manifest.path(0)
    is_beside = not os.path.exists(os.path.join(root, first)) and os.path.exists(os.path.join(beside, first))
    return beside if is_beside else root
