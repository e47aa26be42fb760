"""The baseline: features as `load` gives them, the regression at its optimum, groups kept together, any ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import summit_train
from summit_train.core.errors import UserError
from summit_train.data.manifest import read_manifest
from summit_train.evaluation.scores import Scores
from summit_train.inference import baseline
from summit_train.inference.baseline import choose_strength, fit, parts_within
from summit_train.models.build import build_network
from summit_train.spec import Spec
from tests.conftest import WriteSpec
from tests.worlds import Say, refused, succeed


def test_a_fit_is_at_the_optimum_of_its_objective() -> None:
    """The gradient of |W|^2 / 2 + C * sum of the cross entropies is 0, worked out here without torch."""
    draw = np.random.default_rng(3)
    labels = np.repeat([0, 2, 5], [9, 7, 8])
    features = draw.normal(size=(24, 40)) * draw.uniform(0.1, 9, 40) + draw.normal(size=(6, 40))[labels]
    features[:, 7] = 4.0  # without a deviation
    for strength in (1e-3, 0.1, 10.0):
        found = fit(features, labels, strength)
        inputs = (features - features.mean(0)) / np.where(features.std(0) == 0, 1, features.std(0))
        logits = inputs @ found.weight.T + found.bias
        shares = np.exp(logits - logits.max(1, keepdims=True))
        errors = shares / shares.sum(1, keepdims=True) - (labels[:, None] == found.labels)
        scale = strength * np.abs(errors).sum()
        assert np.abs(found.weight + strength * errors.T @ inputs).max() < 1e-4 * scale
        assert np.abs(errors.sum(0)).max() < 1e-4 * np.abs(errors).sum()
        every = found.logits(features, 7)
        assert np.array_equal(every[:, [0, 2, 5]], logits) and (every[:, [1, 3, 4, 6]] < logits.min() - 99).all()


def test_two_videos_have_the_weights_worked_by_hand() -> None:
    """Features -1 and 1 have the weights -w and w, the logits differ by 2 w, and w = C * 2 / (1 + e^(2 w))."""
    found = fit(np.array([[0.0], [4.0]]), np.array([0, 1]), 1.0)
    (weight,) = found.weight[1]
    assert weight == pytest.approx(2 / (1 + np.exp(2 * weight)), rel=1e-6) and weight == -found.weight[0, 0]
    assert (found.mean, found.deviation) == (2.0, 2.0)
    assert found.bias == pytest.approx([0, 0], abs=1e-8)


def test_the_smallest_of_the_best_strengths_is_chosen() -> None:
    labels = np.tile([0, 1], 10)
    parts = np.repeat(range(5), 4).tolist()
    assert choose_strength(np.where(labels, 1.0, -1.0)[:, None], labels, parts) == (1e-4, [100.0] * 7)
    turned = np.where(np.arange(20) < 16, labels, 1 - labels)  # the last part contradicts the others
    strength, found = choose_strength(np.where(turned, 1.0, -1.0)[:, None], labels, parts)
    assert (strength, max(found)) == (1e-4, 80.0)


def test_groups_stay_together_and_fewer_of_them_make_fewer_parts(tmp_path: Path) -> None:
    def parts(groups: int) -> list[int] | None:
        rows = [f"{label}_{number}.mp4,{label},{number % groups}" for label in (0, 1) for number in range(12)]
        (tmp_path / "list.csv").write_text("\n".join(["path,label,group", *rows, ""]))
        return parts_within(read_manifest(tmp_path / "list.csv"), np.arange(24), 0)

    six = parts(6)
    assert six is not None and sorted(set(six)) == [0, 1, 2, 3, 4]
    assert all(len({six[row] for row in range(group, 24, 6)}) == 1 for group in range(6))
    three = parts(3)
    assert three is not None and set(three) == {0, 1, 2}
    assert parts(1) is None


def test_an_unreadable_video_is_wrong_and_without_parts_the_strength_is_1() -> None:
    train = Scores(np.arange(4), np.array([0, 1, 0, 1]), np.array([[-1.0], [1], [np.nan], [1]]), np.arange(4) != 2)
    val = Scores(np.arange(4), np.array([0, 1, 1, 0]), np.array([[-1.0], [1], [1], [np.nan]]), np.arange(4) != 3)
    values, scores = baseline.baseline(train, val, None, 3)
    assert values == {
        "top1": 75.0, "top1_interval": pytest.approx([30.06, 95.44], abs=0.01), "videos": 4, "training_videos": 3,
        "features": 1, "strength": 1.0, "folds": 0, "strengths": {},
    }  # fmt: skip
    assert scores.scores.shape == (4, 3) and scores.num_bad == 1


def test_the_command_on_one_two_and_three_ranks(trained_run: Path, write_spec: WriteSpec, tmp_path: Path) -> None:
    model = {"shift_direction": "past", "pretrained": str(trained_run)}
    found = []
    for ranks in (1, 2, 3):
        spec = write_spec(f"on_{ranks}", model=model)
        output = succeed(ranks, "baseline", str(spec))
        found.append(json.loads((tmp_path / f"runs/on_{ranks}/baseline/baseline.json").read_text()))
        assert f"baseline: top-1 {found[0]['top1']:.2f} %, logistic regression of 64 frozen features" in output
    assert found[0] == found[1] == found[2] and found[0]["videos"] == 11
    loaded = summit_train.load(trained_run, "evaluate.clips=1", device="cpu")
    expected = [loaded.features(one.clips, "avgpool").flatten(1).mean(0).numpy() for one in loaded.samples()]
    with np.load(tmp_path / "runs/on_1/baseline/val.features.npz") as kept:
        assert np.allclose(np.split(kept["scores"], kept["ends"][:-1]), expected, rtol=1e-3, atol=1e-5)
    with np.load(tmp_path / "runs/on_2/baseline/predictions.npz") as kept:
        assert 100 * np.mean(kept["scores"].argmax(1) == kept["label"]) == found[0]["top1"]


def test_features_are_computed_once(trained_run: Path, write_spec: WriteSpec, motion_set: Path, tmp_path: Path) -> None:
    root = tmp_path / "videos"
    shutil.copytree(motion_set, root)
    model = {"shift_direction": "past", "pretrained": str(trained_run)}
    lists = {name: str(root / f"{name}.csv") for name in ("train", "val")}
    spec = str(write_spec(model=model, data=lists))
    succeed(0, "baseline", spec)
    for video in root.rglob("*.mp4"):
        video.write_bytes(b"")
    succeed(0, "baseline", spec, "data.workers=1")
    with pytest.raises(AssertionError, match="is empty"):
        succeed(0, "baseline", spec, "evaluate.clips=2")
    bad = ["evaluate.clips=2", "data.on_bad_clip=skip"]
    with pytest.raises(AssertionError, match=r"data.train: 80 of 80 videos could not be read, more than data.max_bad"):
        succeed(0, "baseline", spec, *bad)
    with pytest.raises(AssertionError, match=f"must have videos of two classes or more, got one in {lists['train']}"):
        succeed(0, "baseline", spec, *bad, "data.max_bad_fraction=1")


def test_random_features_are_the_baseline_of_nothing(write_spec: WriteSpec, done: str, say: Say) -> None:
    status, out, err = say("baseline", done, "--json")
    assert status == 0 and "random features are the baseline of nothing" in err
    values = json.loads(out)
    assert values["weights"] is None and values["run"] is not None


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["loss.kind=binary"],
            "baseline must have one class per video (loss.kind softmax), got classification, binary",
        ),
        (["evaluate.mode=stream"], "evaluate.mode must be clips, got stream; try evaluate.mode=clips"),
        (["model.pretrained=nowhere.pth"], "model.pretrained: nowhere.pth: no such file or run folder"),
    ],
)
def test_what_has_no_baseline(write_spec: WriteSpec, say: Say, words: list[str], line: str) -> None:
    assert line in refused(say("baseline", write_spec(model={"shift_direction": "past"}), *words))


def test_trn_is_read_in_front_of_what_is_trained_with_the_classes() -> None:
    data = {"train": "train.csv", "val": "val.csv", "num_frames": 4, "crop": 32}
    spec = Spec(name="a", model={"arch": "trn", "num_classes": 3, "width": 0.125}, data=data)  # type: ignore[arg-type]
    features = baseline.Features(build_network(spec).eval())
    assert features.width == 256 and features(torch.zeros(2, 4, 3, 32, 32)).shape == (2, 256)


def test_a_network_names_its_last_linear_layer() -> None:
    from torch import nn

    class Headless(nn.Module):
        head = ""

    with pytest.raises(UserError, match="its last linear layer as `head`"):
        baseline.Features(Headless())  # type: ignore[arg-type]
