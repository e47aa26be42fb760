"""The spec's network, and how its step is computed."""

from __future__ import annotations

import shutil

import pytest
import torch

from summit_train.models.recompute import RecomputedBlocks
from summit_train.spec import Spec, load_spec
from summit_train.training.run import fresh_model
from tests.conftest import WriteSpec

CPU = torch.device("cpu")


def losses(spec: Spec, updates: int = 2) -> list[float]:
    """The losses of plain SGD on one random batch."""
    model = fresh_model(spec, CPU).train()
    generator = torch.Generator().manual_seed(0)
    clips = torch.randn(2, spec.data.num_frames, 3, 32, 32, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    found = []
    for _ in range(updates):
        loss = torch.nn.functional.cross_entropy(model(clips), torch.tensor([0, 1]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_recompute_reaches_the_network_and_changes_no_loss(write_spec: WriteSpec) -> None:
    path = write_spec(model={"dropout": 0.0})
    plain, recomputed = (load_spec(path, [f"execution.recompute={value}"]) for value in ("false", "true"))
    assert isinstance(fresh_model(recomputed, CPU).layer1, RecomputedBlocks)
    assert not isinstance(fresh_model(plain, CPU).layer1, RecomputedBlocks)
    assert losses(recomputed) == losses(plain)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_compiled_the_losses_and_the_names_are_the_same(write_spec: WriteSpec) -> None:
    path = write_spec(model={"dropout": 0.0, "width": 0.125}, data={"num_frames": 2})
    plain, compiled = (load_spec(path, [f"execution.compile={value}"]) for value in ("false", "true"))
    assert list(fresh_model(compiled, CPU).state_dict()) == list(fresh_model(plain, CPU).state_dict())
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-4)
