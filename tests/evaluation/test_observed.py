"""Early recognition: fractions as text, the frames that are seen, and curves that end where other evaluations are."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from summit_train.core.comm import World
from summit_train.core.errors import UserError
from summit_train.core.run_folder import checkpoint_path
from summit_train.data.batches import loader
from summit_train.data.dataset import Dataset
from summit_train.evaluation.observed import TENTHS, _curves, parse_fractions, score_observed
from summit_train.evaluation.scores import Scores
from summit_train.evaluation.scoring import Scorer
from summit_train.models.network import initial_network
from summit_train.spec import Spec, load_spec
from summit_train.training.checkpoint import save_checkpoint
from tests.closeness import assert_near
from tests.conftest import WriteSpec
from tests.streamed import CPU, network_of, noise_videos, score

HALVES = (Fraction(1, 2), Fraction(1))


@pytest.mark.parametrize(
    ("text", "percents"),
    [
        ("0.1,0.5,1", [10, 50, 100]),
        ("1.0, .5,0.25,0.5", [25, 50, 100]),
        ("0.1,0.2,...,1.0", [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]),
        ("0.25,...,1", [25, 50, 75, 100]),
        ("0.05,0.1,...,0.2,1.", [5, 10, 15, 20, 100]),
    ],
)
def test_fractions_are_exact(text: str, percents: list[int]) -> None:
    assert parse_fractions(text) == tuple(Fraction(percent, 100) for percent in percents)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("0", "'0' is not a fraction"),
        ("1.5", "'1.5' is not a fraction"),
        ("0.5,half", "'half' is not a fraction"),
        ("0.5,", "'' is not a fraction"),
        ("1e-999999999", "is not a fraction"),
        ("...,1", r"'\.\.\.' is not a fraction"),
        ("0.1,...", r"'\.\.\.' is not a fraction"),
        ("0.3,...,1", "do not lead to 1"),
        ("0.5,0.4,...,0.1", "do not lead to 0.1"),
        ("0.0001,...,1", "do not lead to 1"),
    ],
)
def test_other_fractions_are_refused_in_one_line(text: str, part: str) -> None:
    with pytest.raises(UserError, match=part) as caught:
        parse_fractions(text)
    assert str(caught.value).startswith(f"--observed {text}: ") and "\n" not in str(caught.value)


def observed(spec: Spec, fractions: tuple[Fraction, ...]) -> dict[str, object]:
    """The curves of `network_of(spec)`, by way of a checkpoint."""
    path = checkpoint_path(spec.run_path, 7)
    save_checkpoint(path, {"model": network_of(spec).state_dict(), "optimizer": {}, "step": 7})
    scorer = Scorer(spec, Dataset.open(spec, "val"), World(), CPU)
    found = score_observed(scorer, initial_network(spec, CPU), path, fractions, lambda done, total: None)
    assert found is not None and found["step"] == 7
    return found


def caught_scores(monkeypatch: pytest.MonkeyPatch) -> list[Scores]:
    """The Scores that the curves are made of, in a list that fills."""
    found: list[Scores] = []

    def curves(scores: Scores, fractions: tuple[Fraction, ...]) -> dict[str, object]:
        found.append(scores)
        return _curves(scores, fractions)

    monkeypatch.setattr("summit_train.evaluation.observed._curves", curves)
    return found


@pytest.mark.parametrize(("sampling", "crops"), [("uniform", "1"), ("dense", "1"), ("dense", "3")])
def test_all_of_a_video_is_the_uniform_clip_and_the_stream(
    write_spec: WriteSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: str, crops: str
) -> None:
    path = write_spec(
        model={"shift_direction": "past"}, data={"val": noise_videos(tmp_path, [25, 3, 9]), "sampling": sampling}
    )
    spec = load_spec(path, [f"evaluate.crops={crops}"])
    scores = caught_scores(monkeypatch)
    observed(spec, HALVES)
    assert scores[0].scores.shape == (3, 2, 2, 4)
    model = network_of(spec)
    by_clip = score(load_spec(path, ["data.sampling=uniform"]), model, spec.evaluate.crops)
    by_stream = score(load_spec(path, ["evaluate.mode=stream"]), model, spec.evaluate.crops)
    half, whole = scores[0].scores.transpose(2, 1, 0, 3)
    assert_near(whole[0], by_clip.scores, 1e-5)
    assert_near(whole[1], by_stream.scores, 1e-5)
    assert np.abs(half - whole).max() > 0.1


def test_the_first_half_is_what_a_video_of_these_frames_gives(
    write_spec: WriteSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 25 frames ceil(12.5) = 13 are observed: the clip and the stream are those of the first 13 alone."""
    manifest = Path(noise_videos(tmp_path, [25]))
    spec = load_spec(write_spec(model={"shift_direction": "past"}, data={"val": str(manifest), "frame_stride": 4}))
    scores = caught_scores(monkeypatch)
    observed(spec, HALVES)
    manifest.write_text(manifest.read_text().replace("path,label", "path,label,start_frame,end_frame")
                        .replace("0.mp4,0", "0.mp4,0,0,13"))  # fmt: skip
    observed(spec, HALVES)
    assert_near(scores[0].scores[:, :, 0], scores[1].scores[:, :, 1], 1e-5)


def test_pieces_change_nothing(write_spec: WriteSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"val": noise_videos(tmp_path, [25, 12])}
    spec = load_spec(write_spec(model={"shift_direction": "past"}, data=data))
    scores = caught_scores(monkeypatch)
    observed(spec, TENTHS)
    monkeypatch.setattr(loader, "PICTURES_AT_ONCE", 7)
    observed(spec, TENTHS)
    np.testing.assert_array_equal(scores[0].scores, scores[1].scores)


def test_the_curves_by_hand() -> None:
    """Three videos of class 1; the second cannot be read, and of the third the stream has no frame at first."""
    right, wrong, none = [0.0, 1.0], [1.0, 0.0], [np.nan, np.nan]
    videos = [[[wrong, right], [right, right]], [[none, none], [none, none]], [[right, right], [none, wrong]]]
    is_read = np.array([True, False, True])
    found = _curves(Scores(np.arange(3), np.array([1, 1, 1]), np.array(videos), is_read), HALVES)
    third = pytest.approx(100 / 3)
    assert (found["videos"], found["bad_videos"]) == (3, 1)
    assert [(row["fraction"], row["top1"]) for row in found["observed"]] == [
        (0.5, third),
        (1.0, pytest.approx(200 / 3)),
    ]
    assert [(row["top1"], row["undecided"]) for row in found["anytime"]] == [(third, 1), (third, 0)]


def test_a_uniform_stream_that_has_not_begun_is_undecided(write_spec: WriteSpec, tmp_path: Path) -> None:
    """25 frames, T = 4: the stream's first is 3, and after a tenth 0, 1, 2 are observed."""
    data = {"val": noise_videos(tmp_path, [25]), "sampling": "uniform"}
    found = observed(load_spec(write_spec(model={"shift_direction": "past"}, data=data)), TENTHS[:2])
    assert [row["undecided"] for row in found["anytime"]] == [1, 0]  # type: ignore[attr-defined]


def test_a_network_that_cannot_stream_has_no_anytime_curve(write_spec: WriteSpec, tmp_path: Path) -> None:
    found = observed(load_spec(write_spec(data={"val": noise_videos(tmp_path, [25])})), HALVES)
    assert "anytime" not in found and [row["fraction"] for row in found["observed"]] == [0.5, 1.0]  # type: ignore[attr-defined]
