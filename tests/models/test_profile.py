"""profile_model against the issue's numbers, Tables 1 and 2, and structure.py."""

from __future__ import annotations

import pytest
import torch

from summit_train.models import build_model
from summit_train.models.profile import profile_model
from summit_train.structure import describe

TABLE_2 = {
    "tsm": [8, 8, 8, 8, 8, 8, 8, 1],
    "tsn": [8, 8, 8, 8, 8, 8, 8, 1],
    "i3d_3x3x3": [16, 16, 8, 8, 4, 2, 1, 1],
    "i3d_3x1x1": [32, 16, 8, 8, 4, 4, 4, 4, 1],
}
# Parameters, G multiply-adds (both to within 1 %), compute/IO of the paper's Table 1.
NUMBERS = {
    "tsm": (24_327_632, 32.9e9, 27.4e3),
    "tsn": (24_327_632, 32.9e9, 27.4e3),
    "i3d_3x3x3": (47_018_576, 39.85e9, 16.6e3),
    "i3d_3x1x1": (28_043_472, 33.1e9, 6.85e3),
}


@pytest.mark.parametrize("arch", TABLE_2)
def test_the_papers_tables(arch: str) -> None:
    frames = TABLE_2[arch][0]
    with torch.device("meta"):
        model = build_model(arch, "resnet50", frames, 400)
    profile = profile_model(model, 224)
    parameters, multiply_adds, compute_io = NUMBERS[arch]
    assert profile.parameters == parameters
    assert profile.gradient_bytes == 4 * parameters
    assert profile.multiply_adds == pytest.approx(multiply_adds, rel=0.01)
    assert profile.input_bytes == frames * 3 * 224**2
    assert profile.compute_io == pytest.approx(compute_io, rel=0.01)
    assert list(profile.stages.values()) == TABLE_2[arch]
    structure = describe(arch, num_frames=frames)
    assert profile.stages == structure.stages
    assert list(profile.stages) == list(structure.stages)
    assert profile.multiply_adds == structure.multiply_adds


def test_the_shift_is_free() -> None:
    tsm, tsn = (profile_model(build_model(arch, "resnet18", 4, 5, width=0.25), 64) for arch in ("tsm", "tsn"))
    assert tsm == tsn


def test_the_network_is_left_alone() -> None:
    model = build_model("tsm", "resnet18", 2, 5, width=0.125).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    profile = profile_model(model, 40, 56)
    assert profile.clip == (2, 40, 56)
    assert model.training and model.conv1.weight.device.type == "cpu"
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
