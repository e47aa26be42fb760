"""Modules that draw random numbers in training, as a function of a seed: not of ranks, nor of what ran before."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class KeyedModule(nn.Module):
    """A module with a random generator of its own.

    `reseed(seed)` before a micro-batch makes the draws of that micro-batch depend on the seed alone (and on the kind of
    device that the generator is on: CPU and CUDA draw different numbers).
    """

    def __init__(self) -> None:
        super().__init__()
        self._seed = 0
        self._generator: torch.Generator | None = None

    def reseed(self, seed: int) -> None:
        """Restart the draws from `seed` in [0, 2**63); torch's CPU generator reads the low 32 bits."""
        self._seed = seed
        if self._generator is not None:
            self._generator.manual_seed(seed)

    def generator_on(self, device: torch.device) -> torch.Generator:
        """Return the generator, which continues after its last draw."""
        # Made here and not in __init__, since a module does not know its device before it is moved there.
        if self._generator is None or self._generator.device != device:
            self._generator = torch.Generator(device).manual_seed(self._seed)
        return self._generator

    def __getstate__(self) -> dict[str, Any]:
        # A CUDA generator cannot be copied or pickled; the seed can.
        return {**self.__dict__, "_generator": None}


class Dropout(KeyedModule):
    """Zeroes each element with probability `p` in [0, 1) in training and scales the rest by 1 / (1 - p)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.p == 0.0 or not self.training:
            return x
        # Drawn in fp32 whatever x is: under autocast the same elements fall as without it.
        draw = torch.rand(x.shape, generator=self.generator_on(x.device), device=x.device)
        return x * (draw >= self.p).to(x.dtype).div_(1.0 - self.p)
