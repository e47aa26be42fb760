"""R-FCN's network: its counts, its stride, where its weights come from, and how it runs."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from summit_train.core.errors import UserError
from summit_train.models import VideoNetwork, build_model
from summit_train.models.build import build_network
from summit_train.models.count import count_model, count_network
from summit_train.models.fast import accelerate
from summit_train.models.network import recompute_blocks
from summit_train.models.online import StreamNetwork, cache_shapes
from summit_train.models.weights import load_pretrained
from summit_train.spec import ModelSpec, Spec
from summit_train.tasks.detection.rfcn import split_maps
from tests.closeness import assert_near
from tests.detectors import detector_spec

ONLINE = {"arch": "tsm", "shift_direction": "past"}


def _network(spec: Spec, seed: int = 1) -> VideoNetwork:
    """The spec's network with normalisations that show, in double."""
    generator = torch.Generator().manual_seed(seed)
    network = build_network(spec, generator)
    with torch.no_grad():
        for name, value in network.state_dict().items():
            if value.dim() == 1 and value.is_floating_point() and "detector" not in name:
                value.uniform_(0.5, 1.5, generator=generator)
    return network.double()


def _small(**model: object) -> Spec:
    return detector_spec(model={**detector_spec().model.model_dump(mode="json", exclude={"pretrained"}), **model})


def test_r_fcn_on_resnet_101_has_the_papers_parameters() -> None:
    """FGFA's symbol: 3x3 from 2048 to 1024, 18 + 36 of the proposals, 7 * 7 * 31 of the classes, 7 * 7 * 8 of the
    boxes. ResNet-101 without its classifier: 42,500,160.
    """
    model = {"arch": "tsm", "backbone": "resnet101", "num_classes": 30, "shift_direction": "past"}
    found = count_network(
        detector_spec(model={**model, "width": 1.0, "detector": {}}, data={"num_frames": 1, "short_side": [224, 224]})
    )
    head = (2048 * 9 + 1) * 1024, (512 + 1) * (18 + 36), (512 + 1) * 1519, (512 + 1) * 392
    assert head == (18_875_392, 27_702, 779_247, 201_096)
    assert found.parameters == 42_500_160 + sum(head)
    # res5 has 14 x 14 places in place of 7 x 7; its first 1x1 is in front of the stride and had them before.
    first = 9 * 512 * 512 + 512 * 2048 + 1024 * 2048
    others = 2 * (2048 * 512 + 9 * 512 * 512 + 512 * 2048)
    classifier = count_model(ModelSpec.model_validate({**model, "arch": "tsn"}), (1, 224, 224, 3))
    more = 147 * (first + others) + 196 * (2048 * 1024 * 9 + 512 * (18 + 36 + 1519 + 392))
    assert found.multiply_adds == classifier.multiply_adds - 2048 * 30 + more
    assert found.stages["res5"] == 1 and "global_pool" not in found.stages


def test_a_frame_of_600_x_1000_pixels_has_168_25_g_multiply_adds() -> None:
    """By hand: places x weights. The last stage keeps the places of the one before it, 38 x 63."""
    model = {"arch": "tsn", "backbone": "resnet101", "num_classes": 30, "width": 1.0, "detector": {}}
    data = {"num_frames": 1, "short_side": [480, 600], "long_side": 1000}
    places = [150 * 250, 150 * 250, 75 * 125, 38 * 63, 38 * 63]
    work, inputs = 300 * 500 * 64 * 147, 64
    for stage, (blocks, inner) in enumerate(zip((3, 4, 23, 3), (64, 128, 256, 512), strict=True)):
        before, after = places[stage : stage + 2]
        work += before * inputs * inner + after * (9 * inner**2 + inner * 4 * inner + inputs * 4 * inner)
        work += (blocks - 1) * after * (4 * inner * inner * 2 + 9 * inner**2)
        inputs = 4 * inner
    work += 38 * 63 * (2048 * 9 * 1024 + 512 * (18 + 36 + 1519 + 392))
    assert work == pytest.approx(168.25e9, rel=1e-4)
    for augment in ({"augment": "whole", "crop": 32}, {"augment": "whole", "crop": 4096}):
        assert count_network(detector_spec(model=model, data=data | augment)).multiply_adds == work
    square = count_network(detector_spec(model=model, data=data | {"augment": "multi_scale_crop", "crop": 608}))
    assert square.multiply_adds == pytest.approx(work * 38 * 38 / (38 * 63), rel=0.01)


@pytest.mark.parametrize("backbone", ["resnet18", "resnet50", "mobilenet_v2"])
@torch.inference_mode()
def test_maps_have_a_16th_of_the_frames_sides(backbone: str) -> None:
    spec = _small(backbone=backbone)
    network, clip = _network(spec).eval(), torch.randn(2, 2, 3, 33, 80, dtype=torch.float64)
    output = network(clip)
    # 2 anchors, 2 classes, 3 x 3 cells.
    assert output.shape == (2, 2, 2 * 2 + 2 * 4 + 9 * 3 + 9 * 8, 3, 5)
    assert spec.model.detector is not None
    maps = split_maps(output.flatten(0, 1), spec.model.detector, 2)
    assert [one.shape[1] for one in maps] == [4, 8, 27, 72]
    assert torch.equal(torch.cat(maps, 1), output.flatten(0, 1))
    # Each frame by itself.
    assert_near(output[:, 1:], network(clip.flip(1))[:, :1], 1e-12)


def test_the_last_stage_is_dilated_in_place_of_its_stride() -> None:
    for backbone, names in (
        ("resnet50", ["layer4.0.conv2", "layer4.1.conv2", "layer4.2.conv2"]),
        ("resnet18", ["layer4.0.conv1", "layer4.0.conv2", "layer4.1.conv1", "layer4.1.conv2"]),
        ("mobilenet_v2", [f"features.{n}.conv.1.0" for n in (14, 15, 16, 17)]),
    ):
        network = build_network(_small(backbone=backbone))
        convs = [(n, m) for n, m in network.named_modules() if isinstance(m, torch.nn.Conv2d) and m.dilation == (2, 2)]
        assert [name for name, _ in convs] == names
        assert all((conv.stride, conv.padding) == ((1, 1), (2, 2)) for _, conv in convs)


def test_weights_of_a_classification_network_load_and_the_new_layers_are_drawn(tmp_path: Path) -> None:
    trained = build_model("tsm", "resnet18", 2, 7, width=0.125, generator=torch.Generator().manual_seed(5))
    torch.save(trained.state_dict(), tmp_path / "w.pth")
    network = build_network(_small(**ONLINE), torch.Generator().manual_seed(1))
    drawn = copy.deepcopy(network.get_submodule("detector").state_dict())
    report = load_pretrained(network, tmp_path / "w.pth", ["a", "b"])
    own = network.state_dict()
    assert {*report.names("unexpected")} == {"fc.weight", "fc.bias"}
    assert all(torch.equal(own[name], value) for name, value in trained.state_dict().items() if "fc" not in name)
    assert {*report.names("missing")} == {f"detector.{name}" for name in drawn}
    assert all(torch.equal(own[f"detector.{name}"], value) for name, value in drawn.items())
    assert not any(value.any() for name, value in drawn.items() if name.endswith("bias"))
    weights = torch.cat([value.flatten() for name, value in drawn.items() if name.endswith("weight")])
    assert weights.std().item() == pytest.approx(0.01, rel=0.03) and weights.mean().abs() < 3e-4


def test_a_detectors_weights_for_other_classes_keep_all_but_the_class_maps(tmp_path: Path) -> None:
    network = build_network(_small(), torch.Generator().manual_seed(2))
    file = {"model": network.state_dict(), "classes": ["a", "b"], "spec": {"model": {}}}
    torch.save(file, tmp_path / "detector.pth")
    report = load_pretrained(build_network(_small()), tmp_path / "detector.pth", ["a", "c"])
    assert report.names("fresh") == ("detector.classes.weight", "detector.classes.bias")
    report = load_pretrained(build_network(_small(num_classes=3)), tmp_path / "detector.pth", ["a", "b", "c"])
    assert report.names("mismatched") == ("detector.classes.weight", "detector.classes.bias")


@pytest.mark.parametrize("backbone", ["resnet18", "mobilenet_v2"])
@torch.inference_mode()
def test_the_stream_gives_each_frame_the_clip_networks_maps(backbone: str) -> None:
    spec = _small(backbone=backbone, **ONLINE)
    network, clip = _network(spec).eval(), torch.randn(2, 2, 3, 48, 64, dtype=torch.float64)
    expected = network(clip)
    stream, caches = StreamNetwork(network), ()
    for number, frame in enumerate(clip.unbind(1)):
        maps, caches = stream(frame, caches)
        assert_near(maps, expected[:, number], 1e-12)
    assert not torch.equal(expected[:, 1], network(clip[:, 1:].expand(-1, 2, -1, -1, -1))[:, 0]), "the past matters"
    assert [shape[1:] for shape in cache_shapes(network.float(), 48, 64)][-1] == (3, 4)


def test_accelerated_and_recomputed_networks_are_the_plain_one() -> None:
    """With a dilated convolution behind a shift."""
    plain = _network(_small(**ONLINE))
    fast, recomputed = copy.deepcopy(plain), copy.deepcopy(plain)
    accelerate(fast)
    recompute_blocks(recomputed)
    clip = torch.randn(1, 2, 48, 64, 3, dtype=torch.float64).permute(0, 1, 4, 2, 3)
    for network in (plain, fast, recomputed):
        network.train()(clip).square().sum().backward()
    for other in (fast, recomputed):
        for (name, parameter), twin in zip(plain.named_parameters(), other.parameters(), strict=True):
            assert parameter.grad is not None and twin.grad is not None
            assert_near(twin.grad, parameter.grad, 1e-9, name)


def test_fgfas_frozen_parts_are_conv1_res2_and_all_norms() -> None:
    detector = {**detector_spec().model.model_dump(mode="json")["detector"], "freeze_stem": True}
    network = build_network(_small(detector=detector, pretrained="w.pth", freeze_bn="all")).train()
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[0] for name in trained} == {"layer2", "layer3", "layer4", "detector"}
    assert not any("bn" in name or "downsample.1" in name for name in trained)
    assert not any(m.training for m in network.modules() if isinstance(m, torch.nn.BatchNorm2d))
    mobile = build_network(_small(backbone="mobilenet_v2", detector=detector, pretrained="w.pth"))
    frozen = {name.split(".")[1] for name, parameter in mobile.named_parameters() if not parameter.requires_grad}
    assert frozen == {"0", "1", "2", "3"}
    with pytest.raises(UserError, match=r"model\.detector\.freeze_stem: must be false without model.pretrained"):
        _small(detector=detector)
