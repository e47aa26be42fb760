"""ECO-lite: its sums worked by hand, and the authors' names; tests/models/test_count.py has its sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from summit_train.models import build_model
from summit_train.models.eco import Residuals


@pytest.mark.parametrize("x", [-3.0, 2.0])
@pytest.mark.parametrize("stride", [1, 2])
def test_sums_are_normalised_on_their_way_into_the_next_block_only(x: float, stride: int) -> None:
    """One pixel, kernels with nothing but a centre, norms that do nothing: a = -x, and twice x more with a stride."""
    stage = Residuals(1, 1, stride).double().eval()
    with torch.no_grad():
        for module in stage.modules():
            if isinstance(module, nn.Conv3d):
                module.weight.zero_()[0, 0, 1, 1, 1] = 1.0
                module.bias.zero_()
            elif isinstance(module, nn.BatchNorm3d):
                module.eps = 0.0
        stage.a_2.weight[0, 0, 1, 1, 1] = -1.0
        stage.b_2.bias.fill_(5.0)
        if stride == 2:
            stage.a_down.weight[0, 0, 1, 1, 1] = 2.0
    a = -x if stride == 1 else -max(x, 0.0) + 2 * x
    expected = max(max(a, 0.0) + 5.0 + a, 0.0)
    found = stage(torch.full((1, 1, 1, 1, 1), x, dtype=torch.double))
    assert found.item() == expected


def test_frames_meet_in_the_3d_part_only() -> None:
    model = build_model("eco_lite", None, 4, 5, width=0.125).double().eval()
    clip = torch.randn(2, 4, 3, 32, 32, dtype=torch.double)
    other = clip.clone()
    other[0, 2] += 1.0
    assert torch.equal(model(clip)[1], model(other)[1])
    changed: list[list[bool]] = []

    def note(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        by_frame = output[:4] if output.dim() == 4 else output[0].transpose(0, 1)
        seen.append(by_frame.detach())

    for name in ("inception", "resnet.res3"):
        seen: list[torch.Tensor] = []
        handle = model.get_submodule(name).register_forward_hook(note)
        model(clip)
        model(other)
        handle.remove()
        changed.append([not torch.equal(one, two) for one, two in zip(*seen, strict=True)])
    # Three 3x3x3 convolutions in a row reach three frames to each side.
    assert changed == [[False, False, True, False], [True, True, True, True]]


def test_joined_names_are_the_authors() -> None:
    """The layers of the authors' ECO.yaml, with the shapes of their weights' first two dimensions."""
    with torch.device("meta"):
        state = build_model("eco_lite", None, 16).state_dict()
    found = {}
    for name, value in state.items():
        *parts, kind = name.removeprefix("resnet.").split(".")
        layer = ("" if name.startswith("resnet.") else "_").join(part for part in parts if part != "conv")
        found[f"{layer}.{kind}".replace("1bn", "1_bn")] = tuple(value.shape[:2])
    convolutions = {"conv1_7x7_s2": (64, 3), "conv2_3x3_reduce": (64, 64), "conv2_3x3": (192, 64)}
    for name, channels, width in (("3a", 192, 64), ("3b", 256, 96)):
        inception = f"inception_{name}_"
        convolutions |= {inception + layer: (64, channels) for layer in ("1x1", "3x3_reduce", "double_3x3_reduce")}
        convolutions |= {
            inception + "3x3": (width, 64),
            inception + "pool_proj": (32 if name == "3a" else 64, channels),
        }
        convolutions |= {inception + "double_3x3_1": (96, 64), inception + "double_3x3_2": (96, 96)}
    convolutions |= {"inception_3c_double_3x3_reduce": (64, 320), "inception_3c_double_3x3_1": (96, 64)}
    normalised = dict.fromkeys(f"{name}_bn" for name in convolutions)
    convolutions["res3a_2"] = (128, 96)
    for stage, channels, before in (("res3", 128, 0), ("res4", 256, 128), ("res5", 512, 256)):
        if before:
            convolutions |= {f"{stage}a_{layer}": (channels, before) for layer in ("1", "down")}
            convolutions[f"{stage}a_2"] = (channels, channels)
            normalised[f"{stage}a_1_bn"] = None
        convolutions |= {f"{stage}b_{layer}": (channels, channels) for layer in "12"}
        normalised |= dict.fromkeys(f"{stage}{layer}_bn" for layer in ("a", "b_1", "b"))
    kinds = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    names = {f"{layer}.{kind}" for layer in convolutions for kind in kinds[:2]}
    names |= {f"{layer}.{kind}" for layer in normalised for kind in kinds} | {"fc.weight", "fc.bias"}
    assert set(found) == names
    assert {layer: found[f"{layer}.weight"] for layer in convolutions} == convolutions
