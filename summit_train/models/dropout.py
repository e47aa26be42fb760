"""Dropout whose mask is a function of a seed, so that it does not depend on ranks or on what ran before."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Dropout(nn.Module):
    """Zeroes each element with probability `p` in training and scales the rest by 1 / (1 - p).

    The mask comes from a generator of its own. `reseed(seed)` before a micro-batch makes the masks of that
    micro-batch depend on the seed alone (and on the kind of device: CPU and CUDA draw different numbers).
    Raises ValueError for p outside [0, 1).
    """

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"dropout is {p}; it lies in [0, 1)")
        self.p = p
        self._seed = 0
        self._generator: torch.Generator | None = None

    def reseed(self, seed: int) -> None:
        """Start the masks anew from `seed` in [0, 2**63); torch's CPU generator reads the low 32 bits."""
        self._seed = seed
        if self._generator is not None:
            self._generator.manual_seed(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` with elements dropped in training, `x` itself otherwise."""
        if self.p == 0.0 or not self.training:
            return x
        # Drawn in fp32 whatever x is: under autocast the same elements fall as without it.
        draw = torch.rand(x.shape, generator=self._generator_on(x.device), device=x.device)
        return x * (draw >= self.p).to(x.dtype).div_(1.0 - self.p)

    def _generator_on(self, device: torch.device) -> torch.Generator:
        # Made here and not in __init__, since a module does not know its device before it is moved there.
        if self._generator is None or self._generator.device != device:
            self._generator = torch.Generator(device).manual_seed(self._seed)
        return self._generator

    def __getstate__(self) -> dict[str, Any]:
        # A CUDA generator cannot be copied or pickled; the seed can.
        return {**self.__dict__, "_generator": None}

    def extra_repr(self) -> str:
        """Return the settings for repr."""
        return f"p={self.p}"
