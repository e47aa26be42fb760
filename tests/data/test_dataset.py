"""A data set without its quarantined clips: what training gets, and what each rank scores."""

from __future__ import annotations

from pathlib import Path

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
