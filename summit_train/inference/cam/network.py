"""Class activation maps: the classifier at each place of the last feature maps (Lin et al., "TSM", section 8)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from summit_train.models.video import VideoNetwork


class ClassMaps(NamedTuple):
    """The maps of clips, (N, num_classes, T', h, w), without the bias, and the logits (N, num_classes).

    A logit is the mean of its map over T', h and w, plus the bias once.
    """

    maps: torch.Tensor
    logits: torch.Tensor


def class_maps(network: VideoNetwork, features: torch.Tensor, num_clips: int) -> ClassMaps:
    """Return the class maps of the `feature_maps` of `num_clips` clips.

    The classifier becomes a 1x1x1 convolution with the same weights. It comes after the global average in the network,
    both are linear, and so they may change places. Dropout is left out. Frames of a 2D network become the maps' T'.
    `catalog.maps_problem` tells which architectures have another head.
    """
    linear = classifier_of(network)
    wide = features.to(linear.weight.dtype)  # under autocast the features are narrower
    # A linear layer over the channels of each place is the 1x1x1 convolution, for images and for volumes.
    maps = functional.linear(wide.movedim(1, -1), linear.weight).movedim(-1, 1)
    if maps.dim() == 4:
        maps = maps.reshape(num_clips, -1, *maps.shape[1:]).transpose(1, 2)
    return ClassMaps(maps, maps.mean((2, 3, 4)) + linear.bias)


def classifier_of(network: VideoNetwork) -> nn.Linear:
    """Return the linear layer of the network's head."""
    linear = [module for module in network.get_submodule(network.head).modules() if isinstance(module, nn.Linear)]
    assert len(linear) == 1, "one linear layer follows the average"
    return linear[0]
