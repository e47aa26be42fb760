"""TSM: the temporal shift put into a 2D ResNet (Lin et al., section 4)."""

from __future__ import annotations

from summit_train.models.catalog import ShiftDirection, ShiftPlace
from summit_train.models.resnet import ResidualBlock, ResNet
from summit_train.models.shift import TemporalShift


def add_shifts(network: ResNet, fraction: float, place: ShiftPlace, direction: ShiftDirection) -> None:
    """Give every block of `network` a shift; as the authors' code, every second one in a deep residual network.

    place: "residual" (in front of the branch) or "in_place" (in front of branch and shortcut; Figure 3).
    """
    every = 2 if place == "residual" and len(list(network.layer3.children())) >= 23 else 1
    for stage in (network.layer1, network.layer2, network.layer3, network.layer4):
        blocks = [block for block in stage.children() if isinstance(block, ResidualBlock)]
        for block in blocks[::every]:
            block.shift = TemporalShift(network.num_frames, fraction, direction)
            block.shift_in_place = place == "in_place"
