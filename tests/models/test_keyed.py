"""Dropout keyed by a seed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from summit_train.models import build_model
from summit_train.models.video import Dropout


def _mask(dropout: Dropout, seed: int | None = None) -> torch.Tensor:
    if seed is not None:
        dropout.reseed(seed)
    return dropout(torch.ones(4, 1000)) != 0


def test_the_mask_is_a_function_of_the_seed() -> None:
    first, second = Dropout(0.5), Dropout(0.5)
    torch.manual_seed(1)
    mask = _mask(first, 7)
    _mask(second)
    torch.manual_seed(2)
    assert torch.equal(_mask(second, 7), mask)
    assert torch.equal(_mask(first, 7), mask)
    assert not torch.equal(_mask(first, 8), mask)
    assert _mask(first, 2**63 - 1).any()


def test_masks_after_one_seed_differ_from_each_other() -> None:
    dropout = Dropout(0.5)
    assert not torch.equal(_mask(dropout, 3), _mask(dropout))


def test_it_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    _mask(Dropout(0.5), 1)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("p", [0.2, 0.5, 0.9])
def test_share_and_scale(p: float) -> None:
    dropout = Dropout(p)
    dropout.reseed(11)
    x = torch.rand(200, 1000) + 1.0
    x.requires_grad_()
    out = dropout(x)
    kept = out != 0
    # 200,000 draws: five standard deviations are 0.56 % at most.
    assert kept.float().mean().item() == pytest.approx(1 - p, abs=0.0056)
    assert torch.allclose(out[kept], x[kept] / (1 - p))
    out.sum().backward()
    assert torch.allclose(x.grad, kept / (1 - p))


def test_nothing_happens_at_p_0_or_in_evaluation() -> None:
    x = torch.rand(3, 4)
    assert Dropout(0.0)(x) is x
    assert Dropout(0.5).eval()(x) is x


def test_the_same_elements_fall_in_bf16() -> None:
    dropout = Dropout(0.5)
    mask = _mask(dropout, 9)
    dropout.reseed(9)
    out = dropout(torch.ones(4, 1000, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out != 0, mask)


def test_copies_and_pickles_keep_the_seed() -> None:
    dropout = Dropout(0.5)
    mask = _mask(dropout, 4)
    assert torch.equal(_mask(copy.deepcopy(dropout)), mask)
    assert torch.equal(_mask(pickle.loads(pickle.dumps(dropout))), mask)


def test_a_network_is_reseeded_as_a_whole() -> None:
    model = build_model("tsm", "resnet18", 2, 5, width=0.125, dropout=0.5)
    clip = torch.randn(2, 2, 3, 32, 32)
    model.reseed(1)
    first = model(clip)
    model.reseed(2)
    other = model(clip)
    model.reseed(1)
    assert torch.equal(model(clip), first)
    assert not torch.equal(other, first)
    assert not any("dropout" in name for name in model.state_dict())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    dropout = Dropout(0.5)
    x = torch.ones(4, 1000, device="cuda")
    dropout.reseed(3)
    first = dropout(x)
    dropout.reseed(3)
    assert torch.equal(dropout(x), first)
    copy.deepcopy(dropout)
