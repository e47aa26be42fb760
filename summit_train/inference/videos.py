"""The videos that a command names: files, folders, folders of pictures, manifests and packed sets."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from summit_train.core.errors import UserError
from summit_train.core.text import counted, listed
from summit_train.data.batches.loader import BadClip
from summit_train.data.batches.stores import Store, file_store, open_store
from summit_train.data.manifest import Manifest, read_manifest
from summit_train.data.manifest.clip import Clip
from summit_train.data.manifest.files import plain_manifest
from summit_train.data.manifest.quarantine import Kept, kept_clips
from summit_train.data.manifest.reading import PACK_FILE, PACKING_FOLDER
from summit_train.data.manifest.tables import VIDEO_EXTENSIONS, is_video
from summit_train.data.video.clips import is_picture
from summit_train.data.video.source import MISSING
from summit_train.spec import DataSpec, Spec

_HEAD_BYTES = 4096


@dataclass(frozen=True)
class Listing:
    """The videos that one store reads. kept: those that are used.

    has_labels: the manifest's labels are numbers of the network's classes.
    """

    manifest: Manifest
    kept: Kept
    has_labels: bool

    def store(self, data: DataSpec) -> Store:
        """Return the store that reads them."""
        if self.manifest.source:
            return open_store(data, self.manifest)
        return file_store(data, self.manifest, "")

    @property
    def numbers(self) -> list[int]:
        """Return the places in the manifest of the clips that are used."""
        numbers: list[int] = self.kept.ids(np.arange(len(self.kept))).tolist()
        return numbers

    def clip(self, number: int) -> Clip:
        """Return the clip at this place of the manifest."""
        manifest = self.manifest
        return Clip(manifest.path(number), manifest.span(number), manifest.is_reversed(number))

    def reason(self, bad: BadClip) -> str:
        """Return why a clip cannot be read, with the name of the picture in its folder where that is bad."""
        _, _, picture = bad.path.partition(f"{self.manifest.path(bad.clip)}{os.sep}")
        return f"{picture} {bad.reason}" if picture else bad.reason


def list_named(
    words: Sequence[str], spec: Spec, classes: Sequence[str] | None = None, *, use_labels: bool = True
) -> tuple[tuple[Listing, ...], tuple[str, ...]]:
    """Return the videos that `words` name, in their order, and notes about them, a line each.

    A folder is searched at any depth, hidden entries apart; one with numbered pictures and no video is one clip. A file
    without a video's extension is a manifest where it is text. Neighbouring files and folders share a Listing. classes:
    the names of the network's classes, if they are known: a manifest with others has no labels here. use_labels: else
    no list has labels, and no note is about them. Raises UserError for a word that names nothing and for a
    list that is wrong.
    """
    missing = [word for word in words if not os.path.exists(word)]
    if missing:
        raise UserError(f"{listed(missing)}: {MISSING}; name files, folders, manifests or packed sets")
    listings: list[Listing] = []
    notes: list[str] = []
    for is_list, group in groupby(words, _is_list):
        if is_list:
            for word in group:
                listings.append(_listing(word, spec, classes, notes, use_labels=use_labels))
        else:
            manifest = plain_manifest([path for word in group for path in _paths(word, notes)])
            listings.append(Listing(manifest, Kept(len(manifest), np.zeros(0, np.int64)), has_labels=False))
    return tuple(listings), tuple(notes)


def _is_list(word: str) -> bool:
    if os.path.isdir(word):
        return os.path.isfile(os.path.join(word, PACK_FILE)) or os.path.isdir(os.path.join(word, PACKING_FOLDER))
    if is_video(os.path.basename(word)) or not os.path.isfile(word):  # reading a FIFO would wait for ever
        return False
    with open(word, "rb") as file:
        return b"\0" not in file.read(_HEAD_BYTES)


def _listing(word: str, spec: Spec, classes: Sequence[str] | None, notes: list[str], *, use_labels: bool) -> Listing:
    manifest, data = read_manifest(word), spec.data
    if data.quarantine is not None and not Path(data.quarantine).exists():
        notes.append(f"{word}: the list {data.quarantine} (data.quarantine) is not there, so nothing is left out")
        data = data.model_copy(update={"quarantine": None})
    kept = kept_clips(data, manifest)
    if len(kept.excluded):
        notes.append(f"{word}: {counted(len(kept.excluded), 'video')} left out, by {data.quarantine}")
    differing = _differing(manifest, spec.model.num_classes, classes)
    if use_labels and differing:
        notes.append(f"{word}: its labels are not used: {differing}")
    return Listing(manifest, kept, has_labels=use_labels and not differing)


def _differing(manifest: Manifest, num_classes: int, classes: Sequence[str] | None) -> str:
    """Return how a manifest's classes differ from the network's, nothing where they do not."""
    if manifest.classes is not None and len(manifest.classes) != num_classes:
        return f"it has {len(manifest.classes)} classes, the network {num_classes}"
    if manifest.classes is not None and classes is not None and manifest.classes != tuple(classes):
        pairs = zip(manifest.classes, classes, strict=True)
        label, (ours, theirs) = next((label, pair) for label, pair in enumerate(pairs) if pair[0] != pair[1])
        return f"label {label} is {ours!r} there and {theirs!r} in the network"
    largest = int(manifest.labels.max())
    return f"there is a label {largest}, the network has {num_classes} classes" if largest >= num_classes else ""


def _paths(word: str, notes: list[str]) -> list[str]:
    """Return the videos that a file or folder names. Raises UserError for a folder without any."""
    if not os.path.isdir(word):
        return [word]
    others: Counter[str] = Counter()
    paths = list(_found(word, others))
    if not paths:
        raise UserError(f"{word}: no video in this folder: no {', '.join(VIDEO_EXTENSIONS)}, and no numbered pictures")
    if others:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(others.items()))
        notes.append(f"{word}: no videos by their names: {kinds}")
    return paths


def _found(top: str, others: Counter[str]) -> Iterator[str]:
    """Yield the videos below a folder, sorted in each folder; count the other files by their extensions."""
    for folder, below, files in os.walk(top):
        below[:] = sorted(name for name in below if not name.startswith("."))
        seen = sorted(name for name in files if not name.startswith("."))
        videos = [os.path.join(folder, name) for name in seen if is_video(name)]
        pictures = [name for name in seen if is_picture(name)]
        yield from videos or ([folder] if pictures else [])
        left = [name for name in seen if not (is_video(name) or (is_picture(name) and not videos))]
        others.update(os.path.splitext(name)[1].lower() or "without an extension" for name in left)
