"""ResNet-18/34/50/101 for video: the 2D network (TSN, TSM) and two inflated ones (I3D), from the same blocks.

Parameter names are torchvision's, also in the inflated networks, whose kernels only have one more dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import nn

from summit_train.models.dropout import Dropout
from summit_train.models.norm import Norm2d, Norm3d
from summit_train.models.pointwise import Conv2d
from summit_train.models.recompute import RecomputedBlocks
from summit_train.models.rolled import Roll, Stream
from summit_train.models.shift import TemporalShift, num_shifted_channels
from summit_train.models.shifted_conv import ShiftedConv2d

# Blocks in layer1 .. layer4 (He et al., Table 1).
BLOCKS: dict[str, tuple[int, int, int, int]] = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
}
BOTTLENECK_BACKBONES: tuple[str, ...] = ("resnet50", "resnet101")
STAGE_CHANNELS: tuple[int, ...] = (64, 128, 256, 512)

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class BlockTime:
    """What a residual block does in time: kernel lengths of its 1x1 and 3x3 convolutions, and its stride.

    `pointwise` is read by the first 1x1 convolution of a bottleneck only, `spatial` by every 3x3.
    """

    pointwise: int = 1
    spatial: int = 1
    stride: int = 1


@dataclass(frozen=True)
class StemTime:
    """What the stem does in time. `pool2` is the stride of the pool after layer1; 1 means none."""

    conv_kernel: int = 1
    conv_stride: int = 1
    pool_kernel: int = 1
    pool_stride: int = 1
    pool_padding: int = 0
    pool2: int = 1


def scaled_channels(channels: int, width: float) -> int:
    """`channels` times `width`, rounded to the nearest multiple of 8, at least 8."""
    return max(8, int(channels * width / 8 + 0.5) * 8)


@dataclass(frozen=True)
class Shift:
    """The temporal shift of a block: in front of its first convolution, or (in place) of its shortcut too."""

    num_frames: int
    fraction: float
    direction: str
    in_place: bool


def convolution(
    num_dims: int, in_channels: int, out_channels: int, kernel: Triple, stride: Triple, shift: Shift | None = None
) -> nn.Module:
    """A convolution without bias, padded by half its kernel; `kernel` and `stride` are (t, h, w).

    One that has a shift before it (of 2D networks only) reads its input shifted.
    """
    padding = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2)
    if shift is not None and num_shifted_channels(in_channels, shift.fraction):
        return ShiftedConv2d(
            in_channels, out_channels, kernel[1:], stride[1:], padding[1:],
            num_frames=shift.num_frames, fraction=shift.fraction, direction=shift.direction,
        )  # fmt: skip
    if num_dims == 2:
        return Conv2d(in_channels, out_channels, kernel[1:], stride[1:], padding[1:], bias=False)
    return nn.Conv3d(in_channels, out_channels, kernel, stride, padding, bias=False)


def _of_branch(shift: Shift | None) -> Shift | None:
    return None if shift is None or shift.in_place else shift


def normalisation(num_dims: int, channels: int) -> Norm2d | Norm3d:
    """Batch normalisation over N, (T,) H and W."""
    return Norm2d(channels) if num_dims == 2 else Norm3d(channels)


def max_pool(num_dims: int, kernel: Triple, stride: Triple, padding: Triple) -> nn.Module:
    """A max pool; `kernel`, `stride` and `padding` are (t, h, w)."""
    if num_dims == 2:
        return nn.MaxPool2d(kernel[1:], stride[1:], padding[1:])
    return nn.MaxPool3d(kernel, stride, padding)


class Block(nn.Module):
    """What both residual blocks share: relu(branch(x) + shortcut).

    A residual shift (TSM, Figure 3) belongs to the branch's first convolution, and the shortcut carries the original
    activation; an in-place shift moves the block's input, so that the shortcut carries the shifted one too.

    hands_on: a block reads the result, as a `Stream`; else it is a tensor. after: how that is stored, None with every
    frame in its place. Under torch.compile, which fuses a copy with what is around it, all are tensors.
    """

    expansion: int
    conv1: nn.Module

    def __init__(self, shift: Shift | None) -> None:
        super().__init__()
        self.shift: nn.Module | None = None
        if shift is not None and shift.in_place:
            self.shift = TemporalShift(shift.num_frames, shift.fraction, shift.direction)
        self.downsample: nn.Sequential | None = None
        self.hands_on = False
        self.after: Roll | None = None

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        """The branch between its first convolution and its last normalisation."""
        raise NotImplementedError

    @property
    def last_norm(self) -> Norm2d | Norm3d:
        """The branch's last normalisation."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor | Stream) -> torch.Tensor | Stream:
        stream = x if isinstance(x, Stream) else Stream.of(x)
        out, shortcut = self._of_plain(stream) if stream.roll is None else self._of_rolled(stream)
        hands_on = self.hands_on and not torch.compiler.is_compiling()
        result = self.last_norm.joined(self.branch(out), shortcut, self.after if hands_on else None)
        return result if hands_on else result.frames

    def _of_plain(self, x: Stream) -> tuple[torch.Tensor, Stream]:
        """(the first convolution's result, the shortcut)."""
        if self.shift is not None:
            x = Stream.of(self.shift(x.frames))
        if self.downsample is None:
            return self.conv1(x.frames), x
        return self.conv1(x.frames), Stream.of(self.downsample(x.beside))

    def _of_rolled(self, x: Stream) -> tuple[torch.Tensor, Stream]:
        conv1 = cast(ShiftedConv2d, self.conv1)
        if self.downsample is None:
            return conv1.of_rolled(x), x
        projection, norm = self.downsample
        out, shortcut = conv1.beside_projection(x, cast(nn.Conv2d, projection))
        return out, Stream.of(norm(shortcut))

    def _add_downsample(self, num_dims: int, in_channels: int, out_channels: int, stride: Triple) -> None:
        if in_channels == out_channels and stride == (1, 1, 1):
            return
        self.downsample = nn.Sequential(
            convolution(num_dims, in_channels, out_channels, (1, 1, 1), stride),
            normalisation(num_dims, out_channels),
        )


class BasicBlock(Block):
    """Two 3x3 convolutions (ResNet-18 and 34)."""

    expansion = 1

    def __init__(
        self,
        num_dims: int,
        in_channels: int,
        channels: int,
        stride: int,
        time: BlockTime,
        shift: Shift | None,
    ) -> None:
        super().__init__(shift)
        kernel, strides = (time.spatial, 3, 3), (time.stride, stride, stride)
        self.conv1 = convolution(num_dims, in_channels, channels, kernel, strides, _of_branch(shift))
        self.bn1 = normalisation(num_dims, channels)
        self.conv2 = convolution(num_dims, channels, channels, kernel, (1, 1, 1))
        self.bn2 = normalisation(num_dims, channels)
        self._add_downsample(num_dims, in_channels, channels, strides)

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.conv2(self.bn1.rectified(x))
        return result

    @property
    def last_norm(self) -> Norm2d | Norm3d:
        return self.bn2


class Bottleneck(Block):
    """1x1, 3x3, 1x1 (ResNet-50 and 101), the stride in the 3x3 as torchvision and its weights have it."""

    expansion = 4

    def __init__(
        self,
        num_dims: int,
        in_channels: int,
        channels: int,
        stride: int,
        time: BlockTime,
        shift: Shift | None,
    ) -> None:
        super().__init__(shift)
        out_channels, strides = channels * self.expansion, (time.stride, stride, stride)
        kernel = (time.pointwise, 1, 1)
        self.conv1 = convolution(num_dims, in_channels, channels, kernel, (1, 1, 1), _of_branch(shift))
        self.bn1 = normalisation(num_dims, channels)
        self.conv2 = convolution(num_dims, channels, channels, (time.spatial, 3, 3), strides)
        self.bn2 = normalisation(num_dims, channels)
        self.conv3 = convolution(num_dims, channels, out_channels, (1, 1, 1), (1, 1, 1))
        self.bn3 = normalisation(num_dims, out_channels)
        self._add_downsample(num_dims, in_channels, out_channels, strides)

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        out = self.conv2(self.bn1.rectified(x))
        result: torch.Tensor = self.conv3(self.bn2.rectified(out))
        return result

    @property
    def last_norm(self) -> Norm2d | Norm3d:
        return self.bn3


BlockShift = Callable[[int, int], Shift | None]
BlockTimes = Callable[[int, int], BlockTime]


@dataclass(frozen=True)
class Layout:
    """All that tells one network from another.

    `block_time(stage, block)` and `block_shift(stage, block)` are asked once for each block, both counted
    from 0; `num_dims` is 2 (frames are part of the batch) or 3 (T is a dimension of the convolutions);
    `recompute`: the blocks keep their inputs only.
    """

    backbone: str
    num_dims: int
    num_frames: int
    num_classes: int
    width: float
    dropout: float
    stem: StemTime
    block_time: BlockTimes
    block_shift: BlockShift
    recompute: bool


class VideoResNet(nn.Module):
    """The stem, four stages and the classifier; the subclasses say where time goes.

    Called with float (N, T, 3, H, W), in any memory format, it returns logits (N, num_classes), in fp32 or
    in the input's type where that is wider. T must be `num_frames`. `memory_format` is the one that the
    parameters should be converted to, and the one that frames stored as (N, T, H, W, 3) arrive in.
    """

    memory_format: torch.memory_format

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.num_frames = layout.num_frames
        dims, stem = layout.num_dims, layout.stem
        channels = scaled_channels(64, layout.width)
        self.conv1 = convolution(dims, 3, channels, (stem.conv_kernel, 7, 7), (stem.conv_stride, 2, 2))
        self.bn1 = normalisation(dims, channels)
        self.maxpool = max_pool(dims, (stem.pool_kernel, 3, 3), (stem.pool_stride, 2, 2), (stem.pool_padding, 1, 1))
        self.layer1, channels = _stage(layout, 0, channels)
        time_pool = (stem.pool2, 1, 1)
        self.pool2 = max_pool(dims, time_pool, time_pool, (0, 0, 0)) if stem.pool2 > 1 else None
        self.layer2, channels = _stage(layout, 1, channels)
        self.layer3, channels = _stage(layout, 2, channels)
        self.layer4, channels = _stage(layout, 3, channels)
        for block, following in pairwise(self._blocks()):
            block.hands_on = self.pool2 is None or block is not self.layer1[-1]
            if isinstance(following.conv1, ShiftedConv2d):
                block.after = following.conv1.roll
        self.dropout = Dropout(layout.dropout)
        self.fc = nn.Linear(channels, layout.num_classes)

    def reseed_dropout(self, seed: int) -> None:
        """Make the dropout masks that follow a function of `seed` alone."""
        self.dropout.reseed(seed)

    def unroll(self) -> None:
        """Keep every frame in its place between the blocks (see models/rolled.py), at the shift's old price.

        Then all convolutions are called as modules and blocks give tensors, as hooks expect.
        """
        for block in self._blocks():
            block.after, block.hands_on = None, False

    def _blocks(self) -> Iterator[Block]:
        return (module for module in self.modules() if isinstance(module, Block))

    def unfuse(self) -> None:
        """Normalise, add and rectify one after the other, by PyTorch's operators (see models/norm.py), and slower.

        Then all normalisations are called as modules, as hooks expect.
        """
        for module in self.modules():
            if isinstance(module, Norm2d | Norm3d):
                module.fused = False

    def forward(self, clip_NTCHW: torch.Tensor) -> torch.Tensor:
        features = self.features(clip_NTCHW)
        logits = self.fc(self.dropout(features))
        # bf16 logits of 8 frames are averaged in fp32, so that the loss sees all their digits.
        wide = torch.promote_types(logits.dtype, torch.float32)
        mean: torch.Tensor = logits.mean(1, dtype=wide)
        return mean

    def features(self, clip_NTCHW: torch.Tensor) -> torch.Tensor:
        """(N, T, 3, H, W) -> (N, P, F): what the classifier sees; its P outputs are averaged (P = T or 1)."""
        raise NotImplementedError

    def body(self, x: torch.Tensor) -> torch.Tensor:
        """The convolutional part, on frames (N*T, 3, H, W) or volumes (N, 3, T, H, W)."""
        x = self.maxpool(self.bn1.rectified(self.conv1(x)))
        x = self.layer1(x)
        if self.pool2 is not None:
            x = self.pool2(x)
        maps: torch.Tensor = self.layer4(self.layer3(self.layer2(x)))
        return maps

    def _check(self, clip_NTCHW: torch.Tensor) -> None:
        shape = tuple(clip_NTCHW.shape)
        if len(shape) != 5 or shape[1] != self.num_frames or shape[2] != 3:
            raise ValueError(f"the model takes (N, {self.num_frames}, 3, H, W); this input is {shape}")


class FrameResNet(VideoResNet):
    """TSN and TSM: every frame is an image of the batch; the frames' logits are averaged."""

    memory_format = torch.channels_last

    def features(self, clip_NTCHW: torch.Tensor) -> torch.Tensor:
        self._check(clip_NTCHW)
        # A view also for frames stored as (N, T, H, W, 3), which then are a channels-last batch.
        maps = self.body(clip_NTCHW.flatten(0, 1))
        pooled = nn.functional.adaptive_avg_pool2d(maps, 1).flatten(1)
        return pooled.view(clip_NTCHW.shape[0], self.num_frames, pooled.shape[1])


class InflatedResNet(VideoResNet):
    """I3D: convolutions over T, H and W; features averaged over all that is left of the three."""

    memory_format = torch.channels_last_3d

    def features(self, clip_NTCHW: torch.Tensor) -> torch.Tensor:
        self._check(clip_NTCHW)
        maps = self.body(clip_NTCHW.transpose(1, 2))
        return nn.functional.adaptive_avg_pool3d(maps, 1).flatten(1).unsqueeze(1)


def _stage(layout: Layout, stage: int, in_channels: int) -> tuple[nn.Sequential, int]:
    """layer1 (stage 0) to layer4 (stage 3), and the channels that leave it."""
    block_class = Bottleneck if layout.backbone in BOTTLENECK_BACKBONES else BasicBlock
    channels = scaled_channels(STAGE_CHANNELS[stage], layout.width)
    blocks: list[nn.Module] = []
    for block in range(BLOCKS[layout.backbone][stage]):
        stride = 2 if stage > 0 and block == 0 else 1
        time, shift = layout.block_time(stage, block), layout.block_shift(stage, block)
        blocks.append(block_class(layout.num_dims, in_channels, channels, stride, time, shift))
        in_channels = channels * block_class.expansion
    return (RecomputedBlocks if layout.recompute else nn.Sequential)(*blocks), in_channels


def initialise(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """torchvision's initial weights for the body, TSM's for the classifier, from one generator.

    Convolutions are normal with variance 2 / fan_out (He et al., 2015), norms 1 and 0, the classifier
    N(0, 0.001) with zero bias.
    """
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                fan_out = module.out_channels * _product(module.kernel_size)
                module.weight.normal_(0.0, (2.0 / fan_out) ** 0.5, generator=generator)
            elif isinstance(module, nn.Linear):
                module.weight.normal_(0.0, 0.001, generator=generator)
                module.bias.zero_()


def _product(numbers: Sequence[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result
