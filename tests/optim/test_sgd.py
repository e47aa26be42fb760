"""SGD against a loop written by hand, its two groups, and updates that are skipped on the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from summit_train.models import build_model
from summit_train.optim.sgd import build_sgd, parameter_groups, set_learning_rate
from tests.closeness import assert_all_near

MOMENTUM, DECAY = 0.9, 1e-2


def _network(arch: str = "tsm") -> nn.Module:
    torch.manual_seed(0)
    return build_model(arch, "resnet18", 4, 5, width=0.125)


def _gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)


def _started(model: nn.Module, momentum: float = MOMENTUM) -> torch.optim.SGD:
    optimizer = build_sgd(parameter_groups(model, DECAY), momentum)
    return optimizer


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _buffers(optimizer: torch.optim.SGD) -> list[torch.Tensor]:
    return [
        optimizer.state[parameter]["momentum_buffer"].clone()
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


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
    model = _network().double()
    optimizer = _started(model, momentum)
    expected = _weights(model)
    velocity = [torch.zeros_like(weight) for weight in expected]
    for step in range(10):
        lr = 0.1 * (step + 1) if step < 5 else 0.7 / step  # up and down: the LR stays out of the momentum
        _gradients(model, step)
        for index, parameter in enumerate(model.parameters()):
            assert parameter.grad is not None
            decay = DECAY if parameter.ndim > 1 else 0.0
            gradient = parameter.grad + decay * expected[index]
            velocity[index] = momentum * velocity[index] + gradient
            expected[index] = expected[index] - lr * velocity[index]
        set_learning_rate(optimizer, lr)
        optimizer.step()
    assert_all_near(_weights(model), expected, 1e-12)


def test_the_learning_rate_is_zero_until_it_is_set() -> None:
    model = _network()
    optimizer = _started(model)
    before = _weights(model)
    _gradients(model, 0)
    optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(_weights(model), before, strict=True))
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


@pytest.mark.parametrize("backbone", ["resnet18", "mobilenet_v2"])
def test_the_classifier_can_have_a_factor_on_its_lr(backbone: str) -> None:
    model = build_model("tsn", backbone, 4, 5, width=0.125)
    groups = parameter_groups(model, DECAY, {model.head: 5.0})
    assert [(group["weight_decay"], group["lr_factor"]) for group in groups] == [
        (DECAY, 1.0),
        (0.0, 1.0),
        (DECAY, 5.0),
        (0.0, 5.0),
    ]
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


@pytest.mark.parametrize("good_steps", [0, 1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.0])
def test_a_skipped_update_leaves_weights_and_momentum_untouched(good_steps: int, bad: float) -> None:
    model, twin = _network(), _network()
    optimizer, twin_optimizer = _started(model), _started(twin)
    for either in (optimizer, twin_optimizer):
        set_learning_rate(either, 0.1)
    for step in range(good_steps):
        _step(model, optimizer, step, skipped=0.0)
        _step(twin, twin_optimizer, step, skipped=0.0)
    weights, buffers = _weights(model), _buffers(optimizer)
    _step(model, optimizer, 99, skipped=1.0, factor=bad)
    assert all(torch.equal(one, other) for one, other in zip(_weights(model), weights, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(_buffers(optimizer), buffers, strict=True))
    # And goes on as one that never met the bad step.
    _step(model, optimizer, 7, skipped=0.0)
    _step(twin, twin_optimizer, 7, skipped=0.0)
    assert not torch.equal(_weights(model)[0], weights[0])
    assert all(torch.equal(one, other) for one, other in zip(_weights(model), _weights(twin), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(_buffers(optimizer), _buffers(twin_optimizer), strict=True))


def _step(model: nn.Module, optimizer: torch.optim.SGD, seed: int, skipped: float, factor: float = 1.0) -> None:
    _gradients(model, seed)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= factor
    optimizer.found_inf = torch.tensor(skipped)  # type: ignore[attr-defined]
    optimizer.step()


def test_gradients_are_divided_by_the_scale_before_decay_and_momentum() -> None:
    model, twin = _network(), _network()
    optimizer, twin_optimizer = _started(model), _started(twin)
    for step in range(3):
        for network, sgd, scale in ((model, optimizer, 1024.0), (twin, twin_optimizer, 1.0)):
            set_learning_rate(sgd, 0.1)
            sgd.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
            _step(network, sgd, step, skipped=0.0, factor=scale)
    # A power of two: no rounding.
    assert all(torch.equal(one, other) for one, other in zip(_weights(model), _weights(twin), strict=True))


def test_momentum_starts_at_zero_for_every_parameter_and_only_where_there_is_one() -> None:
    model = _network()
    optimizer = _started(model)
    assert all(not buffer.any() for buffer in _buffers(optimizer))
    assert [buffer.shape for buffer in _buffers(optimizer)] == [
        parameter.shape for group in optimizer.param_groups for parameter in group["params"]
    ]
    assert not _started(model, momentum=0.0).state
