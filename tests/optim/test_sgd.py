"""SGD against a loop written by hand, and its two groups; tests/optim/test_solvers.py skips its updates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from summit_train.models import build_model
from summit_train.optim.solvers import build_sgd, parameter_groups, set_learning_rate
from tests.closeness import assert_all_near
from tests.optim.shared import give_gradients, network

MOMENTUM, DECAY = 0.9, 1e-2


def _started(model: nn.Module, momentum: float = MOMENTUM) -> torch.optim.SGD:
    return build_sgd(parameter_groups(model, DECAY), momentum)


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("arch", ["tsm", "i3d_3x3x3"])
def test_weights_decay_and_norms_and_biases_do_not(arch: str) -> None:
    model = build_model(arch, "resnet18", 16, 5, width=0.125)
    decayed, plain = parameter_groups(model, DECAY)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (DECAY, 0.0)
    names = {parameter: name for name, parameter in model.named_parameters()}
    by_layer: dict[bool, set[str]] = {True: set(), False: set()}
    for prefix, layer in model.named_modules():
        for name, _ in layer.named_parameters(prefix, recurse=False):
            is_weight = isinstance(layer, nn.Conv2d | nn.Conv3d | nn.Linear) and name.endswith("weight")
            by_layer[is_weight].add(name)
    for group, is_weight in ((decayed, True), (plain, False)):
        found = [names[parameter] for parameter in group["params"]]  # type: ignore[attr-defined]
        assert len(found) == len(set(found))
        assert set(found) == by_layer[is_weight]
    # ResNet-18: 20 convolutions and the classifier; 20 norms' scales and shifts and the classifier's bias.
    assert (len(by_layer[True]), len(by_layer[False])) == (21, 41)


@pytest.mark.parametrize("momentum", [MOMENTUM, 0.0])
def test_ten_updates_are_those_of_a_loop_by_hand(momentum: float) -> None:
    model = network().double()
    optimizer = _started(model, momentum)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]  # until it is set
    # Zeros before the first update, for every parameter; nothing without momentum.
    buffers = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert len(buffers) == (len(list(model.parameters())) if momentum else 0)
    assert not any(buffer.any() for buffer in buffers)
    expected = _weights(model)
    velocity = [torch.zeros_like(weight) for weight in expected]
    for step in range(10):
        lr = 0.1 * (step + 1) if step < 5 else 0.7 / step  # up and down: the LR stays out of the momentum
        give_gradients(model, step)
        for index, parameter in enumerate(model.parameters()):
            assert parameter.grad is not None
            decay = DECAY if parameter.ndim > 1 else 0.0
            gradient = parameter.grad + decay * expected[index]
            velocity[index] = momentum * velocity[index] + gradient
            expected[index] = expected[index] - lr * velocity[index]
        set_learning_rate(optimizer, lr)
        optimizer.step()
    assert_all_near(_weights(model), expected, 1e-12)


@pytest.mark.parametrize("backbone", ["resnet18", "mobilenet_v2"])
def test_the_classifier_can_have_a_factor_on_its_lr(backbone: str) -> None:
    model = build_model("tsn", backbone, 4, 5, width=0.125)
    groups = parameter_groups(model, DECAY, {model.head: 5.0})
    keys = [(group["weight_decay"], group["lr_factor"]) for group in groups]
    assert keys == [(DECAY, 1.0), (0.0, 1.0), (DECAY, 5.0), (0.0, 5.0)]
    (linear,) = (module for module in model.modules() if isinstance(module, nn.Linear))
    assert groups[2]["params"] == [linear.weight] and groups[3]["params"] == [linear.bias]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    optimizer = build_sgd(groups, MOMENTUM)
    set_learning_rate(optimizer, 0.2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.2, 1.0, 1.0]


@pytest.mark.parametrize(("arch", "backbone"), [("tsn", "resnet18"), ("tsn", "mobilenet_v2"), ("slowfast", None)])
def test_the_first_convolution_can_have_a_factor_on_its_lr(arch: str, backbone: str | None) -> None:
    model = build_model(arch, backbone, 8, 5, width=0.125, in_channels=10)
    groups = parameter_groups(model, DECAY, {model.head: 2.0} | dict.fromkeys(model.stem, 5.0))
    # It has no bias, so that it is one group; the normalisation after it keeps the others' LR.
    assert [(group["weight_decay"], group["lr_factor"]) for group in groups[4:]] == [(DECAY, 5.0)]
    (first,) = groups[4:]
    seeing = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Conv3d) and m.in_channels == 10]
    assert first["params"] == [conv.weight for conv in seeing]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    # Factors of one size share their groups.
    assert len(parameter_groups(model, DECAY, {model.head: 5.0} | dict.fromkeys(model.stem, 5.0))) == 4
