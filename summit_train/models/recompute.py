"""Blocks whose inner activations are computed again in the backward pass instead of being kept (Chen et al., 2016)."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from summit_train.models.freeze import norm_momentum
from summit_train.models.video import VideoNetwork


class RecomputedBlocks(nn.Sequential):
    """Blocks one after the other. Between forward and backward pass only each block's input is kept.

    The gradients are those of nn.Sequential to the bit, and BN's running statistics take each micro-batch in once.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            if torch.is_grad_enabled() and self.training:
                contexts = partial(_contexts, block)
                # No block draws random numbers, so the state of the generators need not be kept.
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
            else:
                x = block(x)
        return x


def recompute_blocks(network: VideoNetwork) -> None:
    """Make the sequences of blocks of `network` keep the blocks' inputs only."""
    for name in network.blocks:
        stage = network.get_submodule(name)
        assert isinstance(stage, nn.Sequential)
        network.set_submodule(name, RecomputedBlocks(OrderedDict(stage.named_children())))


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the two forward passes. The second leaves the running statistics, which have the batch."""
    norms = [module for module in block.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return nullcontext(), norm_momentum(norms, 0.0)
