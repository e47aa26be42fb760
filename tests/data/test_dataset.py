"""A data set: what training gets, and what each rank scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from summit_train.core.errors import UserError
from summit_train.data.dataset import Dataset
from summit_train.plan import make_plan
from summit_train.spec import load_spec
from tests.conftest import WriteSpec


def test_ranks_share_the_clips_that_are_scored(write_spec: WriteSpec) -> None:
    dataset = Dataset.open(load_spec(write_spec()), "val")
    shards = [dataset.shard(rank, 3).tolist() for rank in range(3)]
    assert shards == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]


LABELS = ("0", "0;2", ";", "1", "2", "0;1;2")


def _several(write_spec: WriteSpec, motion_set: Path, folder: Path, **sections: object) -> Path:
    """A spec of six clips of three classes."""
    rows = [row.split(",")[0] for row in (motion_set / "train.csv").read_text().splitlines()[1:7]]
    (folder / "list.csv").write_text("path,label\n" + "".join(f"{a},{b}\n" for a, b in zip(rows, LABELS, strict=True)))
    data = {"train": str(folder / "list.csv"), "val": str(folder / "list.csv"), "root": str(motion_set)}
    return write_spec(data=data, model={"num_classes": 3}, scale={"gpus": 1, "clips_per_gpu": 6}, **sections)


def test_several_labels_need_the_binary_loss(write_spec: WriteSpec, motion_set: Path, tmp_path: Path) -> None:
    path = _several(write_spec, motion_set, tmp_path)
    with pytest.raises(UserError) as raised:
        Dataset.open(load_spec(path), "train")
    what = f"{tmp_path}/list.csv:4: has no labels, but loss.kind softmax takes one per clip; set loss.kind to binary"
    assert str(raised.value) == what
    assert len(Dataset.open(load_spec(path, ["loss.kind=binary"]), "train")) == 6
    single = load_spec(write_spec(loss={"kind": "binary"}))  # one label each is fine
    assert len(Dataset.open(single, "train")) == 80


def test_several_labels_reach_the_batch_and_balanced_classes_share_it(
    write_spec: WriteSpec, motion_set: Path, tmp_path: Path
) -> None:
    """Four classes with that of no label, six clips: one or two of each."""
    path = _several(write_spec, motion_set, tmp_path, loss={"kind": "binary"})
    for balance in ("none", "classes"):
        spec = load_spec(path, [f"data.balance={balance}"])
        dataset = Dataset.open(spec, "train")
        plan = make_plan(spec, 1, len(dataset))
        with dataset.training_batches(plan.order(), 0, 1, range(20)) as batches:
            found = list(batches)
        for batch in found:
            assert batch.labels.shape == (6, 3) and batch.labels.dtype == torch.bool
            rows = [np.flatnonzero(row).tolist() for row in batch.labels.numpy()]
            assert rows == [[int(label) for label in LABELS[clip].split(";") if label] for clip in batch.ids.tolist()]
        ids = [clip for batch in found for clip in batch.ids.tolist()]
        if balance == "none":
            assert sorted(ids) == sorted([*range(6)] * 20)
        else:
            # 30 draws of each class: of no label clip 2 alone, of class 1 clips 3 and 5, which 0 and 2 share, too.
            assert len(ids) == 120 and 24 <= ids.count(2) <= 36
            assert 10 <= ids.count(3) <= 20 and 25 <= ids.count(5) <= 45
            assert sum(ids.count(clip) for clip in (0, 1, 4)) <= 50  # 60 where each clip is as likely
