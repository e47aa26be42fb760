from __future__ import annotations

import pytest
import torch

from summit_train.models import build_model
from summit_train.models.fast import accelerate
from summit_train.scaling.memory import Activations, peak_memory
from tests.networks import counted

CPU = torch.device("cpu")


def test_what_is_counted_is_what_autograd_holds_at_once() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(100, 4)
    activations = Activations([weight])
    with activations.counted():
        for _ in range(3):  # let go before the next one
            (x @ weight).sum().backward()
    assert activations.most_bytes == 4 * 100 * 4
    with activations.counted():
        one, other = (x @ weight).exp(), (x @ weight).exp()  # x once, and two results
        (one.sum() + other.sum()).backward()
    assert activations.most_bytes == 3 * 4 * 100 * 4


@pytest.mark.parametrize("arch", ["tsm", "tsn"])
def test_a_network_holds_what_the_plan_says(arch: str) -> None:
    model = build_model(arch, "resnet18", 4, 5, width=0.5)
    accelerate(model)
    clips = torch.randn(2, 4, 64, 64, 3).permute(0, 1, 4, 2, 3)
    activations = Activations(model.parameters())
    with activations.counted():
        model(clips).sum().backward()
    planned = 2 * counted(arch, "resnet18", frames=4, crop=64, width=0.5, classes=5).activation_bytes()
    assert activations.most_bytes == pytest.approx(planned, rel=0.01)  # besides, the norms' statistics per channel


def test_the_process_has_held_more_than_it_was_given() -> None:
    before = torch.ones(2**22)
    assert peak_memory(CPU) > before.nbytes
