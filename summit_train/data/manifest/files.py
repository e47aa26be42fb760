"""The clips of a manifest as files of their own: videos, or folders of pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from summit_train.core.errors import UserError
from summit_train.data.manifest.reading import Manifest
from summit_train.data.manifest.tables import parse_tables
from summit_train.data.video.clips import Choose, Decoded, ViewsOf, holds_pictures, read_folder_views, read_views
from summit_train.data.video.decode import Playback
from summit_train.data.video.films import Films
from summit_train.data.video.region import WHOLE_FRAME
from summit_train.data.video.render import views_of_region
from summit_train.data.video.source import LIMITS, Limits


@dataclass(frozen=True)
class FileStore:
    """Each clip is a video file or a folder of pictures; relative paths start at `root` (see batches.stores.Store).

    A file must match the manifest's SHA-256: a codec often decodes changed bytes without an error.
    is_flow: each clip is a folder of pictures of flow, read as `clips.read_folder_views` does.
    """

    manifest: Manifest
    root: str
    limits: Limits = LIMITS
    is_flow: bool = False

    @cached_property
    def films(self) -> Films:
        """Return this process's checks and indexes of films: not a field, so that copies have their own."""
        return Films()

    def path(self, clip: int) -> str:
        return os.path.join(self.root, self.manifest.path(clip))

    def read_views(self, clip: int, choose: Choose, views_of: ViewsOf, playback: Playback | None = None) -> Decoded:
        path, num_frames, span = self.path(clip), self.manifest.num_frames(clip), self.manifest.span(clip)
        region, sha256 = self.manifest.region(clip), self.manifest.sha256(clip)
        views_of = views_of_region(region, views_of, path, self.manifest.place(clip))
        if self.is_flow:
            read = read_folder_views(path, choose, views_of, num_frames, self.limits, is_flow=True)
            return read._replace(size=read.size if region == WHOLE_FRAME else region[2:])
        choose = span.chosen_in(path, choose)
        if holds_pictures(path):
            read = read_folder_views(path, choose, views_of, num_frames, self.limits)
        else:
            playback = playback or Playback()
            if playback.video is None:
                playback.video = self.films.load(path, sha256, num_frames, self.limits)
            video = playback.video
            read = read_views(video, choose, views_of, num_frames, self.limits, playback)
            video.check()
        size = read.size if region == WHOLE_FRAME else region[2:]
        num_frames = len(span.frames(path, read.num_frames))
        return read._replace(num_frames=num_frames, size=size, frames=read.frames - span.start)


def plain_manifest(paths: Sequence[str]) -> Manifest:
    """Return a list of videos of which only the path is known. Their labels are -1."""
    cells = {"path": paths, "label": ["0"] * len(paths)}
    columns: dict[str, Any] = parse_tables(Path(), [([0] * len(paths), cells)], None)
    return replace(Manifest("", "", None, **columns), labels=np.full(len(paths), -1, np.int32))


def located_root(root: str | None, manifest: Manifest) -> str:
    """Return the folder where relative paths start: `root` (data.root, --root), or else the manifest's own folder.

    Raises UserError for a root that is not a folder, or lacks the first clip if the manifest's own folder has it.
    """
    beside = os.path.dirname(manifest.source)
    first = manifest.path(0)
    if root is None:
        return beside
    if os.path.exists(os.path.join(root, first)):
        return root
    what = f"the root must be the folder where the paths in {manifest.source} start, got {root}"
    if os.path.exists(os.path.join(beside, first)):
        raise UserError(f"{what}, which lacks {first}; it is in the manifest's own folder: try without a root")
    if not os.path.isdir(root) and not os.path.isabs(first):
        raise UserError(f"{what}: no such folder")
    return root
