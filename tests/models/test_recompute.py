"""Recomputed blocks give what kept ones give, and keep their inputs only."""

from __future__ import annotations

import copy

import pytest
import torch

from summit_train.models import build_model
from summit_train.models.count import count
from summit_train.models.fast import accelerate
from summit_train.models.network import RecomputedBlocks, recompute_blocks
from summit_train.models.video import norm_momentum, trained_norms

NETWORKS = [
    ("tsm", "resnet18", 4),
    ("tsm", "resnet50", 4),
    ("tsn", "resnet18", 2),
    ("i3d_3x3x3", "resnet18", 16),
    ("trn", "resnet18", 3),
    ("eco_lite", None, 4),
    ("i3d_3x1x1", "resnet50", 8),
    ("slowfast", None, 8),
    ("x3d_m", None, 2),
    ("ir_csn", None, 8),
    ("vit", "vit_s", 4),
]


@pytest.mark.parametrize(("number", "arch", "backbone", "num_frames"), [(i, *row) for i, row in enumerate(NETWORKS)])
def test_gradients_and_statistics_are_the_same_bits(
    number: int, arch: str, backbone: str | None, num_frames: int
) -> None:
    """Every second network accelerated."""
    torch.manual_seed(0)
    kept = build_model(arch, backbone, num_frames, 3, width=0.125).train()
    recomputed = copy.deepcopy(kept)
    recompute_blocks(recomputed)
    if number % 2:
        accelerate(kept)
        accelerate(recomputed)
    assert all(isinstance(recomputed.get_submodule(name), RecomputedBlocks) for name in recomputed.sequences)
    assert list(recomputed.state_dict()) == list(kept.state_dict())
    clip = torch.randn(2, num_frames, 3, 32, 32)
    for _ in range(2):
        kept(clip).square().sum().backward()
        loss = recomputed(clip).square().sum()
        with norm_momentum(trained_norms(recomputed), 0.0):  # as a training step does
            loss.backward()
    for (name, expected), (_, found) in zip(kept.named_parameters(), recomputed.named_parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad), name
    for name, buffer in kept.named_buffers():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(buffer, recomputed.get_buffer(name)), name


@pytest.mark.parametrize(("arch", "backbone", "num_frames"), NETWORKS)
def test_the_blocks_keep_their_inputs_only(arch: str, backbone: str | None, num_frames: int) -> None:
    model = build_model(arch, backbone, num_frames, 3, width=0.125).train()
    counted = count(model, 64)
    recompute_blocks(model)
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if tensor.dim() >= 2 and tensor.dtype == torch.float32 and place not in parameters:
            kept[place] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    for name, block in model.named_modules():
        if name.rpartition(".")[0] in model.sequences:
            block.register_forward_pre_hook(lambda _, inputs: (note(inputs[0]), None)[1])
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = model(torch.randn(1, num_frames, 3, 64, 64))
    assert sum(kept.values()) == counted.outside_elements
    assert logits.requires_grad
    assert counted.activation_bytes(recompute=True) < counted.activation_bytes()
