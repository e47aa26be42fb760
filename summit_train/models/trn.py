"""TRN: relations between frames on a 2D ResNet (Zhou et al., "Temporal relational reasoning in videos", 2018)."""

from __future__ import annotations

import math

import torch
from torch import nn

from summit_train.models.resnet import ResNet, scaled_channels
from summit_train.models.video import KeyedModule
from summit_train.spec import NetworkSpec

FEATURES = 256  # of a frame
TUPLES = 3  # of each scale, summed


class TRN(ResNet):
    """Multi-scale TRN (section 3.1): features of each frame, then relations of 2, 3, ... num_frames of them.

    The body has torchvision's parameter names, the relations (`consensus.fc_fusion_scales`) those of the authors' code
    and of mmaction2. The frames' linear layer, new_fc and fc_cls there, is `fc` here; dropout precedes it.
    """

    head = "consensus"

    def __init__(self, spec: NetworkSpec, num_frames: int, in_channels: int) -> None:
        features = scaled_channels(FEATURES, spec.width)
        super().__init__(spec.model_copy(update={"num_classes": features}), num_frames, in_channels)
        self.consensus = Relations(num_frames, features, spec.num_classes)

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        frames = super().classify(features)
        return self.consensus(frames.view(-1, self.num_frames, frames.shape[1]))

    def initialise_head(self, generator: torch.Generator | None) -> None:
        """Draw the relations as the authors' code does, from torch's default for linear layers.

        That is U(-b, b) with b = 1 / sqrt(inputs), bias included. With three layers of N(0, 0.001) nothing would learn.
        """
        for layer in self.consensus.modules():
            if isinstance(layer, nn.Linear):
                bound = layer.in_features**-0.5
                layer.weight.uniform_(-bound, bound, generator=generator)
                layer.bias.uniform_(-bound, bound, generator=generator)


class Relations(KeyedModule):
    """Logits from ordered tuples of frames: for each scale, linear layers on the frames of a tuple side by side.

    Equation 3: the sum over scales s = T, T-1, ... 2 and, at each, over `TUPLES` tuples of s frames (one for s = T).
    The paper sums over a scale's tuples in front of the last linear layer, the authors' code behind it; the code is
    meant, so the layer's bias counts once for each tuple.

    In training the tuples are drawn, the same for all clips of a micro-batch. In evaluation they are fixed, evenly
    spread over all tuples of s frames in lexicographic order; the authors' code draws then too.
    """

    def __init__(self, num_frames: int, features: int, num_classes: int) -> None:
        super().__init__()
        self.num_frames = num_frames
        self.scales = range(num_frames, 1, -1)
        self.fc_fusion_scales = nn.ModuleList(
            nn.Sequential(nn.ReLU(), nn.Linear(scale * features, features), nn.ReLU(), nn.Linear(features, num_classes))
            for scale in self.scales
        )

    def forward(self, frames_NTF: torch.Tensor) -> torch.Tensor:
        """Return logits (N, num_classes), in fp32 or wider."""
        frames = frames_NTF.unbind(1)
        wide = torch.promote_types(frames_NTF.dtype, torch.float32)
        logits = torch.zeros((), dtype=wide, device=frames_NTF.device)
        for scale, relation in zip(self.scales, self.fc_fusion_scales, strict=True):
            # All tuples of a scale in one product.
            tuples = [torch.cat([frames[t] for t in chosen], 1) for chosen in self.tuples(scale)]
            logits = logits + relation(torch.stack(tuples, 1)).sum(1, dtype=wide)
        return logits

    def tuples(self, scale: int) -> list[list[int]]:
        """Return the tuples of `scale` frames that the next forward pass sums over, each in order of time."""
        total = math.comb(self.num_frames, scale)
        number = min(TUPLES, total)
        if not self.training:
            return [nth_tuple(self.num_frames, scale, (2 * i + 1) * total // (2 * number)) for i in range(number)]
        # On the CPU: the same tuples on every device, and no wait for one.
        generator = self.generator_on(torch.device("cpu"))
        chosen: list[list[int]] = []
        while len(chosen) < number:
            drawn = sorted(torch.randperm(self.num_frames, generator=generator, device="cpu")[:scale].tolist())
            if drawn not in chosen:
                chosen.append(drawn)
        return chosen


def nth_tuple(num_frames: int, scale: int, number: int) -> list[int]:
    """Return the `number`-th tuple, from 0, of `scale` of `num_frames` frames in lexicographic order.

    Without a list of them all: 16 of 32 frames have 601,080,390.
    """
    chosen: list[int] = []
    for frame in range(num_frames):
        with_frame = math.comb(num_frames - frame - 1, scale - len(chosen) - 1) if len(chosen) < scale else 0
        if number < with_frame:
            chosen.append(frame)
        else:
            number -= with_frame
    return chosen
