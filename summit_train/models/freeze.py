"""Frozen batch normalisation, for fine-tuning on small sets (Lin et al., "TSM", section 5.1; Wang et al., "TSN")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from summit_train.models.non_local import NonLocal
from summit_train.spec.catalog import FreezeBN


def freeze_norms(network: nn.Module, which: FreezeBN) -> None:
    """Freeze the normalisations of `network`: "all", "all_but_first", as TSN's partial BN, or "none".

    A frozen one normalises by its running statistics and keeps them, and its weight and bias get no gradient. Those of
    non-local blocks are never frozen, as in Lin et al.'s code: with its weight at 0 such a block would never learn.
    """
    added = {norm for block in network.modules() if isinstance(block, NonLocal) for norm in block.modules()}
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm) and module not in added]
    for norm in {"none": [], "all": norms, "all_but_first": norms[1:]}[which]:
        norm.requires_grad_(False)
    keep_frozen(network)


def keep_frozen(network: nn.Module) -> None:
    """Put frozen normalisations into evaluation mode, whatever mode the network is in."""
    for module in network.modules():
        if is_frozen(module):
            module.eval()


def is_frozen(module: nn.Module) -> bool:
    """Return whether `module` is a normalisation whose weight gets no gradient."""
    return isinstance(module, _BatchNorm) and module.weight is not None and not module.weight.requires_grad


def trained_norms(network: nn.Module) -> list[_BatchNorm]:
    """Return the normalisations whose running statistics training moves: those that are not frozen."""
    return [module for module in network.modules() if isinstance(module, _BatchNorm) and not is_frozen(module)]


@contextmanager
def norm_momentum(norms: Sequence[_BatchNorm], momentum: float) -> Iterator[None]:
    """Give normalisations another momentum for the block: 0 keeps their running statistics, 1 forgets earlier ones."""
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = momentum
    try:
        yield
    finally:
        for norm, own in zip(norms, before, strict=True):
            norm.momentum = own
