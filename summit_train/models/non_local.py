"""Non-local blocks (Wang et al., "Non-local neural networks", 2018), in the two forms that are published."""

from __future__ import annotations

import torch
from torch import nn

from summit_train.spec.catalog import NonLocalForm

# Blocks that a stage gets: two in res3 and three in res4 (Wang et al., section 5.1, "5-block").
STAGES = {"layer2": 2, "layer3": 3}


class NonLocal(nn.Module):
    """z = x + W(y), y = softmax(theta(x) phi(x)^T) g(x): each place of a clip reads all others (equations 5 and 6).

    theta, phi and g are 1x1x1 convolutions to half the channels, and phi and g see H and W halved by a max pool. W is a
    1x1x1 convolution back and a normalisation that begins at 0, so that the block begins as the identity.

    "tsm" (Lin et al., ops/non_local.py) pools after phi and g and leaves the product as it is, as Wang et al.'s paper
    does. "original" is Wang et al.'s code (lib/models/nonlocal_helper.py), with which they got their numbers: it pools
    before phi and g and multiplies the product by (C / 2)^-0.5.

    Volumes (N, C, T, H, W) come where `num_frames` is None, otherwise frames (N*T, C, H, W), on which 1x1x1 is 1x1.
    Parameter names are those of Lin et al.'s code.
    """

    def __init__(self, channels: int, form: NonLocalForm, num_frames: int | None) -> None:
        super().__init__()
        inner = max(1, channels // 2)
        frames = num_frames is not None
        conv = nn.Conv2d if frames else nn.Conv3d
        norm = nn.BatchNorm2d if frames else nn.BatchNorm3d
        pool = nn.MaxPool2d(2) if frames else nn.MaxPool3d((1, 2, 2))
        self.form = form
        self.frames_of_clip = num_frames or 1  # in the first dimension
        self.scale = inner**-0.5 if form == "original" else 1.0
        self.pool = pool if form == "original" else nn.Identity()
        after = [] if form == "original" else [pool]
        self.theta = conv(channels, inner, 1)
        self.phi = nn.Sequential(conv(channels, inner, 1), *after)
        self.g = nn.Sequential(conv(channels, inner, 1), *after)
        self.W = nn.Sequential(conv(inner, channels, 1), norm(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.pool(x)
        # (clips, places, channels): views where channels are last in memory.
        theta, phi, g = (
            y.movedim(1, -1).reshape(y.shape[0] // self.frames_of_clip, -1, y.shape[1])
            for y in (self.theta(x), self.phi(pooled), self.g(pooled))
        )
        weights = torch.softmax((self.scale * theta) @ phi.transpose(1, 2), dim=-1)
        y = (weights @ g).reshape(x.shape[0], *x.shape[2:], -1).movedim(-1, 1)
        return x + self.W(y)

    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Draw the weights: "tsm" has PyTorch's, "original" N(0, 0.01) and zero biases; both a normalisation at 0."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                assert module.bias is not None
                if self.form == "original":
                    module.weight.normal_(0.0, 0.01, generator=generator)
                    module.bias.zero_()
                else:
                    bound = module.in_channels**-0.5
                    module.weight.uniform_(-bound, bound, generator=generator)
                    module.bias.uniform_(-bound, bound, generator=generator)
            elif isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.weight.zero_()
                module.bias.zero_()


def add_non_local(network: nn.Module, form: NonLocalForm, num_frames: int | None) -> None:
    """Give five bottleneck blocks of a ResNet a non-local block each, which follows the residual one.

    Two of res3 and three of res4, in equal steps: "tsm" takes the first block of each step, "original" the last. In
    ResNet-50 that is 0, 2 of res3 and 0, 2, 4 of res4 for "tsm", 1, 3 and 1, 3, 5 for "original", as published.
    The code of "tsm" knows ResNet-50 alone; deeper networks get the same steps here.
    """
    for stage, count in STAGES.items():
        blocks = list(network.get_submodule(stage).children())
        step = len(blocks) // count
        for number in range(count):
            block = blocks[number * step if form == "tsm" else (number + 1) * step - 1]
            last = block.get_submodule("conv3")
            assert isinstance(last, nn.Conv2d | nn.Conv3d)
            block.nl = NonLocal(last.out_channels, form, num_frames)
