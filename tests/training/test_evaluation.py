"""Accuracies worked out by hand, and evaluation of a real data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from summit_train.comm import World
from summit_train.data.batches.loader import BadClip
from summit_train.data.manifest import Manifest, read_manifest
from summit_train.data.video.source import DecodeError
from summit_train.spec import Spec, load_spec
from summit_train.training.evaluation import Evaluation, Scores, show_accuracy, summarise
from summit_train.training.run import fresh_model
from tests.conftest import WriteSpec


def _scores(rows: list[list[float]], labels: list[int]) -> Scores:
    return Scores(np.arange(len(labels)), np.array(labels), np.array(rows))


def test_top_k_by_hand() -> None:
    scores = _scores([[3, 2, 1], [1, 3, 2], [1, 3, 2], [1, 2, 3]], [0, 0, 1, 1])
    assert scores.top(1) == 50.0
    assert scores.top(2) == 75.0
    assert scores.top(3) == 100.0


def test_equal_scores_are_ordered_by_class() -> None:
    """All scores equal: class 0 is the answer, so 1 of 4 is right and not 4 of 4 or none."""
    assert _scores([[1, 1, 1, 1]] * 4, [0, 1, 2, 3]).top(1) == 25.0


def test_mean_and_deviation_are_the_populations(write_spec: WriteSpec) -> None:
    rows = [{"path": "a", "step": 1, "top1": 70.0, "top5": 90.0}, {"path": "b", "step": 2, "top1": 74.0, "top5": 92.0}]
    result = summarise(rows, load_spec(write_spec()), 101)
    assert (result["top1_mean"], result["top1_std"], result["top5_mean"]) == (72.0, 2.0, 91.0)
    assert (result["videos"], result["clips"], result["crops"], result["checkpoints"]) == (101, 1, 1, rows)


@pytest.mark.parametrize(("classes", "text"), [(5, "top-1 61.00 %"), (6, "top-1 61.00 %  top-5 98.77 %")])
def test_top_5_is_not_shown_where_it_says_nothing(classes: int, text: str) -> None:
    assert show_accuracy("61.00", 98.765, classes) == text


def test_saved_scores_open_without_pickle(tmp_path: Path) -> None:
    _scores([[1, 2], [4, 3]], [1, 1]).save(tmp_path / "predictions" / "a.npz")
    saved = np.load(tmp_path / "predictions" / "a.npz", allow_pickle=False)
    assert saved["label"].tolist() == [1, 1] and saved["scores"].tolist() == [[1, 2], [4, 3]]


def test_a_videos_score_is_the_mean_over_its_views_and_depends_on_no_other(write_spec: WriteSpec) -> None:
    spec = load_spec(write_spec(evaluate={"clips": 3, "crops": 3, "short_side": 32}))
    manifest = read_manifest(spec.data.val)
    model = fresh_model(spec, torch.device("cpu"))
    model.train()
    whole = Evaluation(spec, manifest, World(), torch.device("cpu")).score(model, 3, 3)
    assert whole is not None and model.training
    assert whole.scores.shape == (101, 4) and np.isfinite(whole.scores).all()
    second = World()
    second.rank, second.size = 1, 2
    half = _Half(model, spec, manifest, second)
    for video, score in half:
        assert np.array_equal(score.astype(np.float32), whole.scores[video])


class _Half(list[tuple[int, np.ndarray]]):
    """What rank 1 of 2 would send to rank 0."""

    def __init__(self, model: nn.Module, spec: Spec, manifest: Manifest, world: World) -> None:
        def gather(value: tuple[list[int], list[np.ndarray], list[BadClip]]) -> None:
            videos, scores, bad = value
            self.extend(zip(videos, scores, strict=True))
            assert bad == []

        world.gather = gather  # type: ignore[method-assign, assignment]
        done: list[tuple[int, int]] = []
        evaluation = Evaluation(spec, manifest, world, torch.device("cpu"))
        evaluation.score(model, 3, 3, lambda *progress: done.append(progress))
        assert done == [(number, 50) for number in range(1, 51)]
        assert [video for video, _ in self] == list(range(1, 101, 2))


def test_a_video_that_cannot_be_read_is_named(write_spec: WriteSpec, tmp_path: Path, motion_set: Path) -> None:
    (tmp_path / "val.csv").write_text("path,label\ngone.mp4,0\n")
    spec = load_spec(write_spec(data={"val": str(tmp_path / "val.csv")}))
    model = fresh_model(spec, torch.device("cpu"))
    with pytest.raises(DecodeError, match=r"gone\.mp4"):
        Evaluation(spec, read_manifest(spec.data.val), World(), torch.device("cpu")).score(model, 1, 1)
