"""Parameters by name: patterns, what a spec freezes and for how long, factors on the LR; names that nothing has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from summit_train.core.errors import UserError
from summit_train.core.own_parts import OwnPart
from summit_train.models.build import build_model, build_network
from summit_train.models.by_name import freeze_by_name, frozen_until, lr_factors, named
from summit_train.models.count import count_network
from summit_train.models.foreign import ForeignNetwork
from summit_train.models.video import VideoNetwork, freeze_norms, trained_norms
from summit_train.spec import Spec
from summit_train.spec.keys import OptimizerSpec


def _network() -> VideoNetwork:
    return build_model("tsm", "resnet18", 4, 5, width=0.125)


def _spec(model: Mapping[str, Any] | None = None, **optimizer: Any) -> Spec:
    network = {"arch": "tsm", "backbone": "resnet18", "width": 0.125, "num_classes": 5, **(model or {})}
    data = {"train": "t.csv", "val": "v.csv", "num_frames": 4, "crop": 32, "short_side": (32, 40)}
    return Spec.model_validate({"name": "a", "model": network, "data": data, "optimizer": optimizer}, strict=False)


def _trained(network: torch.nn.Module) -> set[str]:
    return {name for name, parameter in network.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["fc"], ["fc.weight", "fc.bias"]),
        (["fc.*"], ["fc.weight", "fc.bias"]),
        (["conv1"], ["conv1.weight"]),  # not layer1.0.conv1
        (["fc.bias", "conv1"], ["conv1.weight", "fc.bias"]),
        (["layer1.?.bn1"], [f"layer1.{block}.bn1.{kind}" for block in (0, 1) for kind in ("weight", "bias")]),
        (["layer[12].0.conv1"], ["layer1.0.conv1.weight", "layer2.0.conv1.weight"]),
        (
            ["*.downsample"],
            [f"layer{n}.0.downsample.{p}" for n in (2, 3, 4) for p in ("0.weight", "1.weight", "1.bias")],
        ),
    ],
)
def test_a_pattern_names_parameters_or_modules_with_all_of_theirs(patterns: list[str], expected: list[str]) -> None:
    assert named(_network(), patterns, "key") == expected


def test_patterns_of_a_layer_name_the_same() -> None:
    network = _network()
    names = [name for name, _ in network.named_parameters() if name.startswith("layer1.")]
    assert len(names) == 12 and names == named(network, ["layer1"], "key") == named(network, ["layer1.*"], "key")
    assert named(network, ["*"], "key") == [name for name, _ in network.named_parameters()]


@pytest.mark.parametrize(
    ("pattern", "right"),
    [
        ("layer9", r"did you mean layer4 or layer3 or layer2\?"),
        ("fc.wieght", r"did you mean fc\.weight or "),
        ("Conv1", r"did you mean conv1"),
        ("zzz", r"valid: conv1, conv1\.weight, bn1, .* in all\)"),
    ],
)
def test_a_pattern_that_names_nothing_is_refused_with_the_nearest_names(pattern: str, right: str) -> None:
    with pytest.raises(UserError, match=rf"^optimizer\.freeze: '{pattern}' names no parameter of the network; {right}"):
        build_network(_spec(freeze=["fc", pattern]))
    with pytest.raises(UserError, match=rf"^optimizer\.lr_factors: '{pattern}' names no parameter of the network"):
        count_network(_spec(lr_factors={pattern: 2.0}))


def test_what_is_frozen_and_for_how_long() -> None:
    """The longest of two entries holds; what freeze_bn has frozen is left to it."""
    network = _network()
    freeze_norms(network, "all")
    parts = ["conv1", {"names": ["layer1", "fc.bias"], "until_epoch": 2}, {"names": ["layer1.0"], "until_epoch": 3}]
    solver = OptimizerSpec.model_validate({"freeze": parts})
    assert [(part.names, part.until_epoch) for part in solver.freeze] == [
        (("conv1",), None), (("layer1", "fc.bias"), 2), (("layer1.0",), 3),
    ]  # fmt: skip
    network.frozen_until = frozen_until(network, solver)
    first = {"layer1.0.conv1.weight": 3, "layer1.0.conv2.weight": 3}
    second = {"layer1.1.conv1.weight": 2, "layer1.1.conv2.weight": 2, "fc.bias": 2}
    assert network.frozen_until == {"conv1.weight": math.inf, **first, **second}
    everything = _trained(network)
    for epoch, frozen in ((0, {**first, **second}), (1, {**first, **second}), (2, first), (3, {}), (99, {})):
        freeze_by_name(network, epoch)
        assert _trained(network) == everything - {"conv1.weight", *frozen}, epoch
    assert freeze_by_name(network, 3) == 0
    # Convolutions of 8 channels: 576 weights each; 5 biases.
    assert freeze_by_name(network, 2) == 2 * 576 and freeze_by_name(network, 0) == 2 * 576 + 5


def test_a_frozen_normalisation_keeps_its_statistics_until_it_is_trained() -> None:
    network = build_network(_spec({"freeze_bn": "none"}, freeze=[{"names": ["layer1", "bn1"], "until_epoch": 1}]))
    modes = {name: module.training for name, module in network.named_modules() if "bn" in name}
    assert {name for name, is_training in modes.items() if not is_training} == {
        "bn1", "layer1.0.bn1", "layer1.0.bn2", "layer1.1.bn1", "layer1.1.bn2",
    }  # fmt: skip
    freeze_by_name(network, 1)
    assert all(module.training for module in network.modules())
    network.eval()
    freeze_by_name(network, 0)
    assert not any(module.training for module in network.modules())


def test_everything_frozen_is_refused() -> None:
    with pytest.raises(UserError, match=r"optimizer\.freeze: at least one parameter must be trained from the first"):
        build_network(_spec(freeze=["fc", {"names": ["*"], "until_epoch": 1}]))


def test_a_plan_counts_what_is_trained_at_the_end() -> None:
    everything = count_network(_spec()).trained_parameters
    frozen = count_network(_spec(freeze=["layer1", {"names": ["fc"], "until_epoch": 99}]))
    # Four convolutions of 576 weights and four normalisations of 16.
    assert everything - frozen.trained_parameters == 4 * 576 + 4 * 16 and frozen.parameters == everything


def test_factors_by_name_multiply_the_others() -> None:
    network, factors = _network(), {"fc": 5.0, "*.bias": 0.5, "conv1": 0.25}
    solver = OptimizerSpec(lr_factors=factors, head_lr_factor=2.0, first_lr_factor=8.0)
    found = lr_factors(network, solver)
    chosen = {name: found.get(name, 1.0) for name in ("fc.weight", "fc.bias", "conv1.weight", "bn1.bias", "bn1.weight")}
    assert chosen == {"fc.weight": 10.0, "fc.bias": 5.0, "conv1.weight": 2.0, "bn1.bias": 0.5, "bn1.weight": 1.0}
    layered = lr_factors(network, solver.model_copy(update={"layer_decay": 0.5}))
    assert layered["layer4.1.bn1.bias"] == 0.25 and layered["layer4.1.bn1.weight"] == 0.5


class _Shared(torch.nn.Module):
    """Two linear layers with one weight, behind a normalisation without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(3, affine=False)
        self.first = torch.nn.Linear(3, 3)
        self.head = torch.nn.Linear(3, 3)
        self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.first(self.norm(x.flatten(0, 1)).mean((2, 3))))
        return logits


def _foreign() -> ForeignNetwork:
    return ForeignNetwork(_Shared(), OwnPart("model.arch", "a.py:b", {}, "0"), 1, 3, 3)


@pytest.mark.parametrize(
    ("freeze", "frozen", "number"),
    [
        (["norm"], {"norm"}, 6),  # its running mean and variance
        (["norm", "head"], {"norm", "first.weight", "head.bias"}, 6 + 9 + 3),
        (["head.weight"], {"first.weight"}, 9),
        (["first"], {"first.weight", "first.bias"}, 12),
    ],
)
def test_a_norm_without_weights_and_a_shared_weight_are_frozen_by_name(
    freeze: list[str], frozen: set[str], number: int
) -> None:
    network = _foreign()
    parts = [{"names": freeze, "until_epoch": 2}]
    network.frozen_until = frozen_until(network, OptimizerSpec.model_validate({"freeze": parts}))
    assert network.frozen_until == dict.fromkeys(frozen, 2)
    assert freeze_by_name(network, 0) == number and freeze_by_name(network, 1) == 0
    assert _trained(network) == {"first.weight", "first.bias", "head.bias"} - frozen
    for epoch in (1, 2):
        norm = network.train().get_submodule("norm")
        before = norm.get_buffer("running_mean").clone()
        network(torch.ones(2, 1, 3, 4, 4))
        keeps = "norm" in frozen and epoch == 1
        assert len(trained_norms(network)) == (not keeps)
        assert torch.equal(norm.get_buffer("running_mean"), before) == keeps
        assert freeze_by_name(network, 2) == (number if epoch == 1 else 0)
    assert _trained(network) == {"first.weight", "first.bias", "head.bias"}


def test_a_norm_without_weights_is_nothing_to_train_or_to_give_an_lr() -> None:
    network = _foreign()
    with pytest.raises(UserError, match="at least one parameter must be trained"):
        frozen_until(network, OptimizerSpec.model_validate({"freeze": ["first", "head"]}))
    with pytest.raises(UserError, match=r"optimizer\.lr_factors: 'norm' names no parameter"):
        lr_factors(network, OptimizerSpec(lr_factors={"norm": 2.0}))


def test_a_factor_on_the_lr_reaches_a_shared_weight() -> None:
    network = _foreign()
    assert lr_factors(network, OptimizerSpec(head_lr_factor=5.0)) == {"first.weight": 5.0, "head.bias": 5.0}
    assert lr_factors(network, OptimizerSpec(lr_factors={"head.weight": 3.0}))["first.weight"] == 3
