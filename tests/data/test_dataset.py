"""A data set without its quarantined clips: what training gets, and what each rank scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from summit_train.core.errors import UserError
from summit_train.data.dataset import Dataset
from summit_train.data.manifest.quarantine import write_quarantine
from summit_train.data.video.source import DecodeError
from summit_train.plan import make_plan
from summit_train.spec import load_spec
from tests.conftest import WriteSpec


def test_a_clip_in_quarantine_is_never_trained_on(write_spec: WriteSpec, tmp_path: Path) -> None:
    manifest = Dataset.open(load_spec(write_spec()), "train").manifest
    write_quarantine(tmp_path / "bad.csv", [DecodeError(manifest.path(clip), "torn") for clip in range(0, 80, 2)])
    spec = load_spec(write_spec(data={"quarantine": str(tmp_path / "bad.csv")}))
    dataset = Dataset.open(spec, "train")
    plan = make_plan(spec, 1, len(dataset))
    assert plan.steps_per_epoch == 5 and dataset.clips.tolist() == list(range(1, 80, 2))
    with dataset.training_batches(plan.order(), 0, 1, range(5)) as batches:
        seen = [clip for batch in batches for clip in batch.ids.tolist()]
    assert sorted(seen) == list(range(1, 80, 2))
    assert [dataset.shard(rank, 3).tolist()[:2] for rank in range(3)] == [[1, 7], [3, 9], [5, 11]]


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
    """Four classes with that of no label, six clips: one or two of each; those in quarantine are never drawn."""
    path = _several(write_spec, motion_set, tmp_path, loss={"kind": "binary"})
    write_quarantine(tmp_path / "bad.csv", [DecodeError(Dataset.open(load_spec(path), "val").manifest.path(5), "torn")])
    for balance, num_clips in (("none", 6), ("classes", 5)):
        words = [f"data.balance={balance}", f"scale.clips_per_gpu={num_clips}"]
        words += [f"data.quarantine={tmp_path / 'bad.csv'}"] if balance == "classes" else []
        spec = load_spec(path, words)
        dataset = Dataset.open(spec, "train")
        plan = make_plan(spec, 1, len(dataset))
        with dataset.training_batches(plan.order(), 0, 1, range(20)) as batches:
            found = list(batches)
        for batch in found:
            assert batch.labels.shape == (num_clips, 3) and batch.labels.dtype == torch.bool
            rows = [np.flatnonzero(row).tolist() for row in batch.labels.numpy()]
            assert rows == [[int(label) for label in LABELS[clip].split(";") if label] for clip in batch.ids.tolist()]
        ids = [clip for batch in found for clip in batch.ids.tolist()]
        if balance == "none":
            assert sorted(ids) == sorted([*range(6)] * 20)
        else:
            # 25 draws of each class: of no label 2 alone, of class 1 clip 3 alone, 0 and 2 share clip 1.
            assert 5 not in ids and len(ids) == 100
            assert all(20 <= ids.count(clip) <= 40 for clip in (2, 3)), ids
            assert 40 <= sum(ids.count(clip) for clip in (0, 1, 4)) <= 60
