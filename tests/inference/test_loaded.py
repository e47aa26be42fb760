"""A run loaded into Python sees what `eval` and `predict` see, and gives their logits, accuracy and classes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import summit_train
from summit_train.core.errors import UserError
from summit_train.core.saved import checkpoint_path
from summit_train.data.manifest import read_manifest
from summit_train.inference.loaded import Loaded
from tests.closeness import assert_near
from tests.detectors import detector_spec
from tests.inference.test_predict import write_pictures
from tests.runs import changed_copy
from tests.worlds import Say


@pytest.fixture(scope="module")
def loaded(trained_run: Path) -> Loaded:
    return summit_train.load(trained_run, device="cpu")


@pytest.fixture(scope="module")
def video(motion_set: Path) -> Path:
    return motion_set / read_manifest(motion_set / "val.csv").path(5)


@pytest.mark.parametrize("words", [[], ["evaluate.clips=2", "evaluate.crops=3"], ["precision=bf16"]])
def test_the_validation_set_is_what_eval_scores(trained_run: Path, tmp_path: Path, say: Say, words: list[str]) -> None:
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    status, out, _ = say("eval", run, "--name", "mine", "--json", *words)
    assert status == 0
    workers = f"data.workers={2 if words else 0}"
    loaded, found = summit_train.load(run, workers, *words), json.loads(out)
    scores, labels = [], []
    for sample in loaded.samples():
        scores.append(loaded.logits(sample.clips).numpy())
        labels.append(sample.label)
    assert len(scores) == found["videos"] == 41
    assert 100 * float(np.mean(np.argmax(scores, 1) == labels)) == pytest.approx(found["top1_mean"], rel=1e-12)
    file = run / "evals/mine/predictions" / f"{checkpoint_path(run, 20).stem}.npz"
    with np.load(file) as kept:
        assert labels == kept["label"].tolist()
        assert np.array_equal(np.array(scores, np.float32), kept["scores"])


def test_a_video_has_the_classes_that_predict_prints(loaded: Loaded, trained_run: Path, video: Path, say: Say) -> None:
    clips = loaded.preprocess(video)
    assert clips.shape == (1, 4, 3, 32, 32) and clips.dtype == torch.float32
    (same,) = (sample for sample in loaded.samples("val") if video.match(sample.path))
    assert torch.equal(same.clips, clips)
    status, out, _ = say("predict", trained_run, video, "--json", "--top", "3")
    (predicted,) = json.loads(out)["videos"]
    mine = loaded.predict(clips, top=3)
    assert status == 0 and [one["name"] for one in mine] == [one["name"] for one in predicted["predictions"]]
    assert [one["score"] for one in mine] == pytest.approx([one["score"] for one in predicted["predictions"]], rel=1e-5)
    with torch.inference_mode():
        assert_near(loaded.network(clips)[0].double(), loaded.logits(clips), 1e-12)


def test_an_array_is_read_as_the_pictures_that_hold_it(trained_run: Path, tmp_path: Path) -> None:
    """11 frames of 50 x 40 pixels: every second one, scaled and cropped."""
    loaded = summit_train.load(trained_run, "evaluate.clips=2", "evaluate.crops=3", "data.frame_stride=2")
    frames = np.random.default_rng(0).integers(256, size=(11, 40, 50, 3), dtype=np.uint8)
    folder = write_pictures(tmp_path / "pictures", frames)
    assert torch.equal(loaded.preprocess(frames), loaded.preprocess(folder))
    assert loaded.preprocess(frames[:, :, ::-1]).shape == (6, 4, 3, 32, 32)
    assert not torch.equal(loaded.preprocess(frames[:, :, ::-1]), loaded.preprocess(frames))
    # Pixels of one value, so that scaling keeps it, by hand: (255 - mean) / std of ImageNet.
    white = loaded.preprocess(np.full((4, 32, 32, 3), 255, np.uint8))
    expected = [(1 - mean) / std for mean, std in ((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))]
    assert white.amax((0, 1, 3, 4)).tolist() == pytest.approx(expected, rel=1e-5)


def test_features_of_a_layer(loaded: Loaded, video: Path) -> None:
    clips = loaded.preprocess(video)
    with torch.inference_mode():
        assert torch.equal(loaded.features(clips, "layer1.0.conv1"), loaded.features(clips, "layer1.0.conv1"))
        pooled, logits = loaded.features(clips, "avgpool").flatten(1), loaded.network(clips)
        assert pooled.shape[0] == 4, "a row for each frame"
        assert_near(loaded.plain.fc(pooled).mean(0), logits[0], 1e-5)
    assert loaded.plain.execution == "plain" and not any(part._forward_hooks for part in loaded.plain.modules())


def test_labels_are_those_of_the_list(trained_run: Path, motion_set: Path, video: Path) -> None:
    loaded = summit_train.load(trained_run, "loss.kind=binary")
    labels = read_manifest(motion_set / "val.csv").labels
    found = [sample.label for sample in loaded.samples("val")]
    assert np.array_equal(np.array(found), labels[:, None] == np.arange(4))
    assert [sample.label for sample in loaded.samples(video)] == [None]
    single = summit_train.load(trained_run)
    assert [sample.label for sample in single.samples(motion_set / "val.csv")] == labels.tolist()
    assert next(single.samples("train")).label == read_manifest(motion_set / "train.csv").labels[0]


def test_what_is_loaded(trained_run: Path, tmp_path: Path) -> None:
    loaded = summit_train.load(trained_run, "evaluate.clips=3", checkpoint=str(checkpoint_path(trained_run, 10)))
    assert (loaded.step, loaded.path) == (10, checkpoint_path(trained_run, 10))
    assert loaded.spec.evaluate.clips == 3 and len(loaded.classes) == 4 and not loaded.network.training
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    checkpoint_path(run, 20).write_text("torn")
    with pytest.warns(UserWarning, match=r"passed over: .*step_00000020\.pt"):
        assert summit_train.load(run).step == 10


def test_an_array_is_no_flow(trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = summit_train.load(trained_run)
    spec = loaded.spec.model_copy(update={"data": loaded.spec.data.model_copy(update={"modality": "flow"})})
    monkeypatch.setattr(loaded, "_trained", replace(loaded._trained, spec=spec))
    with pytest.raises(UserError, match="its network sees optical flow, not RGB frames"):
        loaded.preprocess(np.zeros((4, 32, 32, 3), np.uint8))


def test_what_is_refused_in_one_line(loaded: Loaded, trained_run: Path, motion_set: Path, tmp_path: Path) -> None:
    detector = changed_copy(trained_run, tmp_path / "detector.pt", spec=detector_spec().model_dump(mode="json"))
    others = Path(shutil.copytree(motion_set, tmp_path / "others", ignore=shutil.ignore_patterns("videos")))
    (others / "classes.txt").write_text("a\nb\nc\nd\n")
    root = f"data.root={motion_set}"
    (tmp_path / "torn.mp4").write_bytes(b"no video")
    floats, flat = np.zeros((2, 8, 8, 3)), np.zeros((2, 8, 8), np.uint8)
    for call, reason in (
        (lambda: summit_train.load(tmp_path / "nowhere"), "no such run folder or checkpoint"),
        (lambda: summit_train.load(trained_run, "evaluate.clipz=1"), "unknown key; did you mean clips?"),
        (lambda: summit_train.load(trained_run, "evaluate.mode=stream"), "load with evaluate.mode=clips"),
        (lambda: summit_train.load(detector), "summit_train.load is for classifiers, and this network is a detector"),
        (lambda: summit_train.load(trained_run, f"data.val={others}/val.csv", root).samples(), "not have the same cla"),
        (lambda: loaded.samples(tmp_path / "no.mp4"), "no.mp4: "),
        (lambda: list(loaded.samples(tmp_path / "torn.mp4")), "torn.mp4: "),
        (lambda: loaded.preprocess(motion_set / "videos"), "must be one video, got several; try samples"),
        (lambda: loaded.preprocess(floats), r"must be uint8 \(frames, height, width, 3\), got float64 \(2, 8, 8, 3\)"),
        (lambda: loaded.preprocess(flat), r"must be uint8 \(frames, height, width, 3\), got uint8 \(2, 8, 8\)"),
        (lambda: loaded.features(torch.zeros(1, 4, 3, 32, 32), "avgpol"), "got 'avgpol'; try avgpool"),
        (lambda: loaded.features(torch.zeros(1, 4, 3, 32, 32), ""), "got ''; try conv1, bn1, relu, maxpool, layer1, "),
    ):
        with pytest.raises(UserError, match=reason) as caught:
            call()
        assert "\n" not in str(caught.value)
