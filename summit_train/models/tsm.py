"""TSM: the temporal shift put into a 2D network (Lin et al., section 4)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

from torch import nn

from summit_train.models.mobilenet import InvertedResidual
from summit_train.models.resnet import ResidualBlock
from summit_train.models.shift import TemporalShift
from summit_train.models.video import VideoNetwork
from summit_train.spec.catalog import ShiftDirection, ShiftPlace


def add_shifts(network: VideoNetwork, fraction: float, place: ShiftPlace, direction: ShiftDirection) -> None:
    """Give the residual blocks of `network` a shift, as the authors' code does.

    place: "residual" (in front of the branch) or "in_place" (in front of branch and shortcut; Figure 3).
    In front of the branch, ResNets with 23 blocks or more in a stage get a shift in every second one. MobileNetV2 gets
    it in its blocks that expand and have a shortcut.
    """
    stages = [list(network.get_submodule(name).children()) for name in network.blocks]
    every = shift_step(map(len, stages), place)
    for stage in stages:
        blocks = [block for block in stage if _takes_shift(block)]
        for block in blocks[::every]:
            block.shift = TemporalShift(network.num_frames, fraction, direction)
            block.shift_in_place = place == "in_place"


def shift_step(stages: Iterable[int], place: ShiftPlace) -> int:
    """Return 1 where each block of stages of so many blocks gets a shift, 2 where every second one does."""
    return 2 if place == "residual" and max(stages) >= 23 else 1


def _takes_shift(block: nn.Module) -> TypeGuard[ResidualBlock | InvertedResidual]:
    if isinstance(block, InvertedResidual):
        return block.expands and block.has_shortcut
    return isinstance(block, ResidualBlock)
