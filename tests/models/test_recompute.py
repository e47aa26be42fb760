"""Recomputed blocks give what kept ones give, and keep their inputs only."""

from __future__ import annotations

import copy

import pytest
import torch

from summit_train.models import build_model
from summit_train.models.recompute import RecomputedBlocks
from summit_train.models.rolled import Stream
from summit_train.structure import describe

NETWORKS = [
    ("tsm", "resnet18", 4),
    ("tsm", "resnet50", 4),
    ("tsm", "resnet101", 2),
    ("tsn", "resnet18", 2),
    ("i3d_3x3x3", "resnet18", 16),
]


@pytest.mark.parametrize(("arch", "backbone", "num_frames"), NETWORKS)
def test_gradients_and_statistics_are_the_same_bits(arch: str, backbone: str, num_frames: int) -> None:
    torch.manual_seed(0)
    kept = build_model(arch, backbone, num_frames, 3, width=0.125).train()
    recomputed = build_model(arch, backbone, num_frames, 3, width=0.125, recompute=True).train()
    assert isinstance(recomputed.layer1, RecomputedBlocks)
    recomputed.load_state_dict(copy.deepcopy(kept.state_dict()))
    clip = torch.randn(2, num_frames, 3, 32, 32)
    for _ in range(2):
        kept(clip).square().sum().backward()
        recomputed(clip).square().sum().backward()
    for (name, expected), (_, found) in zip(kept.named_parameters(), recomputed.named_parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad), name
    for name, buffer in kept.named_buffers():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(buffer, recomputed.get_buffer(name)), name


def test_the_weight_of_a_micro_batch_in_the_statistics_comes_back() -> None:
    model = build_model("tsn", "resnet18", 2, 3, width=0.125, recompute=True).train()
    norm = model.layer1[0].bn1
    norm.momentum = 0.37
    model(torch.randn(1, 2, 3, 32, 32)).sum().backward()
    assert norm.momentum == 0.37


def tensors_of(stream: torch.Tensor | Stream) -> list[torch.Tensor]:
    parts = stream if isinstance(stream, Stream) else [stream]
    return [part for part in parts if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize(("arch", "backbone", "num_frames"), NETWORKS)
def test_the_blocks_keep_their_inputs_only(arch: str, backbone: str, num_frames: int) -> None:
    structure = describe(arch, backbone, 0.25, 3, num_frames, 64, 64)
    model = build_model(arch, backbone, num_frames, 3, width=0.25, recompute=True).train()
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if tensor.dim() >= 2 and tensor.dtype == torch.float32 and place not in parameters:
            kept[place] = tensor.numel()
        return tensor

    for name, block in model.named_modules():
        if name.startswith("layer") and name.count(".") == 1:
            block.register_forward_pre_hook(lambda _, inputs: ([*map(note, tensors_of(inputs[0]))], None)[1])
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = model(torch.randn(1, num_frames, 3, 64, 64))
    assert sum(kept.values()) == structure.block_input_elements
    assert logits.requires_grad
    whole = structure.activation_bytes()
    assert structure.activation_bytes(recompute=True) < whole
