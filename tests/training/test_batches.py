"""Which clips training gets."""

from __future__ import annotations

from pathlib import Path

from summit_train.core.comm import World
from summit_train.data.manifest import read_manifest
from summit_train.data.manifest.quarantine import kept_clips, write_quarantine
from summit_train.data.video.source import DecodeError
from summit_train.plan import make_plan
from summit_train.spec import load_spec
from summit_train.training.loop import batches_between
from tests.conftest import WriteSpec


def test_a_clip_in_quarantine_is_never_trained_on(write_spec: WriteSpec, tmp_path: Path) -> None:
    without = load_spec(write_spec())
    manifest = read_manifest(without.data.train)
    bad = [DecodeError(manifest.path(clip), "torn") for clip in range(0, 80, 2)]
    write_quarantine(tmp_path / "bad.csv", bad)
    spec = load_spec(write_spec(data={"quarantine": str(tmp_path / "bad.csv")}))
    plan = make_plan(spec, 1, len(kept_clips(spec.data, manifest)))
    assert plan.steps_per_epoch == 5
    with batches_between(spec, plan, World(), manifest, 0, 5) as batches:
        seen = [clip for batch in batches for clip in batch.ids.tolist()]
    assert sorted(seen) == list(range(1, 80, 2))
