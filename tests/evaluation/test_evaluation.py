"""Accuracies worked out by hand, and evaluation of a real data set."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from summit_train.core.comm import World
from summit_train.core.errors import AgreedError
from summit_train.core.watch import Stopped, StopRequest
from summit_train.data.batches.loader import BadClip
from summit_train.data.dataset import Dataset
from summit_train.data.video.source import DecodeError
from summit_train.evaluation.evaluation import summarise
from summit_train.evaluation.scores import Scores
from summit_train.evaluation.scoring import PartialScores, Results, Scorer
from summit_train.models.network import initial_network
from summit_train.spec import Spec, load_spec
from tests.conftest import WriteSpec


def test_mean_and_deviation_are_those_of_a_sample(write_spec: WriteSpec) -> None:
    rows = [{"path": "a", "step": 1, "top1": 70.0, "top5": 90.0}, {"path": "b", "step": 2, "top1": 74.0, "top5": 92.0}]
    result = summarise(rows, load_spec(write_spec()), 101)
    assert (result["top1_mean"], result["top1_std"], result["top5_mean"]) == (72.0, pytest.approx(8**0.5), 91.0)
    assert (result["videos"], result["clips"], result["crops"], result["checkpoints"]) == (101, 1, 1, rows)
    one = summarise(rows[:1], load_spec(write_spec()), 101)
    assert (one["top1_mean"], one["top1_std"], one["top5_std"]) == (70.0, None, None), "one has no deviation"


def _scorer(spec: Spec, world: World | None = None, stop: StopRequest | None = None) -> Scorer:
    stop = StopRequest() if stop is None else stop  # one that is not set is false
    return Scorer(spec, Dataset.open(spec, "val"), world or World(), torch.device("cpu"), stop)


def test_a_videos_score_is_the_mean_over_its_views_and_depends_on_no_other(write_spec: WriteSpec) -> None:
    spec = load_spec(write_spec(evaluate={"clips": 3, "crops": 3, "short_side": 32}))
    model = initial_network(spec, torch.device("cpu"))
    model.train()
    whole = _scorer(spec).score(model)
    assert whole is not None and model.training
    assert whole.scores.shape == (11, 4) and np.isfinite(whole.scores).all()
    second = World()
    second.rank, second.size = 1, 2
    sent = list[tuple[list[int], list[np.ndarray], list[BadClip]]]()  # what rank 1 of 2 sends to rank 0
    second.gather = sent.append  # type: ignore[method-assign, assignment]
    done: list[tuple[int, int]] = []
    assert _scorer(spec, second).score(model, lambda *progress: done.append(progress)) is None
    assert done == [(number, 5) for number in range(1, 6)]
    ((videos, scores, bad),) = sent
    assert videos == list(range(1, 11, 2)) and bad == []
    for video, score in zip(videos, scores, strict=True):
        assert np.array_equal(score.astype(np.float32), whole.scores[video])


def test_a_video_that_cannot_be_read_is_named(write_spec: WriteSpec, tmp_path: Path, motion_set: Path) -> None:
    (tmp_path / "val.csv").write_text("path,label\ngone.mp4,0\n")
    spec = load_spec(write_spec(data={"val": str(tmp_path / "val.csv")}))
    with pytest.raises(DecodeError, match=r"gone\.mp4"):
        _scorer(spec).score(initial_network(spec, torch.device("cpu")))


def test_parts_of_a_training_steps_pixels_score_as_all_views_do(write_spec: WriteSpec) -> None:
    """6 views of 48 x 48: with 8 clips of 32 x 32 a virtual GPU 3 at once, with 1 clip one at once."""
    evaluate = {"clips": 2, "crops": 3, "short_side": 48}
    found, sizes = list[np.ndarray](), list[set[int]]()
    for clips in (8, 1):
        spec = load_spec(write_spec(evaluate=evaluate, scale={"clips_per_gpu": clips}, precision="fp64"))
        model = initial_network(spec, torch.device("cpu"))
        seen = set[int]()
        model.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.add(len(inputs[0])))
        scores = _scorer(spec).score(model)
        assert scores is not None
        found.append(scores.scores)
        sizes.append(seen)
    assert sizes == [{3}, {1}]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)  # they are kept in fp32


def test_a_bad_video_is_recorded_by_the_evaluation_that_finds_it(write_spec: WriteSpec, tmp_path: Path) -> None:
    """One is found before a request to stop, one after it; the next evaluation knows both. The limit is for all."""
    spec = load_spec(write_spec(data={"on_bad_clip": "skip", "max_bad_fraction": 0.05}))
    kept = tmp_path / "kept.partial"

    def evaluate(bad: Sequence[int], stop_at: int | None = None, most: float = 0.2) -> Scores | None:
        stop, partial = StopRequest(), PartialScores(kept, "views")
        data = spec.data.model_copy(update={"max_bad_fraction": most})

        class Zeros(Scorer):
            def results(self, model: nn.Module, videos: Sequence[int]) -> Results:
                for video in videos:
                    if video == stop_at:
                        stop.receive(signal.SIGUSR2, None)
                    yield BadClip(video, f"{video}.mp4", "is cut", None) if video in bad else np.zeros(4)

        scorer = Zeros(**vars(_scorer(spec.model_copy(update={"data": data}), stop=stop)))
        return scorer.score(nn.Identity(), earlier=partial)

    def recorded() -> list[int]:
        return [json.loads(line)["clip"] for line in (spec.run_path / "bad_clips.jsonl").read_text().splitlines()]

    with pytest.raises(Stopped):
        evaluate([7], stop_at=9)
    assert recorded() == [7]
    for _ in range(2):
        found = evaluate([10])
        assert found is not None and found.num_bad == 2
        assert recorded() == [7, 10]
    with pytest.raises(AgreedError, match="2 of 11 test videos could not be read"):
        evaluate([], most=0.1)
    assert recorded() == [7, 10]
