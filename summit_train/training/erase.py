"""Random erasing (Zhong et al. 2020): a box of a clip becomes noise.

As timm's mode "pixel" (timm/data/random_erasing.py), after the normalisation: the box is the same in all frames of a
clip, and each of its values is drawn from N(0, 1).
"""

from __future__ import annotations

import math

import numpy as np
import torch

AREA = (0.02, 1 / 3)  # of the frame's
LOG_ASPECT = (math.log(0.3), math.log(1 / 0.3))
_ATTEMPTS = 10


def erase(clips_NTCHW: torch.Tensor, probability: float, draw: np.random.Generator, noise: torch.Generator) -> None:
    """Erase a box of each clip in place, with `probability`. draw: of its place. noise: on the clips' device."""
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
