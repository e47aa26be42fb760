"""Augmentations of the user's own: keyed draws, one call for all frames of a clip, and checked in every process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summit_train.core.errors import UserError
from summit_train.data.batches.loader import MicroBatch
from summit_train.data.manifest import Manifest
from tests.data.batches.conftest import data_spec, open_batches

# Writes its draw into the first pixels of all frames, one place further for each augmentation.
AUGMENT = """
def mark(clip, generator, place=0):
    clip[:, 0, place] = generator.integers(1, 256)
    return clip

def late(clip, generator):
    return clip[1:] if clip.mean() > 0 else clip
"""


def _own(tmp_path: Path, *items: dict[str, Any] | str, first: str = "scale_jitter") -> list[Any]:
    (tmp_path / "own.py").write_text(AUGMENT)
    named = [item if isinstance(item, dict) else {"kind": item, "options": {}} for item in items]
    return [{"kind": first}, *({**item, "kind": f"{tmp_path}/own.py:{item['kind']}"} for item in named)]


def _marks(batch: MicroBatch) -> np.ndarray[Any, Any]:
    """The draws of the two augmentations of each clip."""
    marks = batch.clips[:, :, 0, :2, 0].numpy()
    assert (marks == marks[:, :1]).all(), "all frames of a clip have one draw"
    return np.asarray(marks[:, 0])


@pytest.fixture
def two(tmp_path: Path) -> list[Any]:
    return _own(tmp_path, "mark", {"kind": "mark", "options": {"place": 1}})


def test_draws_are_a_function_of_epoch_and_clip_on_any_rank_and_worker(manifest: Manifest, two: list[Any]) -> None:
    found: list[dict[Any, list[int]]] = []
    for ranks, workers in ((1, 0), (2, 0), (2, 1)):
        drawn: dict[Any, list[int]] = {}
        for rank in range(ranks):
            with open_batches(manifest, data_spec(workers, augment=two), rank=rank, ranks=ranks) as batches:
                for batch in batches:
                    marks = zip(batch.ids.tolist(), _marks(batch).tolist(), strict=True)
                    drawn |= {(batch.step, clip): row for clip, row in marks}
        found.append(drawn)
    assert found[0] == found[1] == found[2]
    # One draw each of 20 clips and two augmentations: some are equal by chance.
    first, second = zip(*found[0].values(), strict=True)
    assert len(set(first)) > 10 and len(set(second)) > 10 and sum(map(int.__eq__, first, second)) < 5


def test_they_follow_the_built_in_one_and_change_none_of_its_draws(manifest: Manifest, two: list[Any]) -> None:
    for first in ("scale_jitter", "multi_scale_crop", "rand_augment"):
        plain, own = data_spec(augment=first), data_spec(augment=[{"kind": first}, *two[1:]])
        with open_batches(manifest, plain, end_step=1) as one, open_batches(manifest, own, end_step=1) as other:
            for batch, varied in zip(one, other, strict=True):
                assert np.array_equal(batch.clips[:, :, 1:], varied.clips[:, :, 1:])
                assert (batch.clips[:, :, 0, :2, 0] != varied.clips[:, :, 0, :2, 0]).any()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wrong_clip_is_named_in_one_line(manifest: Manifest, tmp_path: Path, workers: int) -> None:
    data, message = data_spec(workers, augment=_own(tmp_path, "late")), r"^data\.augment: .*late must return .*, got ui"
    with open_batches(manifest, data) as batches, pytest.raises(UserError, match=message) as raised:
        next(batches)
    assert "\n" not in str(raised.value)
