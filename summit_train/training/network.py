"""The spec's network."""

from __future__ import annotations

import torch

from summit_train import rng
from summit_train.models import build_model
from summit_train.models.resnet import VideoResNet
from summit_train.spec import Spec
from summit_train.training.step import parameter_type


def build_network(spec: Spec, generator: torch.Generator | None = None) -> VideoResNet:
    """The network that `spec` asks for, its weights drawn from `generator`."""
    model = spec.model
    return build_model(
        model.arch,
        model.backbone,
        spec.data.num_frames,
        model.num_classes,
        width=model.width,
        dropout=model.dropout,
        shift_fraction=model.shift_fraction,
        shift_place=model.shift_place,
        shift_direction=model.shift_direction,
        recompute=spec.execution.recompute,
        generator=generator,
    )


def fresh_model(spec: Spec, device: torch.device) -> VideoResNet:
    """The spec's network on `device`, with weights that the seed alone decides.

    Weights stay in their plain layout, as Horovod takes contiguous gradients only; clips are channels-last, and every
    convolution follows its input.
    """
    generator = torch.Generator().manual_seed(rng.seed_of(spec.seed, "weights"))
    model = build_network(spec, generator).to(device=device, dtype=parameter_type(spec.precision))
    if spec.execution.compile:
        # The body alone: the dropout's own generator is nothing that a compiler takes. As a function it is no module,
        # so that the parameters' names stay.
        model.body = torch.compile(model.body)  # type: ignore[method-assign]
    return model
