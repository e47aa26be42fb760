"""The training or the validation set of a run, opened once: its list, and what reads its clips."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.core.own_parts import OwnPart
from summit_train.data.batches.loader import Batches, MicroBatch, TrainingClips
from summit_train.data.batches.order import Classes, Order
from summit_train.data.batches.spans import SpanStore
from summit_train.data.batches.stores import open_store
from summit_train.data.loading import Draw, Store
from summit_train.data.manifest import Manifest, read_manifest
from summit_train.data.manifest.overlap import Leaks, shared_clips
from summit_train.data.manifest.reading import check_same_classes
from summit_train.spec import DataSpec, Spec
from summit_train.spec.catalog import is_foreign


@dataclass(frozen=True, eq=False)
class Dataset:
    """The clips of a manifest, and the store that reads them.

    augment: the user's augmentations, of the training set. num_classes: of clips that may have several, see
    Manifest.class_labels.
    """

    data: DataSpec
    manifest: Manifest
    store: Store
    augment: tuple[OwnPart, ...] = ()
    num_classes: int | None = None

    @classmethod
    def open(cls, spec: Spec, which: str) -> Dataset:
        """Open data.train or data.val. Raises UserError if it is missing, wrong or damaged."""
        path = {"train": spec.data.train, "val": spec.data.val}[which]
        if not Path(path).exists():
            raise UserError(f"data.{which}: {path} not found (relative paths start at {Path.cwd()})")
        manifest = read_manifest(path, spec.data.region)
        manifest.check_labels(spec.model.num_classes)
        _check_boxes(manifest, spec, which)
        if spec.loss.base == "softmax" and (several := manifest.not_single()) is not None:
            key = "loss.like" if is_foreign(spec.loss.kind) else "loss.kind"
            raise UserError(f"{several}, but {key} softmax takes one per clip; set {key} to binary")
        store = open_store(spec.data, manifest)
        if which == "train" and manifest.boxes is not None and spec.data.span_frames is not None:
            store = SpanStore(store, spec.data.span_frames)
        augment = spec.data.open_augment() if which == "train" else ()
        return cls(spec.data, store.manifest, store, tuple(augment), spec.multi_label_classes)

    def __len__(self) -> int:
        return len(self.manifest)

    def shard(self, rank: int, ranks: int) -> NDArray[np.int64]:
        """Return the clips that a rank scores: rank, rank + ranks, ..."""
        return np.arange(rank, len(self), ranks)

    def training_batches(self, order: Order, rank: int, ranks: int, steps: range) -> Batches[MicroBatch]:
        """Return a rank's micro-batches of `steps`; see `TrainingClips.batches`."""
        return self._reader(order.seed).batches(self._balanced(order), rank, ranks, steps)

    def training_clips(self, order: Order, epoch: int) -> tuple[TrainingClips, dict[int, Draw]]:
        """Return the reader of single training clips, and the first draw of each clip in an epoch, from 0."""
        read = self._reader(order.seed)
        order = self._balanced(order)
        numbers = order.step_numbers_per_epoch or order.steps_per_epoch
        drawn: dict[int, Draw] = {}
        for step, gpu, _, clips in order.micro_batches(0, 1, range(epoch * numbers, (epoch + 1) * numbers)):
            for draw in read.draws((step, gpu, epoch, clips)):
                drawn.setdefault(draw[1], draw)
        return read, drawn

    def _reader(self, seed: int) -> TrainingClips:
        return TrainingClips(self.data, self.store, seed, self.augment, self.num_classes)

    def _balanced(self, order: Order) -> Order:
        return replace(order, classes=self._classes()) if self.data.balance == "classes" else order

    def _classes(self) -> Classes:
        """Return the clips of each class that has any; those of no class are one more."""
        clips, labels = self.manifest.label_pairs()
        without = np.flatnonzero(self.manifest.labels < 0)
        clips = np.concatenate([without, clips]).astype(np.int32)
        labels = np.concatenate([np.full(len(without), -1), labels])
        by_label = np.argsort(labels, kind="stable")
        starts = np.flatnonzero(np.diff(labels[by_label])) + 1
        return tuple(np.split(clips[by_label], starts))


def _check_boxes(manifest: Manifest, spec: Spec, which: str) -> None:
    """Raise UserError for a list that is not the task's, and for a training list without a box of some class."""
    if spec.task != "detection":
        if manifest.boxes is not None:
            what = f"{manifest.source} is a list with boxes"
            raise UserError(f"data.{which}: {what}; set task to detection, got {spec.task}")
        return
    from summit_train.tasks.detection.boxes import COLUMNS

    if manifest.boxes is None:
        what = f"task detection needs a list with boxes, {','.join(COLUMNS)}"
        raise UserError(f"data.{which}: {what}; {manifest.source} has none")
    if which == "train":
        manifest.boxes.check_training(spec.model.num_classes, manifest.class_names)


def open_datasets(spec: Spec) -> tuple[Dataset, Dataset]:
    """Open the training and the validation set. Raises UserError if one is wrong or they do not fit together."""
    train = Dataset.open(spec, "train")
    val = Dataset.open(spec, "val")
    check_same_classes(val.manifest.source, val.manifest.classes, train.manifest.source, train.manifest.classes)
    return train, val


def leaks(train: Dataset, val: Dataset) -> Leaks:
    """Return the pairs (training clip, validation clip) that show the same frames, and the shared groups."""
    pairs = shared_clips(train.manifest, val.manifest, (train.data.root, val.data.root))
    groups = {*train.manifest.group_names} & {*val.manifest.group_names}
    return Leaks(pairs, sorted(groups))
