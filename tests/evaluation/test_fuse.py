"""Fusion by hand on three videos; searched weights, which never see the half that is scored; videos that differ."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from summit_train.core.errors import UserError
from summit_train.data.manifest.clip import Clip
from summit_train.data.video.span import Span
from summit_train.evaluation.fuse import (
    Ensemble,
    _mixtures,
    ensemble,
    fused_values,
    halves,
    parse_weights,
    search_on_half,
    search_weights,
)
from summit_train.evaluation.run_scores import RunScores, read_run
from tests.scored_runs import CLIPS, FLOW, LABELS, NAMES, RGB, write_scores

NAN_VIDEO = [[float("nan")] * 3]


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Writes scores and reads them: read("rgb", probabilities, labels, clips, names)."""

    def written(name: str, probabilities: Sequence[Sequence[float]], *args: Any) -> RunScores:
        return read_run(str(write_scores(tmp_path / f"{name}.npz", probabilities, *args)))

    return written


def mixed_of(*probabilities: Sequence[Sequence[float]], softmax: bool = True) -> Ensemble:
    with tempfile.TemporaryDirectory() as folder:
        paths = [write_scores(Path(folder) / f"run{i}.npz", rows) for i, rows in enumerate(probabilities)]
        return ensemble([read_run(str(path)) for path in paths], softmax=softmax)


def test_probabilities_by_hand() -> None:
    mixed = mixed_of(RGB, FLOW)
    equal = mixed.fuse((1.0, 1.0)).scores
    assert equal == pytest.approx(np.array([[0.5, 0.4, 0.1], [0.3, 0.6, 0.1], [0.3, 0.4, 0.3]]), rel=1e-5)
    assert mixed.fuse((2.0, 2.0)).scores == pytest.approx(equal, rel=1e-12)
    weighted = mixed.fuse((3.0, 1.0))
    assert weighted.scores == pytest.approx(np.array([[0.55, 0.35, 0.1], [0.4, 0.5, 0.1], [0.25, 0.35, 0.4]]), rel=1e-5)
    assert np.exp(mixed.logits(weighted).scores) == pytest.approx(weighted.scores, rel=1e-12)
    values = fused_values(mixed, (3.0, 1.0))
    third = pytest.approx(100 / 3)
    assert (values["top1"], values["top5"], values["videos"], values["best"]) == (100.0, 100.0, 3, "run0")
    assert [(run["top1"], run["weight"]) for run in values["runs"]] == [(pytest.approx(200 / 3), 3.0), (third, 1.0)]
    assert values["gain"] == third
    assert [(row["name"], row["videos"], row["best_top1"], row["top1"], row["gain"]) for row in values["classes"]] == [
        ("hop", 1, 100.0, 100.0, 0.0),
        ("run", 1, 0.0, 100.0, 100.0),
        ("skip", 1, 100.0, 100.0, 0.0),
    ]
    # Equal weights: the third video is lost, the second one won.
    assert [row["gain"] for row in fused_values(mixed, (1.0, 1.0))["classes"]] == [0.0, 100.0, -100.0]


def test_logits_are_added_as_they_are() -> None:
    """The sum of probabilities prefers class 0 (0.91, 0.30, 0.79), that of logits class 1 (products 0.018, 0.02)."""
    one, other = [[0.89, 0.1, 0.01]] * 3, [[0.02, 0.2, 0.78]] * 3
    assert mixed_of(one, other).fuse((1.0, 1.0)).scores.argmax(1).tolist() == [0, 0, 0]
    added = mixed_of(one, other, softmax=False)
    logits = added.fuse((1.0, 3.0))
    assert logits.scores[0] == pytest.approx(7 + np.log([0.89, 0.1, 0.01]) / 4 + np.log([0.02, 0.2, 0.78]) * 3 / 4)
    assert added.fuse((1.0, 1.0)).scores.argmax(1).tolist() == [1, 1, 1]
    assert added.logits(logits) is logits


def test_a_video_that_a_run_could_not_read_is_wrong_unless_the_run_has_no_weight() -> None:
    mixed = mixed_of(RGB[:2] + NAN_VIDEO, [*FLOW[:2], RGB[2]])
    values = fused_values(mixed, (3.0, 1.0))
    assert (values["top1"], values["bad_videos"]) == (pytest.approx(200 / 3), 1)
    assert [run["bad_videos"] for run in values["runs"]] == [1, 0]
    assert fused_values(mixed, (0.0, 1.0))["bad_videos"] == 0


@st.composite
def scored_videos(draw: st.DrawFn) -> tuple[list[Clip], list[int], list[list[list[float]]]]:
    """Clips, labels, and the probabilities of three runs, times a number."""
    spans = st.builds(Span, st.integers(0, 3), st.integers(-1, 9))
    clips = draw(st.lists(st.builds(Clip, st.sampled_from("ab"), spans, st.booleans()), min_size=2, unique=True))
    cells = st.lists(st.floats(0.01, 1), min_size=3, max_size=3)
    rows = st.lists(cells, min_size=len(clips), max_size=len(clips))
    labels = draw(st.lists(st.integers(0, 2), min_size=len(clips), max_size=len(clips)))
    return clips, labels, [draw(rows) for _ in range(3)]


@settings(max_examples=25)
@given(scored_videos(), st.randoms(use_true_random=False), st.integers(0, 3))
def test_the_order_of_the_videos_changes_nothing(
    videos: tuple[list[Clip], list[int], list[list[list[float]]]], shuffle: Any, seed: int
) -> None:
    clips, labels, runs = videos
    found = []
    for is_shuffled in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            read = []
            for i, rows in enumerate(runs):
                order = list(range(len(clips)))
                if is_shuffled:
                    shuffle.shuffle(order)
                columns = ([column[place] for place in order] for column in (rows, labels, clips))
                read.append(read_run(str(write_scores(Path(folder) / f"{i}.npz", *columns))))  # type: ignore[arg-type]
        # Where it was written is no part of it.
        mixed = ensemble_of([replace(run, path=Path(run.name)) for run in read])
        half, weights, search = search_on_half(mixed, seed)
        found.append((fused_values(mixed, (1.0, 2.0, 0.5)), fused_values(half, weights), search, half.runs[0].clips))
    assert found[0] == found[1]


def ensemble_of(runs: Sequence[RunScores]) -> Ensemble:
    """An ensemble of logits, without the check of the files, which are gone."""
    assert len({run.clips for run in runs}) == 1
    return Ensemble(tuple(runs), tuple(run.scores.scores.astype(np.float64) for run in runs), softmax=False)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=60), st.integers(-5, 5))
def test_the_halves_share_no_video_and_are_balanced(labels: list[int], seed: int) -> None:
    one, other = halves(np.array(labels), seed)
    assert sorted([*one.tolist(), *other.tolist()]) == list(range(len(labels)))
    assert len(one) - len(other) in (0, 1)
    for label in set(labels):
        counts = [[labels[place] for place in half].count(label) for half in (one, other)]
        assert abs(counts[0] - counts[1]) <= 1


def test_the_halves_are_a_matter_of_the_seed() -> None:
    labels = np.arange(40) % 4
    one, again, other = (halves(labels, seed)[0].tolist() for seed in (0, 0, 1))
    assert one == again != other


def many(seed: int) -> Ensemble:
    """Forty videos of two runs, each right on a random two thirds of them."""
    random = np.random.default_rng(seed)
    labels, clips = (np.arange(40) % 3).tolist(), [Clip(f"{i:02}.mp4") for i in range(40)]
    runs = []
    for name in ("one", "other"):
        rows = 0.1 + random.random((40, 3)) + 1.2 * np.eye(3)[labels] * (random.random((40, 1)) < 0.7)
        with tempfile.TemporaryDirectory() as folder:
            runs.append(read_run(str(write_scores(Path(folder) / f"{name}.npz", rows.tolist(), labels, clips))))
    return ensemble_of(runs)


@pytest.mark.parametrize("seed", range(4))
def test_a_search_never_sees_the_half_that_it_scores(seed: int) -> None:
    mixed = many(seed)
    found_on, scored_on = halves(mixed.runs[0].scores.labels, seed)
    other, weights, search = search_on_half(mixed, seed)
    assert (search["found_on"], search["scored_on"], len(other)) == (20, 20, 20)
    assert {clip.path for clip in other.runs[1].clips} == {f"{place:02}.mp4" for place in scored_on}
    assert search["found_top1"] == mixed.of(found_on).fuse(weights).top(1)
    assert search["equal_weights"]["top1"] == other.fuse((0.5, 0.5)).top(1)
    assert fused_values(other, weights)["top1"] == mixed.of(scored_on).fuse(weights).top(1)
    # Whatever the scores of the half that is scored are, the weights are the same.
    for part in mixed.parts:
        part[scored_on] = part[scored_on][:, [1, 2, 0]]
    changed, again, _ = search_on_half(mixed, seed)
    assert again == weights and changed.fuse(weights).top(1) != other.fuse(weights).top(1)


def test_the_weights_nearest_to_equal_ones_that_are_best() -> None:
    """All three videos are right where RGB's share is above 2/3 and below 7/8: of 0.70 to 0.85, 0.70 is nearest."""
    assert search_weights(mixed_of(RGB, FLOW)) == (0.7, 0.3)
    assert search_weights(mixed_of(FLOW, RGB)) == (0.3, 0.7)
    assert search_weights(mixed_of(RGB, RGB)) == (0.5, 0.5)
    assert search_weights(mixed_of(RGB, RGB, RGB)) == (1 / 3, 1 / 3, 1 / 3)


WRONG = [[0.001, 0.001, 0.998], [0.998, 0.001, 0.001], [0.001, 0.998, 0.001]]


def test_of_three_runs_every_mixture_is_tried() -> None:
    """The third run is wrong everywhere and sure of it."""
    mixed = mixed_of(RGB, FLOW, WRONG)
    weights = search_weights(mixed)
    assert weights == (0.7, 0.3, 0.0) and mixed.fuse(weights).top(1) == 100.0
    every = list(_mixtures(3))
    assert len(set(every)) == len(every) == 231 and all(sum(weights) == pytest.approx(1) for weights in every)
    assert list(_mixtures(2)) == [(step / 20, (20 - step) / 20) for step in range(21)]


def test_of_more_runs_one_weight_at_a_time_changes() -> None:
    """Three equal runs and one that is wrong and sure of it, which at a share of 0.25 costs the third video."""
    mixed = mixed_of(RGB, RGB, RGB, WRONG)
    weights = search_weights(mixed)
    assert mixed.fuse((0.25,) * 4).top(1) == pytest.approx(100 / 3) and mixed.fuse(weights).top(1) > 66
    assert 0.25 > weights[3] > 0.1 and sum(weights) == pytest.approx(1, abs=1e-5)
    assert search_weights(mixed_of(RGB, RGB, RGB, RGB)) == (0.25,) * 4


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("1", "1 for 2 runs; one for each"),
        ("1,2,3", "3 for 2 runs"),
        ("1,-0.5", "0 or more are wanted"),
        ("0,0", "one above 0"),
        ("nan,1", "finite weights"),
        ("1,inf", "finite weights"),
        ("1,x", "numbers with commas"),
        ("1,", "numbers with commas"),
    ],
)
def test_weights_that_are_none(text: str, part: str) -> None:
    with pytest.raises(UserError, match=part) as caught:
        parse_weights(text, 2)
    assert str(caught.value).startswith(f"--weights {text}: ") and "\n" not in str(caught.value)


def test_weights_that_are_some() -> None:
    assert parse_weights("1,1.5", 2) == (1.0, 1.5) and parse_weights("0,2e0", 2) == (0.0, 2.0)
    assert parse_weights(None, 3) == (1.0, 1.0, 1.0)


FOUR = [[0.25] * 4] * 3


@pytest.mark.parametrize(
    ("other", "part"),
    [
        ((FOUR, LABELS, CLIPS, ()), "rgb.npz has 3 classes and .*flow.npz has 4; the same are wanted"),
        ((FLOW, LABELS, CLIPS, ("hop", "jog", "skip")), "same classes: they differ in 'jog', 'run'"),
        ((FLOW, LABELS, CLIPS, NAMES[::-1]), "same classes: they differ in 'only in their order'"),
        ((FLOW, (0, 2, 2)), r"b.mp4: is class 1 in .*rgb.npz and 2 in .*flow.npz \(1 of 3 videos differ\)"),
        (
            (FLOW, LABELS, [Clip("a.mp4"), Clip("b.mp4"), Clip("d.mp4")]),
            "of 3 and 3 videos 2 match; flow lacks c.mp4, and has a.mp4",
        ),
        ((FLOW[:2], LABELS[:2], CLIPS[:2]), "of 3 and 2 videos 2 match; flow lacks c.mp4"),
        ((FLOW, LABELS, [Clip("a.mp4", Span(1)), *CLIPS[1:]]), "2 match; flow lacks a.mp4, and has a.mp4 1:"),
        ((FLOW, LABELS, [Clip("a.mp4", is_reversed=True), *CLIPS[1:]]), "and has a.mp4 backwards"),
        (
            ([*FLOW, FLOW[0]], (*LABELS, 0), [*CLIPS, Clip("z.mp4")]),
            "of 3 and 4 videos 3 match; rgb lacks z.mp4, and has a.mp4",
        ),
    ],
)
def test_runs_that_do_not_match(read: Any, other: tuple[Any, ...], part: str) -> None:
    with pytest.raises(UserError, match=part) as caught:
        ensemble([read("rgb", RGB), read("flow", *other)], softmax=True)
    assert "\n" not in str(caught.value)


def test_what_is_no_ensemble(read: Any) -> None:
    rgb, flow = read("rgb", RGB), read("flow", FLOW)
    with pytest.raises(UserError, match=r"^1 run: two or more are wanted"):
        ensemble([rgb], softmax=True)
    with pytest.raises(UserError, match=r"rgb\.npz: is given twice"):
        ensemble([rgb, flow, rgb], softmax=True)
    alone = ensemble([read("a", RGB[:1], (0,), CLIPS[:1]), read("b", RGB[:1], (0,), CLIPS[:1])], softmax=True)
    with pytest.raises(UserError, match="--search: 1 video cannot be halved"):
        search_on_half(alone, 0)


def test_runs_without_names_of_classes_match_those_with(read: Any) -> None:
    assert ensemble([read("rgb", RGB, LABELS, CLIPS, ()), read("flow", FLOW)], softmax=True).class_names == NAMES
