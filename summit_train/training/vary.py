"""Vary the normalised clips of a virtual GPU on the device: mixup, CutMix and random erasing.

Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019) as timm's mode "batch" (timm/data/mixup.py): clip i is mixed with
clip n - 1 - i, and all clips of a batch have one share and one box. The partner is in the same virtual GPU, so the
number of ranks does not matter. In a batch of an odd number of clips, which timm refuses, the middle one stays.

Random erasing (Zhong et al. 2020) as timm's mode "pixel" (timm/data/random_erasing.py): a box, the same in all frames
of a clip, becomes noise from N(0, 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from summit_train.spec.model_data import MixSpec
from summit_train.training.loss import one_hot

AREA = (0.02, 1 / 3)  # of an erased box, of the frame's
LOG_ASPECT = (math.log(0.3), math.log(1 / 0.3))
_ATTEMPTS = 10


@dataclass(frozen=True)
class Mix:
    """A mix of a batch. share: of each clip, and its label, that stays. box: (top, bottom, left, right) of CutMix."""

    share: float = 1.0
    box: tuple[int, int, int, int] | None = None

    def apply(self, clips_NTCHW: torch.Tensor) -> None:
        """Mix the clips in place."""
        if self.box is not None:
            top, bottom, left, right = self.box
            inside = clips_NTCHW[..., top:bottom, left:right]
            inside.copy_(inside.flip(0))
        elif self.share < 1:
            partners = clips_NTCHW.flip(0).mul_(1 - self.share)
            clips_NTCHW.mul_(self.share).add_(partners)

    def targets(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return each class's share, shaped and typed as `logits`; without a mix the labels, as `Loss` takes them."""
        if self.share == 1:
            return labels
        shares = one_hot(labels, logits)
        return shares * self.share + shares.flip(0) * (1 - self.share)


def draw_mix(spec: MixSpec, generator: np.random.Generator, height: int, width: int) -> Mix:
    """Draw the mix of one batch of clips of `height` x `width` pixels.

    A box has the drawn area where it lies inside the frame. One that reaches over the edge is cut, and so the share.
    """
    if generator.random() >= spec.probability:
        return Mix()
    is_cutmix = not spec.mixup or (spec.cutmix > 0 and generator.random() < spec.switch)
    alpha = spec.cutmix if is_cutmix else spec.mixup
    share = float(generator.beta(alpha, alpha))
    if not is_cutmix or share == 1:
        return Mix(share)
    sides = []
    for extent in (height, width):
        cut = int(extent * math.sqrt(1 - share))
        centre = int(generator.integers(extent))
        sides.append((max(centre - cut // 2, 0), min(centre + (cut + 1) // 2, extent)))
    (top, bottom), (left, right) = sides
    return Mix(1 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right))


def erase(clips_NTCHW: torch.Tensor, probability: float, draw: np.random.Generator, noise: torch.Generator) -> None:
    """Erase a box of each clip in place, with `probability`. draw: where. noise: on the clips' device."""
    height, width = clips_NTCHW.shape[-2:]
    for clip in clips_NTCHW:
        if draw.random() > probability:
            continue
        for _ in range(_ATTEMPTS):
            area = draw.uniform(*AREA) * (height * width)
            aspect = math.exp(draw.uniform(*LOG_ASPECT))
            tall = round(math.sqrt(area * aspect))
            wide = round(math.sqrt(area / aspect))
            if tall < height and wide < width:
                top = int(draw.integers(height - tall + 1))
                left = int(draw.integers(width - wide + 1))
                box = clip[..., top : top + tall, left : left + wide]
                box.copy_(torch.randn(box.shape, generator=noise, device=box.device, dtype=box.dtype))
                break
