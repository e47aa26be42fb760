"""What all networks share: dropout keyed by a seed, and frozen normalisations."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from summit_train.models import build_model
from summit_train.models.fast import accelerate
from summit_train.models.trn import Relations
from summit_train.models.video import Dropout, KeyedModule, freeze_norms, is_frozen


def _mask(dropout: Dropout) -> list[bool]:
    return (dropout(torch.ones(4, 1000)) != 0).flatten().tolist()


def _tuples(relations: Relations) -> list[Any]:
    return [relations.tuples(scale) for scale in relations.scales]


@pytest.mark.parametrize(
    ("first", "second", "draw"),
    [(Dropout(0.5), Dropout(0.5), _mask), (Relations(8, 2, 3), Relations(8, 4, 5), _tuples)],
    ids=["dropout", "relations"],
)
def test_draws_are_a_function_of_the_seed_alone(
    first: KeyedModule, second: KeyedModule, draw: Callable[[KeyedModule], list[Any]]
) -> None:
    first.reseed(7)
    torch.manual_seed(1)
    drawn = draw(first)
    assert draw(first) != drawn
    second.reseed(1)
    draw(second)
    second.reseed(7)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert draw(second) == drawn
    assert torch.equal(torch.get_rng_state(), before)
    first.reseed(8)
    assert draw(first) != drawn
    first.reseed(7)
    for other in (copy.deepcopy(first), pickle.loads(pickle.dumps(first)), first):
        assert draw(other) == drawn
    first.reseed(2**63 - 1)
    assert any(draw(first))


@pytest.mark.parametrize("p", [0.2, 0.5, 0.9])
def test_share_and_scale_of_dropout(p: float) -> None:
    dropout = Dropout(p)
    dropout.reseed(11)
    x = (torch.rand(200, 1000) + 1.0).requires_grad_()
    out = dropout(x)
    kept = out != 0
    # 200,000 draws: five standard deviations are 0.56 % at most.
    assert kept.float().mean().item() == pytest.approx(1 - p, abs=0.0056)
    assert torch.allclose(out[kept], x[kept] / (1 - p))
    out.sum().backward()
    assert torch.allclose(x.grad, kept / (1 - p))
    assert dropout.eval()(x) is x and Dropout(0.0)(x) is x


def test_the_same_elements_fall_in_bf16() -> None:
    dropout = Dropout(0.5)
    dropout.reseed(9)
    mask = _mask(dropout)
    dropout.reseed(9)
    out = dropout(torch.ones(4, 1000, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16 and (out != 0).flatten().tolist() == mask


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
@pytest.mark.parametrize(("which", "num_frozen"), [("none", 0), ("all", 20), ("all_but_first", 19)])
def test_what_is_frozen_stays(which: str, num_frozen: int, fast: bool) -> None:
    model = build_model("tsm", "resnet18", 2, 3, width=0.125, generator=torch.Generator().manual_seed(0)).train()
    freeze_norms(model, which)
    if fast:
        accelerate(model)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.eval()
    model.train()
    model(torch.randn(2, 2, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    norms = {name for name in before if name.endswith("running_mean")}
    assert len(norms - changed) == num_frozen
    frozen = {name.removesuffix("running_mean") for name in norms - changed}
    assert not any(name.startswith(prefix) for name in changed for prefix in frozen)
    assert ("bn1.running_mean" in changed) == (which != "all")
    assert "fc.weight" in changed and "layer1.0.conv1.weight" in changed
    assert sum(is_frozen(module) for module in model.modules()) == num_frozen


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
@pytest.mark.parametrize(("arch", "num_frames"), [("tsm", 2), ("slowfast", 8), ("x3d_m", 2), ("ir_csn", 8)])
def test_a_frozen_network_trains_as_it_evaluates(arch: str, num_frames: int, fast: bool) -> None:
    model = build_model(arch, "resnet18" if arch == "tsm" else None, num_frames, 3, width=0.125)
    freeze_norms(model, "all")
    if fast:
        accelerate(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    clip = torch.randn(2, num_frames, 3, 32, 32)
    assert torch.equal(model.train()(clip), model.eval()(clip))
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
