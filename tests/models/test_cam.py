"""Class maps: their mean is the logit, and a map is what one weight row makes of the features, worked by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from summit_train.inference.cam.maps import class_maps
from summit_train.models import VideoNetwork, build_model
from summit_train.models.fast import accelerate
from summit_train.spec.catalog import ARCHITECTURES, maps_problem
from tests.closeness import assert_near

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
