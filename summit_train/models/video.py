"""What all video networks share: a clip becomes frames or a volume, and the logits of its parts are averaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from summit_train.models.freeze import keep_frozen
from summit_train.models.keyed import KeyedModule
from summit_train.models.non_local import NonLocal
from summit_train.spec.catalog import Pool1

if TYPE_CHECKING:
    from typing_extensions import Self


class VideoNetwork(nn.Module):
    """A network on clips: float (N, T, C, H, W), in any memory format, to logits (N, num_classes).

    A subclass has a backbone, `extract`, and a head, `classify`. If these are not its own, they are `avgpool` of its
    `feature_maps`, and `dropout` and the linear layer `fc`. It sees every frame as an image of the batch (TSN,
    TSM) or the clip as a volume (I3D). Logits are fp32, or wider where the input is.

    `memory_format`: channels_last for images, channels_last_3d for volumes: that of frames stored as (N, T, H, W, C).
    `stages`: the modules after which T is reported, with the paper's names for them (Table 2).
    `blocks`: the sequences whose members can be computed again in the backward pass. `stem`: the names of the
    convolutions that see the clip. `head`: the classifier's name.
    `pool1_form`: the pooling after conv1, if public networks with the same parameters differ in it.
    Where the head is a global average and one linear layer, `extract` averages what `feature_maps` returns.
    """

    memory_format: torch.memory_format = torch.channels_last
    blocks: tuple[str, ...] = ()
    stem: tuple[str, ...] = ("conv1",)
    head = "fc"
    pool1_form: Pool1 | None = None
    avgpool: nn.Module
    dropout: nn.Module
    fc: nn.Module

    def __init__(self, num_frames: int, stages: dict[str, str], in_channels: int) -> None:
        super().__init__()
        self.num_frames = num_frames
        self.in_channels = in_channels
        self.stages = stages
        self.execution = "plain"  # how it runs, for people

    def forward(self, clip_NTCHW: torch.Tensor) -> torch.Tensor:
        """Return logits (N, num_classes). Raises ValueError for an input of another shape."""
        shape = tuple(clip_NTCHW.shape)
        if len(shape) != 5 or shape[1:3] != (self.num_frames, self.in_channels):
            raise ValueError(f"the model takes (N, {self.num_frames}, {self.in_channels}, H, W); this input is {shape}")
        logits = self.classify(self.extract(self.to_input(clip_NTCHW)))
        # bf16 logits of 8 frames are averaged in fp32, so that the loss sees all their digits.
        wide = torch.promote_types(logits.dtype, torch.float32)
        return logits.view(shape[0], -1, logits.shape[1]).mean(1, dtype=wide)

    def to_input(self, clip_NTCHW: torch.Tensor) -> torch.Tensor:
        """Return a view of the clip for `extract`: frames (N*T, C, H, W), or volumes (N, C, T, H, W) in 3D networks."""
        is_3d = self.memory_format == torch.channels_last_3d
        return clip_NTCHW.transpose(1, 2) if is_3d else clip_NTCHW.flatten(0, 1)

    def feature_maps(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last feature maps: (M, F, h, w) of images, (N, F, T', h, w) of volumes."""
        raise NotImplementedError

    def extract(self, x: torch.Tensor) -> torch.Tensor:
        """Return one feature vector for each image or volume of `x`, (len(x), F)."""
        return self.avgpool(self.feature_maps(x)).flatten(1)

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        """Return logits (len(features), num_classes)."""
        return self.fc(self.dropout(features))

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules but frozen normalisations, which stay in evaluation mode."""
        super().train(mode)
        keep_frozen(self)
        return self

    def reseed(self, seed: int) -> None:
        """Make the random draws that follow, of dropout and of others, a function of `seed` alone."""
        for number, module in enumerate(m for m in self.modules() if isinstance(m, KeyedModule)):
            module.reseed((seed + number) % 2**63)

    def initialise_head(self, generator: torch.Generator | None) -> None:
        """Draw the initial weights that differ from those of `initialise`, which ran before. Here there are none."""


def initialise(model: VideoNetwork, generator: torch.Generator | None = None) -> None:
    """Draw torchvision's initial weights for the body and TSM's for the classifier, from one generator.

    Convolutions are normal with variance 2 / fan_out (He et al., 2015), norms 1 and 0, the classifier N(0, 0.001), all
    biases zero. Non-local blocks have their own weights, drawn last, so that the others are those of the network
    without them. A network on the meta device has no numbers to draw.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    added = [module for module in model.modules() if isinstance(module, NonLocal)]
    within = {module for block in added for module in block.modules()}
    with torch.no_grad():
        for module in model.modules():
            if module in within:
                continue
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                fan_out = module.out_channels * module.weight[0, 0].numel()
                module.weight.normal_(0.0, (2.0 / fan_out) ** 0.5, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, nn.Linear):
                module.weight.normal_(0.0, 0.001, generator=generator)
                module.bias.zero_()
        model.initialise_head(generator)
        for block in added:
            block.initialise(generator)
