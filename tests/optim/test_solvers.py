"""Every solver against steps by hand and torch's own, updates skipped on the device, and groups of parameters."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from summit_train.models import build_model
from summit_train.models.by_name import lr_factors
from summit_train.optim.solvers import build_sgd, build_solver, kept_state, parameter_groups, set_learning_rate
from summit_train.spec.keys import OptimizerSpec
from tests.closeness import assert_all_near, assert_near
from tests.optim.shared import give_gradients, network
from tests.timms import needs_timm, timm_module
from tests.worlds import run

SOLVERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "sgd_plain": {"name": "sgd", "momentum": 0.0},
    "rmsprop": {},
    "rmsprop_momentum": {"name": "rmsprop", "momentum": 0.9},
    "adagrad": {},
    "adam": {},
    "adamw": {},
    "lamb": {},
}
each_solver = pytest.mark.parametrize("solver", SOLVERS)
DECAY = 1e-2


def _spec(solver: str, **keys: Any) -> OptimizerSpec:
    return OptimizerSpec.model_validate({"name": solver, "weight_decay": DECAY} | SOLVERS[solver] | keys)


# A second and 820 modules of each rank's start; a process of its own, as tests have imported it.
def test_no_solver_imports_torchs_compiler() -> None:
    work = f"""
import sys
from summit_train.optim.solvers import build_solver, parameter_groups
from summit_train.spec.keys import OptimizerSpec
from tests.optim.shared import give_gradients, network
for keys in {[{"name": solver} | keys for solver, keys in SOLVERS.items()]}:
    model, spec = network(), OptimizerSpec.model_validate(keys)
    optimizer = build_solver(spec, parameter_groups(model, 0.1))
    give_gradients(model, 1)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
assert "torch.optim.sgd" in sys.modules and "torch._dynamo" not in sys.modules
"""
    assert run(0, "-c", work) == (0, "")


def _started(spec: OptimizerSpec, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = build_solver(spec, parameter_groups(model, spec.weight_decay))
    set_learning_rate(optimizer, 0.01)
    return optimizer


def _pair(solver: str) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """Two equal networks, each with a solver."""
    models = (network(), network())
    return [(model, _started(_spec(solver), model)) for model in models]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, skipped: float = 0.0, by: float = 1.0) -> None:
    """Make one update with random gradients, times `by`."""
    give_gradients(model, seed, by)
    if skipped or hasattr(optimizer, "found_inf"):
        optimizer.found_inf = torch.tensor(skipped)
    optimizer.step()


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], torch.Tensor]:
    """Copies of the weights and of the solver's state."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name, "weight"] = parameter.detach().clone()
        found |= {(name, key): value.clone() for key, value in optimizer.state[parameter].items() if value is not None}
    return found


def _assert_equal(one: dict[tuple[str, str], torch.Tensor], other: dict[tuple[str, str], torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


HALF = {"betas": (0.5, 0.75), "eps": 1}
ADAMS = [(1 - 0.2 / 3,), (1 - 0.2 / 3 + 0.2 / 9,)]
ROOT = 22.25**0.5


# Updates of one weight, LR 0.1. eps = 1 shows where it is added.
@pytest.mark.parametrize(
    ("keys", "start", "decay", "gradients", "weights"),
    [
        # v = 2; 0.5 * 2 + 1 = 2
        ({"name": "sgd", "momentum": 0.5}, (1,), 0, [(2,), (1,)], [(0.8,), (0.6,)]),
        # s = 0.25 * 4 = 1: 2 / (1 + 1); s = 0.75 + 0.25 = 1: 1 / (1 + 1)
        ({"name": "rmsprop", "alpha": 0.75, "eps": 1}, (1,), 0, [(2,), (1,)], [(0.9,), (0.85,)]),
        # v = 1; 0.5 * 1 + 0.5 = 1
        ({"name": "rmsprop", "alpha": 0.75, "eps": 1, "momentum": 0.5}, (1,), 0, [(2,), (1,)], [(0.9,), (0.8,)]),
        # s = 9: 3 / (3 + 1); s = 25: 4 / (5 + 1)
        ({"name": "adagrad", "eps": 1}, (1,), 0, [(3,), (4,)], [(0.925,), (0.925 - 0.4 / 6,)]),
        # m = 1, v = 1: 2 / (2 + 1); m = -0.5, v = 1.75: (-0.5 / 0.75) / (sqrt(1.75 / 0.4375) + 1) = -2 / 9
        ({"name": "adam", **HALF}, (1,), 0, [(2,), (-2,)], ADAMS),
        ({"name": "adamw", **HALF}, (1,), 0, [(2,), (-2,)], ADAMS),
        # As Adam: a bias has no ratio.
        ({"name": "lamb", **HALF}, (1,), 0, [(2,), (-2,)], ADAMS),
        # The update has the length lr |w|: Adam's direction is (2/3, 0), then (-2/9, 0).
        ({"name": "lamb", **HALF}, [(3, 4)], 0, [[(2, 0)], [(-2, 0)]], [[(2.5, 4)], [(2.5 + 0.1 * ROOT, 4)]]),
        # Without a gradient u = w / 2, its ratio 2: the decay is a part of the update.
        ({"name": "lamb"}, [(3, 4)], 0.5, [[(0, 0)]], [[(2.7, 3.6)]]),
        ({"name": "lamb"}, [(3, 4)], 0, [[(0, 0)]], [[(3, 4)]]),  # |u| is 0
        ({"name": "lamb"}, [(0, 0)], 0.5, [[(0, 0)]], [[(0, 0)]]),  # both are
        # Decay is no part of the gradient, by which adam would move by the LR.
        ({"name": "adamw"}, [(2,)], 0.5, [[(0,)], [(0,)]], [[(2 * 0.95,)], [(2 * 0.95**2,)]]),
    ],
)
def test_updates_by_hand(
    keys: dict[str, Any], start: Any, decay: float, gradients: list[Any], weights: list[Any]
) -> None:
    weight = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    groups: list[dict[str, Any]] = [{"params": [weight], "weight_decay": decay, "has_ratio": weight.dim() > 1}]
    optimizer = build_solver(OptimizerSpec.model_validate(keys), groups)
    set_learning_rate(optimizer, 0.1)
    for gradient, expected in zip(gradients, weights, strict=True):
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        assert_near(weight, torch.tensor(expected, dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("adapter", ["none", "shift", "st"])
def test_lamb_gives_weights_a_ratio_and_biases_norms_and_positions_none(adapter: str) -> None:
    """The gradient 1 gives the first direction 1: a bias moves by the LR, a weight by that times |w| / |u|."""
    model = build_model("vit", "vit_s", num_frames=4, num_classes=5, width=0.25, adapter=adapter)
    optimizer = build_solver(OptimizerSpec(name="lamb"), parameter_groups(model, 0.0))
    set_learning_rate(optimizer, 0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    undecayed = getattr(model, "undecayed", ())
    assert (set(undecayed) <= before.keys()) and bool(undecayed) == (adapter != "none")
    for name, parameter in model.named_parameters():
        length = before[name].norm() / parameter.numel() ** 0.5
        ratio = length if parameter.ndim > 1 and name not in undecayed and length else torch.tensor(1.0)
        moved = (before[name] - parameter).detach()
        torch.testing.assert_close(moved, (0.1 * ratio).expand_as(moved), rtol=1e-3, atol=1e-6, msg=name)


_TORCHS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd_plain": (torch.optim.SGD, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "rmsprop_momentum": (torch.optim.RMSprop, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adam": (torch.optim.Adam, {"fused": False}),
    "adamw": (torch.optim.AdamW, {"fused": False}),
}


@pytest.mark.parametrize("solver", _TORCHS)
def test_ten_updates_are_those_of_torchs_with_its_defaults(solver: str) -> None:
    model, twin = network(torch.float64), network(torch.float64)
    kind, options = _TORCHS[solver]
    ours, torchs = _started(_spec(solver), model), kind(parameter_groups(twin, DECAY), lr=0.01, **options)
    for step in range(10):
        for optimizer in (ours, torchs):  # up and down: the LR stays out of the state
            set_learning_rate(optimizer, 0.01 * (step + 1) if step < 5 else 0.1 / step)
        _step(model, ours, step)
        _step(twin, torchs, step)
    assert_all_near(model.parameters(), twin.parameters(), 1e-12)


@needs_timm
def test_ten_updates_of_lamb_are_timms() -> None:
    model, twin = network(torch.float64), network(torch.float64)
    timms = timm_module("optim.lamb").Lamb(parameter_groups(twin, DECAY), lr=0.01, max_grad_norm=None)
    ours = _started(_spec("lamb"), model)
    for step in range(10):
        _step(model, ours, step)
        _step(twin, timms, step)
    assert_all_near(model.parameters(), twin.parameters(), 1e-12)


@each_solver
@pytest.mark.parametrize(("good_steps", "bad"), [(0, float("nan")), (2, float("inf")), (2, 1.0), (0, 1.0)])
def test_a_skipped_update_leaves_weights_and_state(solver: str, good_steps: int, bad: float) -> None:
    (model, optimizer), (twin, twins) = _pair(solver)
    for step in range(good_steps):
        _step(model, optimizer, step)
        _step(twin, twins, step)
    before = _tensors(model, optimizer)
    _step(model, optimizer, 99, skipped=1.0, by=bad)
    after = _tensors(model, optimizer)
    begun = {key: after[key] for key in after if key not in before}  # state that the first update brings
    assert not any(value.any() for value in begun.values())
    _assert_equal(before | begun, after)
    # And goes on as one that never met the bad step.
    _step(model, optimizer, 7)
    _step(twin, twins, 7)
    _assert_equal(_tensors(model, optimizer), _tensors(twin, twins))
    assert not torch.equal(next(model.parameters()), before["0.weight", "weight"])


@each_solver
def test_gradients_are_divided_by_the_scale_first(solver: str) -> None:
    (model, optimizer), (twin, twins) = _pair(solver)
    optimizer.grad_scale = torch.tensor(1024.0)  # type: ignore[attr-defined]
    for step in range(3):
        _step(model, optimizer, step, by=1024.0)
        _step(twin, twins, step)
    _assert_equal(_tensors(model, optimizer), _tensors(twin, twins))  # a power of two: no rounding


@each_solver
def test_a_solver_that_is_saved_and_loaded_goes_on_to_the_bit(solver: str) -> None:
    (model, optimizer), (twin, fresh) = _pair(solver)
    for step in range(3):
        _step(model, optimizer, step)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["optimizer"])
    weight = next(model.parameters())
    shapes = {name: value.shape for name, value in optimizer.state[weight].items()}
    assert kept_state(optimizer) == {name: shape == weight.shape for name, shape in shapes.items()}
    assert sum(shape == weight.shape for shape in shapes.values()) == _spec(solver).states  # as the plan counts
    for step in range(3, 6):
        _step(model, optimizer, step)
        _step(twin, fresh, step)
    _assert_equal(_tensors(model, optimizer), _tensors(twin, fresh))


@pytest.mark.parametrize(
    ("name", "momentum", "eps"),
    [
        ("sgd", 0.9, None), ("rmsprop", 0.0, 1e-8), ("adagrad", None, 1e-10), ("adam", None, 1e-8),
        ("adamw", None, 1e-8), ("lamb", None, 1e-6),
    ],
)  # fmt: skip
def test_usual_constants_are_filled_in(name: str, momentum: float | None, eps: float | None) -> None:
    for values in ({"name": name}, {"name": name, "momentum": None, "eps": None}):
        spec = OptimizerSpec.model_validate(values)
        assert (spec.momentum, spec.eps) == (momentum, eps)
    assert OptimizerSpec.model_validate({"name": name, "momentum": 0.5, "eps": 1}).momentum == 0.5


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
    both = parameter_groups(model, DECAY, decay_norms=True)
    assert [group["weight_decay"] for group in both] == [DECAY, DECAY]
    assert [group["params"] for group in both] == [decayed["params"], plain["params"]]
    # ResNet-18: 20 convolutions and the classifier; 20 norms' scales and shifts and the classifier's bias.
    assert (len(by_layer[True]), len(by_layer[False])) == (21, 41)


@pytest.mark.parametrize(("arch", "backbone"), [("tsn", "resnet18"), ("tsn", "mobilenet_v2"), ("slowfast", None)])
def test_the_classifier_and_the_first_convolution_can_have_a_factor_on_their_lr(
    arch: str, backbone: str | None
) -> None:
    model = build_model(arch, backbone, 8, 5, width=0.125, in_channels=10)
    groups = parameter_groups(model, DECAY, lr_factors(model, OptimizerSpec(head_lr_factor=2.0, first_lr_factor=5.0)))
    keys = [(group["weight_decay"], group["lr_factor"]) for group in groups]
    # The first one has no bias; the normalisation after it keeps the others' LR.
    assert keys == [(DECAY, 1.0), (0.0, 1.0), (DECAY, 2.0), (0.0, 2.0), (DECAY, 5.0)]
    (linear,) = (module for module in model.modules() if isinstance(module, nn.Linear))
    assert groups[2]["params"] == [linear.weight] and groups[3]["params"] == [linear.bias]
    seeing = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Conv3d) and m.in_channels == 10]
    assert groups[4]["params"] == [conv.weight for conv in seeing]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    optimizer = build_sgd(groups, 0.9)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0] * 5  # until it is set
    set_learning_rate(optimizer, 0.2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.2, 0.4, 0.4, 1.0]
    # Factors of one size share their groups.
    factors = lr_factors(model, OptimizerSpec(head_lr_factor=5.0, first_lr_factor=5.0))
    assert len(parameter_groups(model, DECAY, factors)) == 4


def test_the_lr_falls_from_layer_to_layer() -> None:
    """BEiT's rule: decay^(L + 1 - l) for block l of L, 0 in front of them; norms and classifier behind them 1."""
    model = build_model("tsm", "resnet18", 4, 5, width=0.125)
    factors = lr_factors(model, OptimizerSpec(layer_decay=0.5, head_lr_factor=4.0))
    assert factors.keys() == dict(model.named_parameters()).keys()
    # Eight blocks.
    assert factors["conv1.weight"] == factors["bn1.bias"] == 0.5**9
    blocks = [f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)]
    for number, block in enumerate(blocks, 1):
        assert {factors[name] for name in factors if name.startswith(f"{block}.")} == {0.5 ** (9 - number)}
    assert factors["fc.weight"] == factors["fc.bias"] == 4.0
    groups = parameter_groups(model, DECAY, factors)
    assert sum(len(group["params"]) for group in groups) == len(factors)
    assert len(groups) == 2 * 10
    optimizer = build_sgd(groups, 0.9)
    set_learning_rate(optimizer, 0.2)
    lr_of = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: lr_of[p] for name, p in model.named_parameters()} == {name: 0.2 * f for name, f in factors.items()}


def test_pathways_side_by_side_have_layers_side_by_side() -> None:
    """SlowFast: 16 blocks in each. What joins them is new and learns as the classifier does."""
    model = build_model("slowfast", None, 8, 5, width=0.125)
    numbers = model.layer_numbers()
    for pathway in ("fast", "slow"):
        assert numbers[f"{pathway}.conv1.weight"] == numbers[f"{pathway}.bn1.weight"] == 0
        assert numbers[f"{pathway}.layer1.0.conv1.weight"] == 1 and numbers[f"{pathway}.layer4.2.bn3.bias"] == 16
    assert numbers["lateral1.conv.weight"] == numbers["fc.bias"] == 17


def test_tokens_and_positions_have_no_weight_decay() -> None:
    model = build_model("vit", "vit_s", 2, 5, width=0.125, adapter="st")
    decayed, plain = parameter_groups(model, DECAY)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {names[one] for one in plain["params"] if one.ndim > 1} == {"cls_token", "pos_embed"}
    assert all(one.ndim > 1 for one in decayed["params"]) and plain["weight_decay"] == 0
