"""Measure the gradient noise scale, which says how large a batch the data can use.

Source: McCandlish et al., "An Empirical Model of Large-Batch Training". With G the mean gradient and Sigma the
covariance of a single clip's gradient, the simple noise scale is tr(Sigma) / |G|^2, in clips (section 2.2). It is
estimated from the gradients of single virtual GPUs, b clips each, and from their average, B clips (appendix A.1):

    |G|^2      = (B |G_B|^2 - b |G_b|^2) / (B - b)
    tr(Sigma)  = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

Both are unbiased. Their ratio is not, and one step's is mostly noise, so each is averaged over steps first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

# Of the average over measurements: that of the last 20 or so.
DECAY = 0.95


class PassSquares:
    """Add up the squared norms of the gradients of single backward passes.

    A hook receives each parameter's gradient before it is added to those of earlier passes, and before the ranks
    average it. So no gradient is copied, and one number per parameter and pass is kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._norms: list[torch.Tensor] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note the gradients of a backward pass within the block: NaN for one that comes in several parts.

        Hooks are added after the forward pass and removed again, so torch.compile never sees them.
        """
        noted = set[nn.Parameter]()

        def note(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
            norm = torch.linalg.vector_norm(gradient)
            self._norms.append(norm * math.nan if parameter in noted else norm)
            noted.add(parameter)

        hooks = [p.register_hook(partial(note, p)) for p in self._parameters]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self) -> torch.Tensor:
        """Return the sum over the passes since the last call, a double scalar."""
        norms = self._norms
        self._norms = []
        return torch.stack(norms).double().square().sum()


@dataclass(frozen=True)
class Squares:
    """Squared norms of one step's unscaled gradients. single: |G_b|^2, mean over virtual GPUs; average: |G_B|^2."""

    single: float
    average: float


class NoiseScale:
    """The noise scale of a run: the ratio of the moving averages of tr(Sigma) and |G|^2. Equal on all ranks."""

    def __init__(self, clips_per_gpu: int, virtual_gpus: int) -> None:
        self._small = clips_per_gpu
        self._big = clips_per_gpu * virtual_gpus
        self._variance = self._square = 0.0

    def add(self, squares: Squares) -> dict[str, float]:
        """Take in one step; return the record of it.

        noise_scale: in clips, averaged. 0 or infinite while the average of tr(Sigma) or of |G|^2 is not above 0: then
        its estimates scatter too widely. gradient_variance, gradient_square: tr(Sigma) and |G|^2 by this step alone.
        """
        small = self._small
        big = self._big
        square = (big * squares.average - small * squares.single) / (big - small)
        variance = (squares.single - squares.average) / (1 / small - 1 / big)
        self._square = DECAY * self._square + (1 - DECAY) * square
        self._variance = DECAY * self._variance + (1 - DECAY) * variance
        # Both averages began at 0, so after n steps both have a factor 1 - DECAY^n, which the ratio has not.
        value = max(0.0, self._variance) / self._square if self._square > 0 else math.inf
        return {"noise_scale": value, "gradient_variance": variance, "gradient_square": square}

    def state_dict(self) -> dict[str, float]:
        return {"variance": self._variance, "square": self._square}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._variance = state["variance"]
        self._square = state["square"]
