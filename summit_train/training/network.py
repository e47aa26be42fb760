"""The spec's network as training begins with it."""

from __future__ import annotations

import torch

from summit_train import rng
from summit_train.models import VideoNetwork
from summit_train.network import build_network, make_ready
from summit_train.spec import Spec
from summit_train.training.step import parameter_type


def fresh_model(spec: Spec, device: torch.device) -> VideoNetwork:
    """Build the spec's network on `device`, ready to run, with weights that the seed alone decides.

    Weights stay in their plain layout, as Horovod takes contiguous gradients only; clips are channels-last, and every
    convolution follows its input.
    """
    generator = torch.Generator().manual_seed(rng.seed_of(spec.seed, "weights"))
    network = build_network(spec, generator).to(device=device, dtype=parameter_type(spec.precision))
    make_ready(network, spec)
    return network
