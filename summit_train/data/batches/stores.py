"""Where the clips of a manifest are read from: files or a packed set, pictures or flow."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from summit_train.core.errors import UserError
from summit_train.data.loading import Store
from summit_train.data.manifest import Manifest
from summit_train.data.manifest.files import FileStore, located_root
from summit_train.data.packed.read import ShardStore, staged_folder
from summit_train.data.video.augment import View, mirrored_x
from summit_train.data.video.clips import ArrayClip, DerivedClip, Numbers
from summit_train.data.video.pictures import holds_flow
from summit_train.data.video.render import Frames
from summit_train.data.video.source import RAISE_SECONDS, Limits
from summit_train.spec import DataSpec

_MAKE_FLOW = "make its flow with `summit-train data flow`, and name that instead"


@dataclass(frozen=True)
class FlowClip(DerivedClip):
    """A clip of flow: each frame stacks `length` consecutive fields, channels x, y, x, y, ...

    A frame may start at each field with dense sampling, and the last field repeats; with uniform sampling wherever all
    of the frame is in the video. Source: the TSM authors' code (ops/dataset.py). In a mirrored view x changes its sign.
    video: grey pictures, of which 2 t has the x component of field t, and 2 t + 1 the y component.
    """

    length: int
    sampling: str

    @property
    def num_frames(self) -> int:
        """The number of places where a frame may start."""
        num_fields = self.video.num_frames // 2
        return num_fields if self.sampling == "dense" else max(1, num_fields - self.length + 1)

    def read(self, frames: Numbers, views: Sequence[View]) -> Frames:
        """Read K clips in C views: uint8 (K * C, T, height, width, 2 * length)."""
        grey = super().read(frames, views)[..., 0]
        stacked = grey.reshape(len(grey), -1, 2 * self.length, *grey.shape[2:])
        for number, view in enumerate(views):
            if view.flip:
                across = stacked[number :: len(views), :, ::2]
                across[:] = mirrored_x(across)
        return np.ascontiguousarray(np.moveaxis(stacked, 2, -1))

    def _in_video(self, frames: Numbers) -> Numbers:
        """Return the pictures (K, 2 * length * T) of frames (K, T)."""
        last = self.video.num_frames // 2 - 1
        fields = np.minimum(frames[..., None] + np.arange(self.length, dtype=np.int64), last)
        return np.stack([2 * fields, 2 * fields + 1], -1).reshape(len(frames), -1)


@dataclass(frozen=True)
class FlowStore:
    """Clips of flow, stacked of the pictures that another store has (see FlowClip)."""

    pictures: Store
    length: int
    sampling: str

    @property
    def manifest(self) -> Manifest:
        return self.pictures.manifest

    def open(self, clip: int) -> FlowClip:
        return FlowClip(self.pictures.open(clip), self.length, self.sampling)


@dataclass(frozen=True)
class ArrayStore:
    """One video in memory: RGB frames, uint8 (F, height, width, 3)."""

    manifest: Manifest
    frames: Frames

    def open(self, clip: int) -> ArrayClip:
        return ArrayClip(self.frames)


def open_store(data: DataSpec, manifest: Manifest) -> Store:
    """Return the store of a manifest's clips. Raises UserError for a damaged packed set and for another modality."""
    is_flow = data.modality == "flow"
    if manifest.is_packed:
        local = None if data.stage in (None, "auto") else staged_folder(data.stage, manifest.source)
        shards = ShardStore(manifest, local, Limits(seconds=data.clip_seconds, way_out=RAISE_SECONDS))
        every = shards.pack.packing.every
        modality = shards.pack.packing.modality
        place = f"{manifest.source}:"
        wrong = "" if modality == data.modality else f"holds {modality}"
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
        wrong = "is a video" if is_flow and os.path.isfile(first) else ""
        if not is_flow and os.path.isdir(first) and holds_flow(first):
            wrong = "holds flow"
        store = file_store(data, manifest, root)
    if wrong:
        hint = _MAKE_FLOW if is_flow else "name the videos' own set, or set data.modality=flow"
        raise UserError(f"{place} {wrong}, and data.modality is {data.modality}: {hint}")
    if is_flow and (reason := manifest.no_flow()) is not None:
        raise UserError(f"{reason}; reverse the videos first, then compute their flow")
    return store


def file_store(data: DataSpec, manifest: Manifest, root: str) -> Store:
    """Return the store of a manifest's files and folders, without looking at them."""
    is_flow = data.modality == "flow"
    store = FileStore(manifest, root, Limits(seconds=data.clip_seconds, way_out=RAISE_SECONDS), is_flow)
    return FlowStore(store, data.flow_length, data.sampling) if is_flow else store
