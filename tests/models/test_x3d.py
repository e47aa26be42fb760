"""X3D-M: where squeeze-excitation stands and what it does; tests/models/test_count.py has its channels and blocks."""

from __future__ import annotations

import torch

from summit_train.models import build_model
from summit_train.models.x3d import SqueezeExcitation
from tests.closeness import assert_near


def test_every_second_block_has_squeeze_excitation() -> None:
    with torch.device("meta"):
        model = build_model("x3d_m", None, 16)
    for name, squeezed in zip(model.sequences, (8, 8, 16, 32), strict=True):
        for number, block in enumerate(model.get_submodule(name)):
            assert isinstance(block.se, SqueezeExcitation) == (number % 2 == 0)
            assert number % 2 or block.se.fc1.out_channels == squeezed


def test_a_block_by_hand() -> None:
    """1x1x1, norm, relu; depthwise, norm, gate, swish; 1x1x1, norm; the sum, relu. A norm at evaluation scales."""
    model = build_model("x3d_m", None, 3, 5, width=0.34, generator=torch.Generator().manual_seed(0))
    block = model.double().eval().layer1[0]
    x = torch.randn(2, 8, 3, 6, 6, dtype=torch.double)
    scale = (1 + 1e-5) ** -0.5
    branch = torch.relu(torch.einsum("oc,ncthw->nothw", block.conv1.weight[..., 0, 0, 0], x) * scale)
    branch = block.conv2(branch) * scale
    gate = branch.mean((2, 3, 4))
    gate = torch.relu(gate @ block.se.fc1.weight.flatten(1).T + block.se.fc1.bias)
    gate = torch.sigmoid(gate @ block.se.fc2.weight.flatten(1).T + block.se.fc2.bias)
    branch = branch * gate[..., None, None, None]
    branch = branch * torch.sigmoid(branch)
    branch = torch.einsum("oc,ncthw->nothw", block.conv3.weight[..., 0, 0, 0], branch) * scale
    shortcut = torch.einsum("oc,ncthw->nothw", block.downsample[0].weight[..., 0, 0, 0], x[..., ::2, ::2]) * scale
    assert_near(block(x), torch.relu(branch + shortcut), 1e-12)


def test_the_average_stands_between_conv5_and_fc1() -> None:
    model = build_model("x3d_m", None, 2, 5, width=0.34).double().eval()
    seen: list[torch.Tensor] = []
    model.layer4.register_forward_hook(lambda _m, _i, out: seen.append(out))
    features = model.extract(torch.randn(2, 3, 2, 64, 64, dtype=torch.double))
    pooled = torch.relu(model.bn5(model.conv5(seen[0]))).mean((2, 3, 4))
    assert_near(features, torch.relu(pooled @ model.fc1.weight.flatten(1).T), 1e-12)
