"""Anchors (Ren et al., "Faster R-CNN", section 3.1.1): boxes of a few shapes around each place of the maps."""

from __future__ import annotations

from itertools import product

import torch

from summit_train.spec.detection import DetectorSpec

STRIDE = 16  # pixels of the frame for a place of the maps


def make_anchors(detector: DetectorSpec, places: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    """Return the anchors (h * w * A, 4) of h x w places, row by row, on the device and in the type of `like`.

    The centre of the place (y, x) is (16 y + 8, 16 x + 8) in pixels. Anchor number i * len(ratios) + j has the area of
    the square of side s_i and the ratio r_j, height over width: it is s_i / sqrt(r_j) wide and s_i * sqrt(r_j) high.
    (py-faster-rcnn's generate_anchors.py rounds the sides to pixels.)
    """
    shapes = [
        (side * ratio**-0.5, side * ratio**0.5)
        for side, ratio in product(detector.anchor_sides, detector.anchor_ratios)
    ]
    halves_A2 = like.new_tensor(shapes) / 2
    y, x = (STRIDE * (torch.arange(n, device=like.device).to(like.dtype) + 0.5) for n in places)
    centres_P2 = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).view(-1, 1, 2)
    return torch.cat([centres_P2 - halves_A2, centres_P2 + halves_A2], -1).view(-1, 4)
