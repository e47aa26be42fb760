"""Dropout whose mask is a function of a seed, so that it does not depend on ranks or on what ran before."""

from __future__ import annotations

import torch

from summit_train.models.keyed import KeyedModule


class Dropout(KeyedModule):
    """Zeroes each element with probability `p` in training and scales the rest by 1 / (1 - p).

    Raises ValueError for p outside [0, 1).
    """

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"dropout is {p}; it lies in [0, 1)")
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` with elements dropped in training, `x` itself otherwise."""
        if self.p == 0.0 or not self.training:
            return x
        # Drawn in fp32 whatever x is: under autocast the same elements fall as without it.
        draw = torch.rand(x.shape, generator=self.generator_on(x.device), device=x.device)
        return x * (draw >= self.p).to(x.dtype).div_(1.0 - self.p)

    def extra_repr(self) -> str:
        """Return the settings for repr."""
        return f"p={self.p}"
