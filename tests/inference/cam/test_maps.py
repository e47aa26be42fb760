"""Class activation maps of real videos by a trained network: the map, its class, its frames, and the threshold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from summit_train.core.errors import RunFailed, UserError
from summit_train.data.dataset import Dataset
from summit_train.data.video.encode import write_video
from summit_train.inference.cam.maps import Heatmap, Mapper, class_maps, measure_threshold
from summit_train.inference.trained import Trained, open_trained
from summit_train.inference.videos import list_videos
from summit_train.models import VideoNetwork, build_model
from summit_train.models.build import build_network
from summit_train.models.fast import accelerate
from summit_train.models.precision import Normalise
from summit_train.spec import spec_from_values
from summit_train.spec.catalog import ARCHITECTURES, maps_problem
from tests.closeness import assert_near
from tests.data.video.test_stream import noise

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(trained_run: Path) -> Trained:
    """A network that sees whole frames at 64 pixels: its maps are 2 x 2 and more."""
    return open_trained(trained_run, ["evaluate.short_side=64", "evaluate.crops=full"])


def _heatmap(trained: Trained, video: Path, wanted: str | None = None) -> Heatmap:
    mapper = Mapper(trained, CPU, wanted)
    (listing,) = list_videos([str(video)], trained, print)
    (found,) = mapper.heatmaps(listing, "fail", mapper.label)
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
    mean = float(found.map.mean())
    assert_near(mean + float(trained.weights["fc.bias"][found.label]), found.logit, 1e-5, beside=logits)
    assert found.path == str(video) and found.map.shape == (4, 2, 2) and found.pictures.shape == (4, 64, 64, 3)
    # 4 of 8 frames, one after the other, in the middle: 0 + (8 - 4) // 2.
    assert found.frames.tolist() == [2, 3, 4, 5] and found.slices.tolist() == [0, 1, 2, 3]


def test_the_view_is_the_whole_frame_or_the_centre(trained: Trained, trained_run: Path, tmp_path: Path) -> None:
    video = _video(tmp_path / "wide.mp4", 6, (32, 64))
    assert _heatmap(trained, video).map.shape == (4, 2, 4)
    for crops in (1, 3):
        square = open_trained(trained_run, ["evaluate.short_side=64", f"evaluate.crops={crops}"])
        found = _heatmap(square, video)
        assert found.map.shape == (4, 2, 2) and found.pictures.shape == (4, 64, 64, 3)
    short = _heatmap(trained, _video(tmp_path / "short.mp4", 2))
    assert short.frames.tolist() == [0, 1, 0, 1] and short.record(0)["peak_frame"] in (0, 1)


def test_a_slice_of_a_3d_network_has_several_frames(trained: Trained, tmp_path: Path) -> None:
    values = trained.spec.model_dump(mode="json")
    values["model"] |= {"arch": "eco_lite", "backbone": None}
    values["data"] |= {"num_frames": 8}
    spec = spec_from_values(values, "here")
    network = build_network(spec, torch.Generator().manual_seed(0))
    found = _heatmap(replace(trained, spec=spec, weights=network.state_dict()), _video(tmp_path / "a.mp4", 12))
    assert found.map.shape == (2, 2, 3) and found.pictures.shape == (8, 64, 85, 3)
    assert found.frames.tolist() == list(range(2, 10)) and found.slices.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found.pixels([0, 7]).shape == (2, 64, 85) and found.record(0)["peak_frame"] in (4, 8)


def test_a_named_class(trained: Trained, motion_set: Path) -> None:
    video = motion_set / "videos/val_000000.mp4"
    by_name = [_heatmap(trained, video, name) for name in trained.classes]
    assert [one.label for one in by_name] == [0, 1, 2, 3]
    assert sum(one.score for one in by_name) == pytest.approx(1)
    by_number = _heatmap(trained, video, "2")
    assert by_number.name == trained.classes[2] and (by_number.map == by_name[2].map).all()
    assert _heatmap(trained, video).logit == max(one.logit for one in by_name)
    assert len({one.map.tobytes() for one in by_name}) == 4


def test_other_classes_and_other_heads_are_refused(trained: Trained) -> None:
    for wanted, hint in (("rigth", "did you mean 'right'"), ("zzz", "its classes are right"), ("4", "its classes are")):
        with pytest.raises(UserError, match=rf"\.pt: class '{wanted}' not found; {hint}") as error:
            Mapper(trained, CPU, wanted)
        assert "\n" not in str(error.value)
    spec = trained.spec.model_copy(update={"model": trained.spec.model.model_copy(update={"arch": "slowfast"})})
    with pytest.raises(UserError, match=r"\.pt: slowfast has no class activation maps: .*; tsm, tsn, "):
        Mapper(replace(trained, spec=spec), CPU)


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


def test_the_map_of_each_pixel_by_hand() -> None:
    # Of 4 pixels the outer ones are nearer to one place alone; the inner ones mix 3/4 and 1/4.
    weights = np.array([0, 0.25, 0.75, 1])
    resized = 4 * weights[::-1, None] * weights[None, :]
    first, last, third = _by_hand().pixels([0, 3, 2])
    assert not first.any()  # frame 10 belongs to the other slice: time is not resized
    assert np.allclose(last, resized, rtol=1e-6) and (third == last).all()


def test_the_row_of_the_table_by_hand() -> None:
    assert _by_hand().record(4.0) == {
        "label": 1, "class": "jump", "score": 0.5, "logit": 2.0, "mean": 0.5, "peak_frame": 16, "foreground": 0.125,
        "threshold": 4.0,
    }  # fmt: skip
    assert _by_hand(4).record(0)["peak_frame"] == 16 and _by_hand(1).record(0)["peak_frame"] == 14
    assert _by_hand().record(4.5)["foreground"] == 0


@pytest.fixture
def val(motion_set: Path, tmp_path: Path) -> list[str]:
    """Overrides that name ten validation videos."""
    return _set(tmp_path / "val.csv", motion_set, range(10))


def _set(path: Path, motion_set: Path, videos: Iterable[int], *more: str) -> list[str]:
    rows = [line.split(",")[:2] for line in (motion_set / "val.csv").read_text().splitlines()[1:]]
    path.write_text("\n".join(["path,label", *(",".join(rows[video]) for video in videos), *more]) + "\n")
    return [f"data.val={path}", f"data.root={motion_set}"]


def test_the_threshold_keeps_a_fifth_of_the_validation_set(trained_run: Path, val: list[str]) -> None:
    mapper = Mapper(open_trained(trained_run, val), CPU)
    found = measure_threshold(mapper)
    heatmaps = list(mapper.heatmaps(Dataset.open(mapper.trained.spec, "val"), "fail"))
    pixels = np.sort(np.concatenate([one.map.ravel() for one in heatmaps if isinstance(one, Heatmap)]))[::-1]
    assert pixels[8] < found.pop("threshold") <= pixels[7]  # the eighth of forty is foreground, the ninth is not
    path = val[0].removeprefix("data.val=")
    assert found == {"kept": 0.2, "val": path, "videos": 10, "pixels": pixels.size, "bad_videos": []}


def test_bad_validation_videos(trained_run: Path, motion_set: Path, tmp_path: Path) -> None:
    def measured(*more: str) -> dict[str, Any]:
        words = [*_set(tmp_path / "val.csv", motion_set, range(3), "missing.mp4,0"), *more]
        return measure_threshold(Mapper(open_trained(trained_run, words), CPU))

    with pytest.raises(UserError, match=r"missing\.mp4: No such file"):
        measured()
    with pytest.raises(RunFailed, match=r"1 of 4 videos could not be read, more than data\.max_bad_fraction"):
        measured("data.on_bad_clip=skip")
    found = measured("data.on_bad_clip=skip", "data.max_bad_fraction=0.5")
    assert found["videos"] == 3 and found["pixels"] == 3 * 4
    assert found["bad_videos"] == [[str(motion_set / "missing.mp4"), "No such file or directory"]]


NETWORKS = [
    ("tsm", "resnet18", 4, (4, 2, 3)),
    ("tsn", "resnet50", 2, (2, 2, 3)),
    ("tsm", "mobilenet_v2", 4, (4, 2, 3)),
    ("i3d_3x3x3", "resnet18", 16, (1, 2, 3)),
    ("i3d_3x1x1", "resnet50", 16, (2, 2, 3)),
    ("i3d_replace", "resnet50", 3, (3, 2, 3)),
    ("ir_csn", "resnet152", 16, (2, 2, 3)),
    ("eco_lite", None, 8, (2, 2, 3)),
]


def classifier(network: VideoNetwork) -> nn.Linear:
    (linear,) = (module for module in network.get_submodule(network.head).modules() if isinstance(module, nn.Linear))
    return linear


def built(arch: str, backbone: str | None, frames: int) -> tuple[VideoNetwork, torch.Tensor]:
    """A narrow network in double precision whose features and classifier say something, and two 64 x 96 clips."""
    generator = torch.Generator().manual_seed(0)
    network = build_model(arch, backbone, frames, 5, width=0.125, dropout=0.5, generator=generator).double()
    clips = torch.randn(2, frames, 3, 64, 96, dtype=torch.double, generator=generator)
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 1.0
    with torch.no_grad():
        network.train()(clips)  # with the statistics of fresh norms the features of deep networks vanish
    linear = classifier(network)
    nn.init.normal_(linear.weight, generator=generator)
    nn.init.normal_(linear.bias, generator=generator)
    return network.eval(), clips


@pytest.mark.parametrize(("arch", "backbone", "frames", "shape"), NETWORKS)
@torch.inference_mode()
def test_the_mean_of_a_map_and_the_bias_once_is_the_logit(
    arch: str, backbone: str | None, frames: int, shape: tuple[int, ...]
) -> None:
    network, clips = built(arch, backbone, frames)
    logits = network(clips)
    maps, own_logits = class_maps(network, network.feature_maps(network.to_input(clips)), len(clips))
    assert maps.shape == (2, 5, *shape)
    assert maps.std() > 0.1  # the maps are no constants
    expected = maps.mean((2, 3, 4)) + classifier(network).bias
    assert_near(expected, logits, 1e-12)
    assert_near(own_logits, logits, 1e-12)
    accelerate(network)
    assert_near(network(clips), logits, 1e-9)


@torch.inference_mode()
def test_a_place_of_a_map_by_hand() -> None:
    network, _ = built("tsn", "resnet18", 2)
    linear = classifier(network)
    # Two clips of two frames, all features zero but one of the second clip's first frame.
    features = torch.zeros(4, linear.in_features, 2, 3, dtype=torch.double)
    features[2, 7, 1, 2] = 3.0
    maps, logits = class_maps(network, features, 2)
    expected = torch.zeros(2, 5, 2, 2, 3, dtype=torch.double)
    expected[1, :, 0, 1, 2] = 3 * linear.weight[:, 7]
    assert_near(maps, expected, 1e-12)
    assert_near(logits, linear.bias + torch.stack([0 * linear.bias, linear.weight[:, 7] * 3 / 12]), 1e-12)


def test_other_heads_are_refused_by_name() -> None:
    assert [name for name in ARCHITECTURES if maps_problem(name)] == ["trn", "slowfast", "x3d_m", "vit"]
    for name in ("trn", "slowfast", "x3d_m", "vit"):
        problem = maps_problem(name) or ""
        assert problem.startswith(f"{name} has no class activation maps: ") and "tsm, tsn, i3d_3x3x3" in problem
    built_in = {arch for arch, *_ in NETWORKS}
    assert built_in == {name for name in ARCHITECTURES if maps_problem(name) is None}
