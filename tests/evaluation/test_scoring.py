"""Scoring on one rank of two, whose votes with the other one are given; the file of a stopped evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from summit_train.core.comm import World
from summit_train.core.progress import watched
from summit_train.core.watch import Watchdog
from summit_train.data.batches.loader import BadClip
from summit_train.data.dataset import Dataset
from summit_train.evaluation.scoring import PartialScores, Results, Scorer
from summit_train.spec import load_spec
from tests.conftest import WriteSpec

STANDS_IDLE, WORKS = [0, 0], [0, 1]


class _Second(World):
    """Rank 1 of 2, in a world whose next votes are known; None: the other rank has not voted yet."""

    rank, size = 1, 2

    def __init__(self, votes: list[list[int] | None]) -> None:
        super().__init__()
        self._votes = votes

    def start_sum(self, numbers: Any) -> Callable[[], list[int] | None]:
        return lambda: self._votes.pop(0)

    def gather(self, value: Any) -> None:
        return None


@pytest.mark.parametrize("known", [5, 4])
def test_a_rank_that_is_done_waits_as_long_as_the_others_work(write_spec: WriteSpec, known: int) -> None:
    """5 of the 11 videos are this rank's; an evaluation that was stopped has scored all of them, or all but one."""
    spec = load_spec(write_spec())
    dataset, partial = Dataset.open(spec, "val"), PartialScores()
    videos = dataset.shard(1, 2).tolist()
    assert len(videos) == 5
    partial.add(videos[:known], [np.zeros(4)] * known, [])
    world = _Second([None, WORKS, None, WORKS, STANDS_IDLE])
    told = list[tuple[int, int, bool]]()

    class Zeros(Scorer):
        def results(self, model: nn.Module, videos: Sequence[int]) -> Results:
            yield from [np.zeros(4)] * len(videos)

    with Watchdog(World(), None) as watchdog, watched("videos", "evaluating video", world, watchdog) as progress:

        def note(done: int, total: int) -> None:
            progress(done, total)
            told.append((done, total, watchdog._waits))

        scorer = Zeros(spec, dataset, world, torch.device("cpu"))
        assert scorer.score(nn.Identity(), note, earlier=partial) is None
    # At the beginning, then after each round in which the other rank still works.
    assert told == [(5 - known, 5 - known, True)] * 3


BAD = BadClip(7, "seven.mp4", "is cut", None)


def test_kept_results_come_back_to_the_bit_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "step_00000010.partial"
    kept = PartialScores(path, "views")
    kept.save()
    assert not path.exists()
    kept.add([4, 7], [np.array([1 / 3, 1e300]), np.full(2, np.nan)], [BAD])
    kept.save()
    found = PartialScores(path, "views")
    assert list(found.results) == [4, 7] and found.bad == [BAD]
    assert all(np.array_equal(found.results[video], kept.results[video], equal_nan=True) for video in (4, 7))
    assert PartialScores(path, "other views").results == {}
    for content in (path.read_bytes()[:-100], b"", b"no zip file at all"):
        path.write_bytes(content)
        assert PartialScores(path, "views").results == {}
