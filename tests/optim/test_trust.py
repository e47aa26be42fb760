"""Trust ratios against steps worked by hand, timm's LARS, and what they must leave alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from summit_train.optim.solvers import build_solver, parameter_groups, set_learning_rate
from summit_train.optim.trust import Ratios, TrustRatio
from summit_train.spec.keys import OptimizerSpec, TrustRatioSpec
from tests.closeness import assert_all_near, assert_near
from tests.optim.shared import give_gradients, network
from tests.timms import needs_timm, timm_module

LARS = TrustRatioSpec(kind="lars", coefficient=0.5)
BOUNDED = TrustRatioSpec(kind="bounded")
PLAIN = {"name": "sgd", "momentum": 0.0}


class _Layers(nn.Module):
    """A weight of length 5, one of zeros, and a bias of length 2, in double."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(1, 2, dtype=torch.float64))
        self.bias = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))


class _Solver:
    """An optimizer of `model` with a trust ratio, as the step of training drives it."""

    def __init__(self, model: nn.Module, trust: TrustRatioSpec | None, decay: float = 0.0, **keys: Any) -> None:
        spec = OptimizerSpec.model_validate({"weight_decay": decay} | keys)
        self.optimizer = build_solver(spec, parameter_groups(model, decay))
        self.trust = None if trust is None else TrustRatio(trust, model, self.optimizer)

    def step(self, lr: float, skipped: float = 0.0, scale: float | None = None) -> Ratios | None:
        set_learning_rate(self.optimizer, lr)
        self.optimizer.grad_scale = None if scale is None else torch.tensor(scale)  # type: ignore[attr-defined]
        self.optimizer.found_inf = torch.tensor(skipped)  # type: ignore[attr-defined]
        if self.trust is not None:
            return self.trust.update(torch.tensor(skipped))
        self.optimizer.step()
        return None


def _give(model: _Layers, kernel: list[float], empty: list[float], bias: float) -> None:
    model.kernel.grad = torch.tensor([kernel], dtype=torch.float64)
    model.empty.grad = torch.tensor([empty], dtype=torch.float64)
    model.bias.grad = torch.tensor([bias], dtype=torch.float64)


def _values(model: _Layers) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


@pytest.mark.parametrize(
    ("gradient", "bounds", "ratio"),
    [
        ([0.0, 2.0], (0.1, 10.0), 2.5),  # 5 / 2
        ([0.0, 100.0], (0.1, 10.0), 0.1),
        ([0.0, 0.1], (0.1, 10.0), 10.0),
        ([0.0, 0.0], (0.1, 10.0), 1.0),  # |g| is 0
        ([0.0, 0.0], (2.0, 10.0), 2.0),
        ([0.0, 0.0], (0.1, 0.5), 0.5),
    ],
)
def test_the_bounded_ratio_by_hand(gradient: list[float], bounds: tuple[float, float], ratio: float) -> None:
    """DATE, Algorithm 1, lines 13 to 17. Weight decay is a part of the update and not of the ratio."""
    model, (lower, upper) = _Layers(), bounds
    solver = _Solver(model, TrustRatioSpec(kind="bounded", lower=lower, upper=upper), decay=0.5, **PLAIN)
    _give(model, gradient, [1.0, 0.0], 1.0)
    found = solver.step(0.1)
    assert found is not None
    of_zeros = min(max(1.0, lower), upper)
    of_bias = min(max(2.0, lower), upper)
    assert found.read() == {"kernel": pytest.approx(ratio), "empty": of_zeros, "bias": pytest.approx(of_bias)}
    kernel = [3 - 0.1 * ratio * (gradient[0] + 1.5), 4 - 0.1 * ratio * (gradient[1] + 2.0)]
    assert _values(model) == pytest.approx([*kernel, -0.1 * of_zeros, 0.0, 2 - 0.1 * of_bias], rel=1e-12)


def test_the_bounded_ratio_multiplies_the_lr_and_stays_out_of_the_momentum() -> None:
    """v <- m v + g; w <- w - lr r v."""
    model = _Layers()
    solver = _Solver(model, BOUNDED, name="sgd", momentum=0.5)
    _give(model, [0.0, 2.0], [0.0, 0.0], 0.0)
    solver.step(0.1)  # r = 2.5: 4 - 0.1 * 2.5 * 2
    assert model.kernel.tolist() == [[3.0, pytest.approx(3.5)]]
    _give(model, [0.0, 1.0], [0.0, 0.0], 0.0)
    solver.step(0.2)  # v = 0.5 * 2 + 1, r = sqrt(9 + 12.25) / 1
    assert model.kernel.tolist() == [[3.0, pytest.approx(3.5 - 0.2 * 21.25**0.5 * 2)]]


def test_two_steps_of_lars_by_hand() -> None:
    """v <- m v + lr r (g + decay w); w <- w - v, r = coefficient |w| / (|g| + decay |w|); the LR is in the momentum."""
    model = _Layers()
    solver = _Solver(model, LARS, decay=0.2, name="sgd", momentum=0.5)
    _give(model, [0.0, 4.0], [1.0, 0.0], 3.0)
    found = solver.step(0.1)
    # r = 0.5 * 5 / (4 + 1) = 0.5; g + decay w = (0.6, 4.8). The bias has neither ratio nor decay.
    assert found is not None and found.read() == {"kernel": pytest.approx(0.5), "empty": 1.0}
    first = [0.1 * 0.5 * 0.6, 0.1 * 0.5 * 4.8, 0.1, 0.0, 0.1 * 3]
    weights = [w - v for w, v in zip([3, 4, 0, 0, 2], first, strict=True)]
    assert _values(model) == pytest.approx(weights, rel=1e-12)

    _give(model, [1.0, 0.0], [0.0, 0.0], -1.0)
    solver.step(0.3)
    length = (weights[0] ** 2 + weights[1] ** 2) ** 0.5
    rate = 0.3 * 0.5 * length / (1 + 0.2 * length)
    pulls = [rate * (1 + 0.2 * weights[0]), rate * 0.2 * weights[1], 0.3 * 0.2 * weights[2], 0.0, -0.3]
    second = [0.5 * v + pull for v, pull in zip(first, pulls, strict=True)]
    assert _values(model) == pytest.approx([w - v for w, v in zip(weights, second, strict=True)], rel=1e-12)
    assert [(group["lr"], group["weight_decay"]) for group in solver.optimizer.param_groups] == [(0.3, 0.2), (0.3, 0.0)]


@needs_timm
def test_ten_steps_of_lars_are_timms() -> None:
    """timm's LR is outside the momentum, which is the same while the LR stays."""
    model, twin = network(torch.float64), network(torch.float64)
    solver = _Solver(model, TrustRatioSpec(kind="lars"), decay=0.01, name="sgd")
    timms = timm_module("optim.lars").Lars(parameter_groups(twin, 0.01), lr=2.0, momentum=0.9, eps=0.0)
    for step in range(10):
        for each in (model, twin):
            give_gradients(each, step)
        solver.step(2.0)
        timms.step()
    assert_all_near(model.parameters(), twin.parameters(), 1e-12)


@pytest.mark.parametrize("trust", [LARS, BOUNDED], ids=lambda trust: trust.kind)
@pytest.mark.parametrize("name", ["rmsprop", "adagrad", "adam"])
def test_over_an_adaptive_solver_each_move_is_times_its_ratio(name: str, trust: TrustRatioSpec) -> None:
    model, twin = network(torch.float64), network(torch.float64)
    solver, plain = _Solver(model, trust, decay=0.01, name=name), _Solver(twin, None, decay=0.01, name=name)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    for each in (model, twin):
        give_gradients(each, 0)
    found = solver.step(0.01)
    plain.step(0.01)
    assert found is not None
    ratios = found.read()
    assert len(ratios) == (8 if trust is BOUNDED else 3)
    moved = dict(twin.named_parameters())
    for key, weight in model.named_parameters():
        wanted = before[key] + ratios.get(key, 1.0) * (moved[key].detach() - before[key])
        assert_near(weight, wanted, 1e-12, key)
        length = before[key].norm() / (weight.grad if weight.grad is not None else weight).norm()
        if trust is BOUNDED:
            assert ratios[key] == pytest.approx(float(length.clamp(0.1, 10)) if before[key].any() else 1.0)


TRUSTED: dict[str, dict[str, Any]] = {
    "lars": {"name": "sgd", "trust": LARS},
    "bounded": {"name": "sgd", "trust": BOUNDED},
    "lars_rmsprop": {"name": "rmsprop", "momentum": 0.9, "trust": LARS},
    "bounded_adam": {"name": "adam", "trust": BOUNDED},
    "bounded_lamb": {"name": "lamb", "trust": BOUNDED},
}


@pytest.mark.parametrize("trusted", TRUSTED)
def test_a_skipped_step_moves_nothing_and_ratios_are_of_unscaled_gradients(trusted: str) -> None:
    model, twin = network(torch.float32), network(torch.float32)
    solver, other = _Solver(model, decay=0.01, **TRUSTED[trusted]), _Solver(twin, decay=0.01, **TRUSTED[trusted])
    for step in range(3):
        give_gradients(model, step, 1024.0)
        solver.step(0.01, scale=1024.0)  # a power of two: no rounding
        give_gradients(twin, step)
        other.step(0.01)
        give_gradients(model, 99, float("nan"))
        found = solver.step(0.01, skipped=1.0)
        assert found is not None and set(found.read().values()) == {1.0}
        assert all(torch.equal(one, two) for one, two in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_lars_over_biases_alone_is_the_solver(name: str) -> None:
    models = [_Layers(), _Layers()]
    for model, trust in zip(models, (TrustRatioSpec(kind="lars"), None), strict=True):
        model.kernel.requires_grad_(False)
        model.empty.requires_grad_(False)
        solver = _Solver(model, trust, name=name)
        for gradient in (3.0, -1.0):
            model.bias.grad = torch.tensor([gradient], dtype=torch.float64)
            assert solver.step(0.5) is None
    assert _values(models[0]) == _values(models[1]) and models[0].bias.item() != 2
