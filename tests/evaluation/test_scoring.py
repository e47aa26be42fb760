"""Scoring on a rank of two, whose ballots with the other one are written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from summit_train.core.comm import World
from summit_train.core.progress import watched
from summit_train.core.watch import Watchdog
from summit_train.data.manifest import read_manifest
from summit_train.data.manifest.quarantine import kept_clips
from summit_train.evaluation.scoring import Scorer
from summit_train.evaluation.so_far import SoFar
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


@pytest.mark.parametrize("known", [20, 19])
def test_a_rank_that_is_done_waits_as_long_as_the_others_work(write_spec: WriteSpec, known: int) -> None:
    """20 of the 41 videos are this rank's; an evaluation that was stopped has scored all of them, or all but one."""
    spec = load_spec(write_spec())
    kept = kept_clips(spec.data, read_manifest(spec.data.val))
    videos = kept.videos_of(1, 2).tolist()
    assert len(videos) == 20
    so_far = SoFar()
    so_far.add(videos[:known], [np.zeros(4)] * known, [])
    world = _Second([None, WORKS, None, WORKS, STANDS_IDLE])
    told = list[tuple[int, int, bool]]()

    def results(videos: Sequence[int]) -> Iterator[np.ndarray]:
        return iter([np.zeros(4)] * len(videos))

    with (
        Watchdog(World(), None) as watchdog,
        watched("videos", "evaluating video", world, watchdog) as progress,
    ):

        def note(done: int, total: int) -> None:
            progress(done, total)
            told.append((done, total, watchdog._waits))

        scorer = Scorer(spec, world, torch.device("cpu"))
        assert scorer.gathered(nn.Identity(), results, (4,), kept, note, so_far) is None
    # At the beginning, then after each round in which the other rank still works.
    assert told == [(20 - known, 20 - known, True)] * 3
