"""The videos that a command names: files, folders, folders of pictures, manifests and packed sets."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

from summit_train.core.errors import UserError
from summit_train.core.text import listed
from summit_train.data.batches.loader import BadClip
from summit_train.data.batches.stores import file_store, open_store
from summit_train.data.dataset import Dataset
from summit_train.data.manifest import Manifest, read_manifest
from summit_train.data.manifest.clip import Clip
from summit_train.data.manifest.files import located_root, plain_manifest
from summit_train.data.manifest.reading import PACK_FILE, PACKING_FOLDER
from summit_train.data.manifest.tables import VIDEO_EXTENSIONS, clips_below, is_video, skipped_text
from summit_train.data.video.source import MISSING
from summit_train.inference.trained import Trained
from summit_train.spec import DataSpec

_HEAD_BYTES = 4096
Tell = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class VideoList(Dataset):
    """Videos that are read by one store.

    has_labels: the manifest's labels are numbers of the network's classes. root: where relative paths start.
    """

    has_labels: bool = False
    root: str = ""

    def message(self) -> dict[str, Any]:
        """Return plain values and arrays for the other ranks. Boxes are left out: no classifier reads them."""
        columns = {field.name: getattr(self.manifest, field.name) for field in fields(Manifest)}
        return {"manifest": columns | {"boxes": None}, "has_labels": self.has_labels, "root": self.root}

    @classmethod
    def of_message(cls, message: Mapping[str, Any], data: DataSpec) -> VideoList:
        """Open the list that another rank has sent."""
        manifest = Manifest(**message["manifest"])
        root = message["root"]
        store = open_store(data, manifest) if manifest.is_packed else file_store(data, manifest, root)
        return cls(data, manifest, store, has_labels=message["has_labels"], root=root)

    def clip(self, number: int) -> Clip:
        """Return the clip at this place of the manifest, with the path where it is."""
        return replace(self.manifest.clip(number), path=self.manifest.path(number))

    def reason(self, bad: BadClip) -> str:
        """Return why a clip cannot be read, with the name of the bad picture if it is a folder of them."""
        _, _, picture = bad.path.partition(f"{self.manifest.path(bad.clip)}{os.sep}")
        return f"{picture} {bad.reason}" if picture else bad.reason


def list_videos(words: Sequence[str], trained: Trained, tell: Tell, *, use_labels: bool = True) -> list[VideoList]:
    """Return the videos that `words` name, in their order.

    A folder is searched at any depth, except hidden entries; one with numbered pictures and no video is one clip. A
    text file without a video's extension is a manifest. Neighbouring files and folders share a VideoList. A manifest
    with other classes than the network's gets no labels. tell: takes a line about what is ignored. use_labels: False
    ignores labels and their classes. Raises UserError for a word that names nothing and for a bad manifest.
    """
    if not words:
        raise UserError("VIDEO is missing: name files, folders, manifests or packed sets")
    missing = [word for word in words if not os.path.exists(word)]
    if missing:
        raise UserError(f"{listed(missing)}: {MISSING}; name files, folders, manifests or packed sets")
    listings = list[VideoList]()
    if trained.spec.data.region is not None and (files := [word for word in words if not _is_list(word)]):
        right = "name a manifest with the columns left,top,width,height, or set data.region=null"
        raise UserError(f"{listed(files)}: the network was trained on regions of frames (data.region): {right}")
    for is_list, group in groupby(words, _is_list):
        if is_list:
            listings += [_listing(word, trained, tell, use_labels=use_labels) for word in group]
        else:
            manifest = plain_manifest([path for word in group for path in _files(word, tell)])
            data = trained.spec.data
            listings.append(VideoList(data, manifest, file_store(data, manifest, ""), has_labels=False))
    return listings


def _is_list(word: str) -> bool:
    if os.path.isdir(word):
        return os.path.isfile(os.path.join(word, PACK_FILE)) or os.path.isdir(os.path.join(word, PACKING_FOLDER))
    if is_video(os.path.basename(word)) or not os.path.isfile(word):  # reading a FIFO would wait for ever
        return False
    with open(word, "rb") as file:
        return b"\0" not in file.read(_HEAD_BYTES)


def _listing(word: str, trained: Trained, tell: Tell, *, use_labels: bool) -> VideoList:
    data = trained.spec.data
    manifest = read_manifest(word, data.region)
    differing = _differing(manifest, trained)
    if use_labels and differing:
        tell(f"{word}: its labels are not used: {differing}")
    root = "" if manifest.is_packed else located_root(data.root, manifest)
    has_labels = use_labels and not differing
    return VideoList(data, manifest, open_store(data, manifest), has_labels=has_labels, root=root)


def _differing(manifest: Manifest, trained: Trained) -> str:
    """Describe a difference between a manifest's classes and the network's; empty without one."""
    num_classes = trained.spec.model.num_classes
    largest = manifest.num_labels - 1
    if trained.spec.loss.base == "softmax" and (several := manifest.not_single()) is not None:
        return f"{several}, but the network was trained with one per clip"
    if manifest.classes is not None and len(manifest.classes) != num_classes:
        return f"it has {len(manifest.classes)} classes, the network {num_classes}"
    if manifest.classes is not None and trained.has_names:
        for label, (own, known) in enumerate(zip(manifest.classes, trained.classes, strict=True)):
            if own != known:
                return f"label {label} is {own!r} in it and {known!r} in the network"
    return f"it has a label {largest}, the network has {num_classes} classes" if largest >= num_classes else ""


def _files(word: str, tell: Tell) -> list[str]:
    """Return the videos that a file or folder names, sorted in each folder. Raises UserError for one without any."""
    if not os.path.isdir(word):
        return [word]
    others = Counter[str]()
    paths = clips_below(word, others)
    if not paths:
        raise UserError(f"{word}: no video in this folder: no {', '.join(VIDEO_EXTENSIONS)}, and no numbered pictures")
    for line in skipped_text(others):
        tell(f"{word}: {line}")
    return paths
