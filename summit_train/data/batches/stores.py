"""Where the clips of a manifest are read from: files or a packed set, pictures or flow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.data.manifest import Manifest
from summit_train.data.manifest.files import FileStore, located_root
from summit_train.data.packed.read import ShardStore, staged_folder
from summit_train.data.video.augment import mirrored_x
from summit_train.data.video.clips import Choose, Decoded, Frames, ViewsOf, holds_flow, read_array_views
from summit_train.data.video.decode import Playback
from summit_train.data.video.source import RAISE_SECONDS, Limits
from summit_train.spec import DataSpec

_MAKE_FLOW = "make its flow with `summit-train data flow`, and name that instead"


class Store(Protocol):
    """The clips of a manifest. It is pickled to the loader's workers, so it opens files where it reads."""

    @property
    def manifest(self) -> Manifest:
        """The list of the clips."""

    def read_views(self, clip: int, choose: Choose, views_of: ViewsOf, playback: Playback | None = None) -> Decoded:
        """Read K clips in C views, uint8 (K * C, T, height, width, channels), as `clips.read_views` does."""


@dataclass(frozen=True)
class FlowStore:
    """Clips of flow: each frame stacks `length` consecutive fields, channels x, y, x, y, ... (see Store).

    A frame may start at each field with dense sampling, and the last field repeats; with uniform sampling wherever all
    of the frame is in the video. Source: the TSM authors' code (ops/dataset.py). In a mirrored view x changes its sign.
    pictures: the store of the fields' pictures, whose `choose` gives numbers of pictures for a number of fields:
    picture 2 t has the x component of field t, picture 2 t + 1 the y component.
    """

    pictures: Store
    length: int
    sampling: str

    @property
    def manifest(self) -> Manifest:
        return self.pictures.manifest

    def _num_starts(self, num_fields: int) -> int:
        """Return the number of places where a frame may start."""
        return num_fields if self.sampling == "dense" else max(1, num_fields - self.length + 1)

    def read_views(self, clip: int, choose: Choose, views_of: ViewsOf, playback: Playback | None = None) -> Decoded:
        """Read K clips in C views: uint8 (K * C, T, height, width, 2 * length)."""

        def chosen(num_fields: int) -> NDArray[np.int64]:
            starts = choose(self._num_starts(num_fields))  # (K, T)
            fields = np.minimum(starts[..., None] + np.arange(self.length, dtype=np.int64), num_fields - 1)
            return np.stack([2 * fields, 2 * fields + 1], -1).reshape(len(starts), -1)

        read = self.pictures.read_views(clip, chosen, views_of, playback)
        grey, channels = read.views[..., 0], 2 * self.length
        frames = grey.reshape(len(grey), -1, channels, *grey.shape[2:])
        for number, view in enumerate(read.crops):
            if view.flip:
                mirrored = frames[number :: len(read.crops), :, ::2]
                mirrored[:] = mirrored_x(mirrored)
        stacked = np.ascontiguousarray(np.moveaxis(frames, 2, -1))
        starts = read.frames[:, ::channels] // 2
        return Decoded(stacked, self._num_starts(read.num_frames), read.size, starts, read.crops)


@dataclass(frozen=True)
class ArrayStore:
    """One video in memory: RGB frames, uint8 (F, height, width, 3) (see Store)."""

    manifest: Manifest
    frames: Frames

    def read_views(self, clip: int, choose: Choose, views_of: ViewsOf, playback: Playback | None = None) -> Decoded:
        return read_array_views(self.frames, choose, views_of)


def open_store(data: DataSpec, manifest: Manifest) -> Store:
    """Return the store of a manifest's clips. Raises UserError for a damaged packed set and for another modality."""
    is_flow = data.modality == "flow"
    if manifest.is_packed:
        local = None if data.stage in (None, "auto") else staged_folder(data.stage, manifest.source)
        shards = ShardStore(manifest, local, Limits(seconds=data.clip_seconds, way_out=RAISE_SECONDS))
        every, modality, place = shards.pack.packing.every, shards.pack.packing.modality, f"{manifest.source}:"
        found = "" if modality == data.modality else f"holds {modality}"
        if (cut := shards.pack.packing.region) != data.region:
            right = "set data.region=columns" if cut else "pack the clips again, with --region columns"
            has = "regions of frames" if cut else "whole frames"
            raise UserError(f"{place} holds {has}, and data.region is {data.region or 'null'}: {right}")
        if data.sampling == "dense" and data.frame_stride % every:
            wrong = f"has one frame in {every}, and data.frame_stride is {data.frame_stride}"
            raise UserError(f"{place} {wrong}: must be a multiple of {every}")
        store: Store = FlowStore(shards, data.flow_length, data.sampling) if is_flow else shards
    else:
        root = located_root(data.root, manifest)
        first = os.path.join(root, manifest.path(0))
        place = f"{manifest.place(0)}: {first}"
        if is_flow and manifest.has_spans:
            raise UserError(f"{manifest.source}: has clips that are spans of videos; {_MAKE_FLOW}")
        found = "is a video" if is_flow and os.path.isfile(first) else ""
        if not is_flow and os.path.isdir(first) and holds_flow(first):
            found = "holds flow"
        store = file_store(data, manifest, root)
    if found:
        hint = _MAKE_FLOW if is_flow else "name the videos' own set, or set data.modality=flow"
        raise UserError(f"{place} {found}, and data.modality is {data.modality}: {hint}")
    if is_flow and (reason := manifest.no_flow()) is not None:
        raise UserError(f"{reason}; reverse the videos first, then compute their flow")
    return store


def file_store(data: DataSpec, manifest: Manifest, root: str) -> Store:
    """Return the store of a manifest's files and folders, without looking at them."""
    is_flow = data.modality == "flow"
    store = FileStore(manifest, root, Limits(seconds=data.clip_seconds, way_out=RAISE_SECONDS), is_flow)
    return FlowStore(store, data.flow_length, data.sampling) if is_flow else store
