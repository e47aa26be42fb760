"""Every network of the catalog on a GPU: logits, gradients and statistics of double precision on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from summit_train.models import VideoNetwork
from summit_train.models.fast import accelerate
from summit_train.spec.catalog import ARCHITECTURES
from tests.models.test_build import SMALL, clips, small

NETWORKS: list[tuple[str, str | None, int, dict[str, object]]] = [(*network, {}) for network in SMALL]
NETWORKS += [
    ("tsm", "resnet50", 4, {"non_local": "tsm"}),
    ("i3d_3x1x1", "resnet50", 8, {"non_local": "original"}),
    ("tsm", "resnet18", 4, {"shift_direction": "past"}),
    ("tsm", "resnet18", 4, {"shift_place": "in_place"}),
]


@pytest.fixture
def without_tf32() -> Iterator[None]:
    """Products and convolutions in fp32 whose inputs are not rounded."""
    former = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = former


def conditioned(model: VideoNetwork) -> VideoNetwork:
    """The network with normalisations that a few values per channel do not make magnify roundings."""
    generator = torch.Generator().manual_seed(2)
    for norm in model.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            norm.eps = 0.1
            nn.init.uniform_(norm.weight, 0.3, 0.6, generator=generator)
    return model


def answer(model: VideoNetwork, num_frames: int) -> list[torch.Tensor]:
    """Logits, gradients, and running statistics after a training pass of four clips; each as one double vector."""
    parameter = next(model.parameters())
    x = clips(4, num_frames, 48, 48).to(parameter.device, parameter.dtype)
    model.reseed(5)
    logits = model(x)
    torch.autograd.backward(functional.cross_entropy(logits, torch.arange(4, device=x.device)))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    statistics = [value for name, value in model.named_buffers() if "running" in name]
    return [
        torch.cat([t.detach().double().cpu().flatten() for t in part]) for part in ([logits], gradients, statistics)
    ]


def check(arch: str, backbone: str | None, frames: int, options: dict[str, object], device: str) -> None:
    model = conditioned(small(arch, backbone, frames, **options)).train()
    wanted = answer(copy.deepcopy(model).double(), frames)
    model = model.to(device)
    accelerate(model)
    # Gradients: a rounding that changes an activation's sign switches its gradient.
    for found, expected, bound in zip(answer(model, frames), wanted, (1e-3, 0.1, 1e-3), strict=True):
        assert (found - expected).norm() <= bound * expected.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("arch", "backbone", "frames", "options"), NETWORKS)
def test_a_network_on_a_gpu_is_that_of_double_precision(
    arch: str, backbone: str | None, frames: int, options: dict[str, object], without_tf32: None
) -> None:
    check(arch, backbone, frames, options, "cuda")


@pytest.mark.parametrize(("arch", "backbone", "frames", "options"), [NETWORKS[1], NETWORKS[5]])
def test_the_comparison_holds_on_a_cpu(
    arch: str, backbone: str | None, frames: int, options: dict[str, object]
) -> None:
    check(arch, backbone, frames, options, "cpu")


def test_every_architecture_is_tested() -> None:
    assert {network[0] for network in NETWORKS} == set(ARCHITECTURES)
