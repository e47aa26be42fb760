"""Average the weights over the steps of a run (Polyak and Juditsky, 1992; the EMA of weights)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class WeightAverage:
    """The moving average of a network's weights and running statistics, updated on the device once a step.

    After n updates, w_1 .. w_n the weights behind each, it is

        sum_i decay^(n - i) w_i / sum_i decay^(n - i),    so    e <- e + (w - e) (1 - decay) / (1 - decay^n).

    The random weights that a run begins with have no part in it, however few the updates. BN's running mean and
    variance are averaged as the weights are; other buffers are copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self._sources = {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
        self._averages = {name: value.clone() for name, value in self._sources.items()}
        device = next(iter(self._sources.values())).device
        self._updates = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self, skipped: torch.Tensor) -> None:
        """Take the weights in after a step; a step that was `skipped` (1, else 0) does not count."""
        taken = 1 - skipped.double()
        self._updates += taken
        # A first step that is skipped would divide 0 by 0.
        rate = taken * (1 - self._decay) / (1 - self._decay ** self._updates.clamp(min=1))
        averages = list(self._averages.values())
        moves = torch._foreach_sub(list(self._sources.values()), averages)
        torch._foreach_mul_(moves, rate.to(moves[0].dtype))
        torch._foreach_add_(averages, moves)

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged network, under the names of its state_dict, and the number of updates."""
        return {"model": {**self._model.state_dict(), **self._averages}, "updates": int(self._updates.item())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        for name, average in self._averages.items():
            average.copy_(state["model"][name])
        self._updates.fill_(state["updates"])
