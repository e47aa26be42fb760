"""A run loaded into Python sees what `eval` and `predict` see, and gives their logits, accuracy and classes."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

import summit_train
from summit_train.core.errors import UserError
from summit_train.core.run_folder import checkpoint_path
from summit_train.data.manifest import read_manifest
from summit_train.inference.loaded import Loaded
from summit_train.inference.trained import Trained
from summit_train.models import VideoNetwork
from summit_train.plan import views_at_once
from tests.closeness import assert_near
from tests.detectors import detector_spec
from tests.inference.test_predict import write_pictures
from tests.runs import changed_copy
from tests.worlds import PATIENCE_S, Say, json_of


@pytest.fixture(scope="module")
def loaded(trained_run: Path) -> Loaded:
    return summit_train.load(trained_run, device="cpu")


@pytest.fixture(scope="module")
def video(motion_set: Path) -> Path:
    return motion_set / read_manifest(motion_set / "val.csv").path(5)


@pytest.mark.parametrize("words", [[], ["evaluate.clips=2", "evaluate.crops=3"], ["precision=bf16"]])
def test_the_validation_set_is_what_eval_scores(trained_run: Path, tmp_path: Path, say: Say, words: list[str]) -> None:
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    found = json_of(say("eval", run, "--name", "mine", "--json", *words))
    loaded = summit_train.load(run, f"data.workers={2 if words else 0}", *words)
    scores, labels = [], []
    for sample in loaded.samples():
        scores.append(loaded.logits(sample.clips).numpy())
        labels.append(sample.label)
    assert len(scores) == found["videos"] == 11
    assert 100 * float(np.mean(np.argmax(scores, 1) == labels)) == pytest.approx(found["top1_mean"], rel=1e-12)
    with np.load(run / "evals/mine/predictions" / f"{checkpoint_path(run, 20).stem}.npz") as kept:
        assert labels == kept["label"].tolist()
        assert np.array_equal(np.array(scores, np.float32), kept["scores"])


def test_a_video_has_the_classes_that_predict_prints(loaded: Loaded, trained_run: Path, video: Path, say: Say) -> None:
    clips = loaded.preprocess(video)
    assert clips.shape == (1, 4, 3, 32, 32) and clips.dtype == torch.float32
    (same,) = (sample for sample in loaded.samples("val") if video.match(sample.path))
    assert torch.equal(same.clips, clips)
    (printed,) = json_of(say("predict", trained_run, video, "--json", "--top", "3"))["videos"]
    found, expected = loaded.predict(clips, top=3), printed["predictions"]
    assert [one["name"] for one in found] == [one["name"] for one in expected]
    assert [one["score"] for one in found] == pytest.approx([one["score"] for one in expected], rel=1e-5)
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
        conv = loaded.plain.conv1(clips.flatten(0, 1))
        assert_near(loaded.features(clips, "conv1"), conv, 1e-6)
        assert_near(loaded.features(clips, "bn1"), loaded.plain.bn1(conv), 1e-6)  # a ReLU in place comes next
        pooled, logits = loaded.features(clips, "avgpool").flatten(1), loaded.network(clips)
        assert pooled.shape[0] == 4, "a row for each frame"
        assert_near(loaded.plain.fc(pooled).mean(0), logits[0], 1e-5)
    assert loaded.plain.execution == "plain" and not any(part._forward_hooks for part in loaded.plain.modules())


def test_features_of_threads_that_run_at_once_are_their_own(
    loaded: Loaded, trained_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each runs the network for hooks when both have their hooks on it; Python from 3.12 on may build one for each."""
    other = summit_train.load(trained_run, device="cpu")
    together, honest = Barrier(2, timeout=PATIENCE_S), Trained.network

    def wait(*_: object) -> None:
        together.wait()

    def network(self: Trained, device: torch.device, *, ready: bool = True) -> VideoNetwork:
        made = honest(self, device, ready=ready)
        made.get_submodule("conv1").register_forward_pre_hook(wait)
        return made

    clips = torch.rand(2, 1, 4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected = [loaded.features(one, "avgpool") for one in clips]
    monkeypatch.setattr(Trained, "network", network)
    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda one: other.features(one, "avgpool"), clips))
        for mine, right in zip(found, expected, strict=True):
            assert_near(mine, right, 1e-5)


def test_threads_that_share_a_network_predict_their_own_videos(loaded: Loaded, motion_set: Path) -> None:
    manifest = read_manifest(motion_set / "val.csv")
    videos = [motion_set / manifest.path(video) for video in range(8)] * 3

    def seen(video: Path) -> torch.Tensor:
        clips = loaded.preprocess(video)
        assert loaded.predict(clips, 1)[0]["score"] == pytest.approx(float(loaded.logits(clips).softmax(0).max()))
        return loaded.logits(clips)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(seen, videos))
    for mine, video in zip(found, videos, strict=True):
        assert_near(mine, seen(video), 1e-5)


def test_a_head_is_trained_on_features(loaded: Loaded, video: Path) -> None:
    clips, head = loaded.preprocess(video), torch.nn.Linear(4, 2, bias=False)
    head(loaded.logits(clips).float()).sum().backward()
    assert_near(head.weight.grad, loaded.logits(clips).float().expand(2, 4), 1e-6)
    pooled = loaded.features(clips, "avgpool").flatten(1)
    head = torch.nn.Linear(pooled.shape[1], 2, bias=False)
    head(pooled).sum().backward()
    assert_near(head.weight.grad, pooled.sum(0).expand(2, -1), 1e-6)


def test_features_are_computed_in_parts_of_bounded_memory(loaded: Loaded) -> None:
    clips, sizes, most = torch.rand(35, 4, 3, 32, 32), list[int](), views_at_once(loaded.spec, 32 * 32)
    with loaded.plain.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0]))):
        pooled = loaded.features(clips, "avgpool")
    assert len(sizes) > 2 and max(sizes) == most and sum(sizes) == 35
    assert_near(pooled[-4:], loaded.features(clips[-1:], "avgpool"), 1e-5)


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.05), ("fp64", 1e-5)])
def test_features_are_numbers_that_numpy_has(
    loaded: Loaded, trained_run: Path, video: Path, precision: str, bound: float
) -> None:
    other = summit_train.load(trained_run, f"precision={precision}", device="cpu")
    found = other.features(other.preprocess(video), "avgpool").numpy()
    assert found.dtype == (np.float64 if precision == "fp64" else np.float32)
    assert_near(found.astype(np.float32), loaded.features(loaded.preprocess(video), "avgpool"), bound)


def test_labels_that_the_network_lacks_are_none(trained_run: Path, video: Path, tmp_path: Path, say: Say) -> None:
    (tmp_path / "list.csv").write_text(f"path,label\n{video},1\n{video},7\n")
    loaded = summit_train.load(trained_run, "loss.kind=binary")
    with pytest.warns(UserWarning, match="its labels are not used: it has a label 7, the network has 4 classes"):
        assert [sample.label for sample in loaded.samples(tmp_path / "list.csv")] == [None, None]
    printed = json_of(say("predict", trained_run, "loss.kind=binary", tmp_path / "list.csv", "--json"))
    assert "videos_labelled" not in printed


def test_the_spec_says_what_an_unreadable_video_does(trained_run: Path, video: Path, tmp_path: Path) -> None:
    (tmp_path / "torn.mp4").write_bytes(b"no video")
    (tmp_path / "val.csv").write_text(f"path,label\n{video},1\n{tmp_path}/torn.mp4,2\n{video},3\n")
    words = (f"data.val={tmp_path}/val.csv", "data.root=/")
    loaded = summit_train.load(trained_run, "data.on_bad_clip=skip", *words)
    with pytest.warns(UserWarning, match=r"left out: .*torn\.mp4: \w"):
        assert [sample.label for sample in loaded.samples("val")] == [1, 3]
    with pytest.warns(UserWarning, match="left out"), pytest.raises(UserError, match=r"torn\.mp4: .* got none"):
        loaded.preprocess(tmp_path / "torn.mp4")
    with pytest.raises(UserError, match=r"torn\.mp4: "):
        list(summit_train.load(trained_run, *words).samples())


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
    with pytest.warns(UserWarning, match=r"evaluate\.precise_bn is ignored") as caught:
        list(summit_train.load(trained_run, "evaluate.precise_bn=2").samples())
    assert len(caught) == 1 and caught[0].filename == __file__


def test_an_array_is_no_flow(trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = summit_train.load(trained_run)
    spec = loaded.spec.model_copy(update={"data": loaded.spec.data.model_copy(update={"modality": "flow"})})
    monkeypatch.setattr(loaded, "_trained", replace(loaded._trained, spec=spec))
    with pytest.raises(UserError, match="its network sees optical flow, not RGB frames"):
        loaded.preprocess(np.zeros((4, 32, 32, 3), np.uint8))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["evaluate.clipz=1"], "unknown key; did you mean clips?"),
        (["evaluate.mode=stream"], "load with evaluate.mode=clips"),
        ([["evaluate.clips=1"]], "overrides must be text, .*, got .*evaluate.clips=1"),
    ],
)
def test_overrides_that_are_refused(trained_run: Path, words: list[Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        summit_train.load(trained_run, *words)
    assert "\n" not in str(caught.value)


def test_what_is_refused_in_one_line(loaded: Loaded, trained_run: Path, motion_set: Path, tmp_path: Path) -> None:
    detector = changed_copy(trained_run, tmp_path / "detector.pt", spec=detector_spec().model_dump(mode="json"))
    others = Path(shutil.copytree(motion_set, tmp_path / "others", ignore=shutil.ignore_patterns("videos")))
    (others / "classes.txt").write_text("a\nb\nc\nd\n")
    other_classes = (f"data.val={others}/val.csv", f"data.root={motion_set}")
    (tmp_path / "torn.mp4").write_bytes(b"no video")
    clips, videos = torch.zeros(1, 4, 3, 32, 32), motion_set / "videos"
    more = summit_train.load(trained_run)
    more.plain.unused = torch.nn.Identity()
    load = summit_train.load
    array = r"must be uint8 \(frames, height, width, 3\), got "
    for call, reason in (
        (lambda: load(tmp_path / "nowhere"), "no such run folder or checkpoint"),
        (lambda: load(detector), "summit_train.load is for classifiers, and this network is a detector"),
        (lambda: load(trained_run, *other_classes).samples(), "must have the same classes"),
        (lambda: load(trained_run, checkpoint="first"), "^checkpoint must be last, best or a file in "),
        (lambda: load(trained_run, device="gpu"), "device must be cpu, or cuda .*, got gpu"),
        (lambda: load(trained_run, device="cuda:99"), "device must be cpu, or cuda .*, got cuda:99"),
        (lambda: loaded.samples(tmp_path / "no.mp4"), "no.mp4: "),
        (lambda: list(loaded.samples(tmp_path / "torn.mp4")), "torn.mp4: "),
        (lambda: loaded.preprocess(videos), "must be one video, got several; try samples"),
        (lambda: loaded.preprocess(np.zeros((2, 8, 8, 3))), rf"{array}float64 \(2, 8, 8, 3\)"),
        (lambda: loaded.preprocess(np.zeros((2, 8, 8), np.uint8)), rf"{array}uint8 \(2, 8, 8\)"),
        (lambda: loaded.preprocess(torch.zeros(1)), "a video must be a path or a uint8 array, got Tensor"),
        (lambda: loaded.preprocess([videos]), "a video must be a path or a uint8 array, got list"),
        (lambda: loaded.predict(clips, top=-1), "top must be at least 1, got -1"),
        (lambda: loaded.features(clips, "avgpol"), "got 'avgpol'; try avgpool"),
        (lambda: loaded.features(clips, ""), "got ''; try conv1, bn1, relu, maxpool, layer1, "),
        (lambda: more.features(clips, "unused"), "layer 'unused' does not run in a forward pass"),
    ):
        with pytest.raises(UserError, match=reason) as caught:
            call()
        assert "\n" not in str(caught.value)
