"""Class activation maps of real videos by a trained network: the map, its class, its frames, its foreground."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from summit_train.core.errors import RunFailed, UserError
from summit_train.data.manifest.files import FileStore, plain_manifest
from summit_train.data.video.encode import write_video
from summit_train.inference.cam.activation import Heatmap, Mapper, label_of
from summit_train.inference.cam.videos import save_maps
from summit_train.inference.trained import Trained, open_trained
from summit_train.models.network import build_network
from summit_train.models.precision import Normalise
from summit_train.spec import spec_from_values
from tests.closeness import assert_near
from tests.data.video.test_stream import noise
from tests.runs import changed_copy

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(trained_run: Path) -> Trained:
    """A network that sees whole frames at 64 pixels: its maps are 2 x 2 and more."""
    return open_trained(trained_run, ["evaluate.short_side=64", "evaluate.crops=full"])


def _heatmap(trained: Trained, video: Path, wanted: str | None = None) -> Heatmap:
    mapper = Mapper(trained, CPU, wanted)
    (found,) = mapper.heatmaps(FileStore(plain_manifest([str(video)]), ""), [0], "fail", predicted=False)
    assert isinstance(found, Heatmap)
    return found


def _video(path: Path, num_frames: int, size: tuple[int, int] = (48, 64)) -> Path:
    write_video(path, noise(num_frames, *size), quality=5)
    return path


def test_the_map_is_that_of_the_predicted_class(trained: Trained, motion_set: Path) -> None:
    video = motion_set / "videos/val_000003.mp4"
    found = _heatmap(trained, video)
    network = trained.network(CPU, ready=False)
    with torch.inference_mode():
        logits = network(Normalise(torch.float32, CPU)(torch.from_numpy(found.pictures[None])))[0]
    assert found.label == int(logits.argmax()) and found.name == trained.classes[found.label]
    assert_near(found.logit, float(logits[found.label]), 1e-5, beside=logits)
    assert_near(found.score, float(logits.softmax(0).max()), 1e-5, beside=logits)
    # The bias is left out of the picture, and counts once.
    assert_near(found.mean + float(trained.weights["fc.bias"][found.label]), found.logit, 1e-5, beside=logits)
    assert found.path == str(video) and found.map.shape == (4, 2, 2) and found.pictures.shape == (4, 64, 64, 3)
    # 8 frames, 4 wanted, one after the other, in the middle: 0 + (8 - 4) // 2.
    assert found.frames.tolist() == [2, 3, 4, 5] and found.slices.tolist() == [0, 1, 2, 3]


def test_the_view_is_the_whole_frame_or_the_centre(trained: Trained, trained_run: Path, tmp_path: Path) -> None:
    video = _video(tmp_path / "wide.mp4", 6, (32, 64))
    assert _heatmap(trained, video).map.shape == (4, 2, 4)
    for crops in (1, 3):
        square = open_trained(trained_run, ["evaluate.short_side=64", f"evaluate.crops={crops}"])
        found = _heatmap(square, video)
        assert found.map.shape == (4, 2, 2) and found.pictures.shape == (4, 64, 64, 3)
        assert Mapper(square, CPU).views()["crop"] == "centre square"
    assert Mapper(trained, CPU).views()["crop"] == "whole frame"


def test_a_slice_of_a_3d_network_has_several_frames(trained: Trained, tmp_path: Path) -> None:
    values = trained.spec.model_dump(mode="json")
    values["model"] |= {"arch": "eco_lite", "backbone": None}
    values["data"] |= {"num_frames": 8}
    spec = spec_from_values(values, "here")
    network = build_network(spec, torch.Generator().manual_seed(0))
    found = _heatmap(replace(trained, spec=spec, weights=network.state_dict()), _video(tmp_path / "a.mp4", 12))
    assert found.map.shape == (2, 2, 3) and found.pictures.shape == (8, 64, 85, 3)
    assert found.frames.tolist() == list(range(2, 10)) and found.slices.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found.foreground([0, 7], -1e9).shape == (2, 64, 85) and found.peak_frame in (4, 8)


def test_a_named_class(trained: Trained, motion_set: Path) -> None:
    video = motion_set / "videos/val_000000.mp4"
    by_name = [_heatmap(trained, video, name) for name in trained.classes]
    assert [one.label for one in by_name] == [0, 1, 2, 3]
    assert sum(one.score for one in by_name) == pytest.approx(1)
    by_number = _heatmap(trained, video, "2")
    assert by_number.name == trained.classes[2] and (by_number.map == by_name[2].map).all()
    predicted = _heatmap(trained, video)
    assert predicted.logit == max(one.logit for one in by_name)
    assert len({one.map.tobytes() for one in by_name}) == 4


def test_an_unknown_class_is_one_clear_line(trained: Trained, trained_run: Path, tmp_path: Path) -> None:
    nameless = open_trained(changed_copy(trained_run, tmp_path / "a.pt", classes=None))
    for one, wanted, reason in (
        (trained, trained.classes[0] + "x", f"did you mean {trained.classes[0]!r}"),
        (trained, "zzz", "it has right, up, left, down"),
        (trained, "4", "there is no class 4; its labels go from 0 to 3"),
        (nameless, "right", "it holds no names of classes; give a label from 0 to 3"),
    ):
        with pytest.raises(UserError, match=reason) as error:
            label_of(one, wanted)
        assert "\n" not in str(error.value) and str(one.path) in str(error.value)


def test_two_frames_are_a_video(trained: Trained, tmp_path: Path) -> None:
    found = _heatmap(trained, _video(tmp_path / "short.mp4", 2))
    assert found.frames.tolist() == [0, 1, 0, 1] and found.peak_frame in (0, 1)


def test_networks_with_other_heads_are_refused(trained: Trained) -> None:
    for arch, frames in (("trn", 4), ("slowfast", 8), ("x3d_m", 4)):
        spec = trained.spec.model_copy(update={"model": trained.spec.model.model_copy(update={"arch": arch})})
        with pytest.raises(UserError, match=f"{arch} has no class activation maps: .*; tsm, tsn, ") as error:
            Mapper(replace(trained, spec=spec), CPU)
        assert "\n" not in str(error.value) and frames


def test_weights_with_nan_are_named(trained: Trained, motion_set: Path) -> None:
    weights = trained.weights | {"conv1.weight": trained.weights["conv1.weight"] * float("nan")}
    with pytest.raises(RunFailed, match=r"val_000000\.mp4: the network of .*\.pt gives NaN"):
        _heatmap(replace(trained, weights=weights), motion_set / "videos/val_000000.mp4")


def _by_hand(num_slices: int = 2) -> Heatmap:
    """Four frames of 4 x 4 pixels with numbers 10, 12, 14, 16; maps of 2 x 2, the greatest value in the last slice."""
    maps = np.zeros((num_slices, 2, 2), np.float32)
    maps[-1, 0, 1] = 4.0
    frames, slices = np.array([10, 12, 14, 16]), np.arange(4) * num_slices // 4
    return Heatmap("a.mp4", 1, "jump", 0.5, 2.0, maps, frames, slices, np.zeros((4, 4, 4, 3), np.uint8))


def test_the_foreground_by_hand() -> None:
    # Of 4 pixels the outer ones are nearer to one place alone; the inner ones mix 3/4 and 1/4.
    weights = np.array([0, 0.25, 0.75, 1])
    resized = 4 * weights[::-1, None] * weights[None, :]
    found = _by_hand()
    for threshold in (0.5, 2.25, 2.5, 3.0, 4.0):
        above = found.foreground([0, 3, 2], threshold)
        assert not above[0].any()  # frame 10 belongs to the other slice: time is not resized
        assert (above[1] == (resized >= threshold)).all() and (above[2] == above[1]).all()
    assert found.foreground([3], 0.0).all()


def test_the_table_by_hand() -> None:
    assert _by_hand().record(4.0) == {
        "label": 1, "class": "jump", "score": 0.5, "logit": 2.0, "mean": 0.5, "peak_frame": 16, "foreground": 0.125,
        "threshold": 4.0,
    }  # fmt: skip
    assert _by_hand(4).peak_frame == 16 and _by_hand(1).peak_frame == 14
    assert _by_hand().record(4.5)["foreground"] == 0


def test_the_file_has_all_and_loads_without_pickle(tmp_path: Path) -> None:
    save_maps(tmp_path / "one.npz", (_by_hand(), 4.0))
    save_maps(tmp_path / "two.npz", (_by_hand(), 4.0), (_by_hand(1), 3.0))
    one, two = (np.load(tmp_path / f"{name}.npz", allow_pickle=False) for name in ("one", "two"))
    names = {"map", "frames", "slices", "path", "label", "class", "score", "logit", "threshold"}
    assert set(one) == names and set(two) == names | {f"beside_{name}" for name in names}
    assert (one["map"] == _by_hand().map).all() and one["map"].dtype == np.float32
    assert one["frames"].tolist() == [10, 12, 14, 16] and one["slices"].tolist() == [0, 0, 1, 1]
    assert (str(one["path"]), str(one["class"]), int(one["label"])) == ("a.mp4", "jump", 1)
    assert (float(one["score"]), float(one["logit"]), float(one["threshold"])) == (0.5, 2.0, 4.0)
    assert two["beside_map"].shape == (1, 2, 2) and float(two["beside_threshold"]) == 3.0
