"""The videos that a command names: files, folders, folders of pictures, manifests and packed sets."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from summit_train.core.errors import UserError
from summit_train.core.text import listed
from summit_train.data.batches.loader import BadClip
from summit_train.data.batches.stores import file_store, open_store
from summit_train.data.dataset import Dataset
from summit_train.data.manifest import Manifest, read_manifest
from summit_train.data.manifest.clip import Clip
from summit_train.data.manifest.files import plain_manifest
from summit_train.data.manifest.folders import clips_below, skipped_text
from summit_train.data.manifest.reading import PACK_FILE, PACKING_FOLDER
from summit_train.data.manifest.tables import VIDEO_EXTENSIONS, is_video
from summit_train.data.video.source import MISSING
from summit_train.inference.trained import Trained

_HEAD_BYTES = 4096
Tell = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class VideoList(Dataset):
    """Videos that are read by one store. has_labels: the manifest's labels are numbers of the network's classes."""

    has_labels: bool = False

    def closed(self) -> VideoList:
        """Return what other ranks get: each opens a packed set itself."""
        return replace(self, store=None) if self.manifest.is_packed else self  # type: ignore[arg-type]

    def opened(self) -> VideoList:
        return self if self.store is not None else replace(self, store=open_store(self.data, self.manifest))

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
    return VideoList(data, manifest, open_store(data, manifest), has_labels=use_labels and not differing)


def _differing(manifest: Manifest, trained: Trained) -> str:
    """Return how a manifest's classes differ from the network's, nothing where they do not."""
    num_classes, largest = trained.spec.model.num_classes, manifest.num_labels - 1
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
