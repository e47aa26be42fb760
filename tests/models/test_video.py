"""What all networks share: dropout keyed by a seed, and frozen normalisations."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from summit_train.models import build_model
from summit_train.models.fast import accelerate
from summit_train.models.video import Dropout, freeze_norms, is_frozen


def _mask(dropout: Dropout, seed: int | None = None) -> torch.Tensor:
    if seed is not None:
        dropout.reseed(seed)
    return dropout(torch.ones(4, 1000)) != 0


def test_the_mask_is_a_function_of_the_seed_alone() -> None:
    first, second = Dropout(0.5), Dropout(0.5)
    torch.manual_seed(1)
    mask = _mask(first, 7)
    assert not torch.equal(_mask(first), mask)
    _mask(second)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(_mask(second, 7), mask)
    assert torch.equal(_mask(first, 7), mask)
    assert not torch.equal(_mask(first, 8), mask)
    assert _mask(first, 2**63 - 1).any()
    assert torch.equal(torch.get_rng_state(), before)


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


def test_the_same_elements_fall_in_bf16_in_copies_and_in_pickles() -> None:
    dropout = Dropout(0.5)
    mask = _mask(dropout, 9)
    dropout.reseed(9)
    out = dropout(torch.ones(4, 1000, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16 and torch.equal(out != 0, mask)
    assert torch.equal(_mask(copy.deepcopy(dropout)), mask)
    assert torch.equal(_mask(pickle.loads(pickle.dumps(dropout))), mask)


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
