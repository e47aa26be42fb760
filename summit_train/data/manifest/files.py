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
from summit_train.data.video.clips import OpenClip, PartClip, VideoClip, open_folder
from summit_train.data.video.films import Films
from summit_train.data.video.pictures import holds_pictures
from summit_train.data.video.source import LIMITS, Limits


@dataclass(frozen=True)
class FileStore:
    """Each clip is a video file or a folder of pictures; relative paths start at `root` (see loading.Store).

    A file must match the manifest's SHA-256: a codec often decodes changed bytes without an error.
    is_flow: each clip is a folder of pictures of flow, see `clips.open_folder`.
    """

    manifest: Manifest
    root: str
    limits: Limits = LIMITS
    is_flow: bool = False

    @cached_property
    def films(self) -> Films:
        """The checks and indexes of films of this process."""
        return Films()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.manifest, self.root, self.limits, self.is_flow)  # a copy makes its own checks

    def path(self, clip: int) -> str:
        return os.path.join(self.root, self.manifest.path(clip))

    def open(self, clip: int) -> OpenClip:
        listed = self.manifest.clip(clip)
        path = self.path(clip)
        num_frames = self.manifest.num_frames(clip)
        opened: OpenClip
        if self.is_flow or holds_pictures(path):
            opened = open_folder(path, num_frames, self.limits, is_flow=self.is_flow)
        else:
            sha256 = self.manifest.sha256(clip)  # which `data index` writes
            video = self.films.load(path, sha256, num_frames, self.limits)
            opened = VideoClip(video, num_frames, self.limits, is_checked=sha256 is not None)
        return PartClip(opened, listed.span, path, listed.region, self.manifest.place(clip))


def plain_manifest(paths: Sequence[str]) -> Manifest:
    """Return a list of videos of which only the path is known. Their labels are -1."""
    cells = {"path": paths, "label": ["0"] * len(paths)}
    columns: dict[str, Any] = parse_tables(Path(), [([0] * len(paths), cells)], None)
    return replace(Manifest("", "", None, **columns), labels=np.full(len(paths), -1, np.int32))


def located_root(root: str | None, manifest: Manifest) -> str:
    """Return the folder where relative paths start: `root` (data.root, --root), or else the manifest's own folder.

    Raises UserError for a root that is not a folder, or lacks the first clip if the manifest's own folder has it.
    """
    list_folder = os.path.dirname(manifest.source)
    first = manifest.path(0)
    if root is None:
        return list_folder
    if os.path.exists(os.path.join(root, first)):
        return root
    what = f"the root must be the folder where the paths in {manifest.source} start, got {root}"
    if os.path.exists(os.path.join(list_folder, first)):
        raise UserError(f"{what}, which lacks {first}; try without a root: the manifest's own folder has it")
    if not os.path.isdir(root) and not os.path.isabs(first):
        raise UserError(f"{what}: no such folder")
    return root
