"""The smooth L1 loss of the event's position in the clip."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class MomentLoss:
    def of_batch(self, outputs: Any, targets: Any, size: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        position, right = outputs[:, 0], targets.to(outputs.dtype)
        return functional.smooth_l1_loss(position, right, beta=0.1), ((position - right).abs() < 0.1).sum()

    def of_scores(self, found: Any) -> None:
        """The loss is of positions in clips, and what is found are frames of videos."""


def build_loss(spec: Any, clips_of_class: Any, device: Any) -> MomentLoss:
    return MomentLoss()
