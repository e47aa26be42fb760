"""The networks as integers: parameters, multiply-adds, saved activations and T per stage, without torch.

`plan` needs these numbers where torch may not even be installed, so the architectures are written down a
second time here, layer by layer; the tests hold them equal to `summit_train.models`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

ARCHS: tuple[str, ...] = ("tsm", "tsn", "i3d_3x3x3", "i3d_3x1x1")
BLOCKS: dict[str, tuple[int, int, int, int]] = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
}
BOTTLENECK_BACKBONES: tuple[str, ...] = ("resnet50", "resnet101")
SHIFT_PLACES: tuple[str, ...] = ("residual", "in_place")
SHIFT_DIRECTIONS: tuple[str, ...] = ("both", "past")

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Conv:
    """A convolution without bias; `kernel` and `output` (its size) are (t, h, w)."""

    name: str
    in_channels: int
    out_channels: int
    kernel: Triple
    output: Triple

    @property
    def parameters(self) -> int:
        return self.in_channels * self.out_channels * math.prod(self.kernel)

    @property
    def multiply_adds(self) -> int:
        return self.parameters * math.prod(self.output)

    @property
    def output_elements(self) -> int:
        return self.out_channels * math.prod(self.output)


@dataclass(frozen=True)
class Norm:
    """A batch normalisation: a weight and a bias for each channel."""

    name: str
    channels: int

    @property
    def parameters(self) -> int:
        return 2 * self.channels


@dataclass(frozen=True)
class Linear:
    """The classifier, applied to `rows` feature vectors of each clip: every frame's (2D) or one (I3D)."""

    name: str
    in_features: int
    out_features: int
    rows: int

    @property
    def parameters(self) -> int:
        return (self.in_features + 1) * self.out_features

    @property
    def multiply_adds(self) -> int:
        return self.rows * self.in_features * self.out_features


@dataclass(frozen=True)
class Structure:
    """One network on one clip of (T, H, W) pixels, `clip`.

    `stages` maps data, conv1, pool1, res2, (pool2,) res3, res4, res5, global_pool to T there (the paper's
    Table 2). `activation_elements` are the floats that a forward pass keeps for the backward pass, each
    tensor once, without the norms' statistics per channel and without dropout; `index_elements` are the
    64-bit positions that the max pools keep. With recomputation only `block_input_elements` of them, which are those
    outside the blocks and the blocks' inputs, stay all the time, and `largest_block_elements` while its block is
    computed again.
    """

    clip: Triple
    convs: tuple[Conv, ...]
    norms: tuple[Norm, ...]
    fc: Linear
    stages: dict[str, int]
    activation_elements: int
    index_elements: int
    block_input_elements: int
    largest_block_elements: int

    @property
    def parameters(self) -> int:
        body = sum(conv.parameters for conv in self.convs) + sum(norm.parameters for norm in self.norms)
        return body + self.fc.parameters

    @property
    def gradient_bytes(self) -> int:
        """What one rank gives to the allreduce of a step, in fp32."""
        return 4 * self.parameters

    @property
    def multiply_adds(self) -> int:
        """Of convolutions and classifier, forward, one clip; norms and pools are not counted (as usual)."""
        return sum(conv.multiply_adds for conv in self.convs) + self.fc.multiply_adds

    @property
    def input_bytes(self) -> int:
        """One clip as it travels: uint8, so also the number of its elements."""
        return 3 * math.prod(self.clip)

    @property
    def compute_io(self) -> float:
        """Multiply-adds for each input element (the paper's Table 1)."""
        return self.multiply_adds / self.input_bytes

    def activation_bytes(self, bytes_per_element: int = 4, recompute: bool = False) -> int:
        """Memory that one clip's activations hold at most between forward and backward pass."""
        recomputed = self.block_input_elements + self.largest_block_elements
        elements = recomputed if recompute else self.activation_elements
        return bytes_per_element * elements + 8 * self.index_elements


def scaled_channels(channels: int, width: float) -> int:
    """`channels` times `width`, rounded to the nearest multiple of 8, at least 8."""
    return max(8, int(channels * width / 8 + 0.5) * 8)


def minimum_frames(arch: str) -> int:
    """Fewest frames of a clip: the product of the network's strides in time.

    16 for i3d_3x3x3 (pool1, res3, res4, res5), 8 for i3d_3x1x1 (conv1, pool1, pool2), 1 for the 2D networks.
    With fewer, a stage is down to one frame while strides are still to come: they halve nothing, and the
    kernels there see padding alone on both sides.
    """
    _check_choice("arch", arch, ARCHS)
    return {"i3d_3x3x3": 16, "i3d_3x1x1": 8}.get(arch, 1)


def check_architecture(arch: str, backbone: str, num_frames: int) -> None:
    """Raise ValueError, with what would be right, for a network that does not exist or a clip too short."""
    fewest = minimum_frames(arch)
    _check_choice("backbone", backbone, BLOCKS)
    if arch == "i3d_3x1x1":
        _check_choice("backbone of i3d_3x1x1 (it inflates 1x1 convolutions)", backbone, BOTTLENECK_BACKBONES)
    if num_frames < fewest:
        raise ValueError(
            f"{arch} needs at least {fewest} frames, the product of its strides in time; num_frames is {num_frames}"
        )


def describe(
    arch: str,
    backbone: str = "resnet50",
    width: float = 1.0,
    num_classes: int = 400,
    num_frames: int = 8,
    height: int = 224,
    width_px: int = 224,
    *,
    shift_fraction: float = 0.125,
    shift_place: str = "residual",
    shift_direction: str = "both",
) -> Structure:
    """The structure of `summit_train.models.build_model(...)` on one clip of num_frames x height x width_px.

    `width` is the channel multiplier. The shift settings only touch the activations of "tsm": an in-place shift keeps a
    shifted copy of a block's input beside the input; a residual one what falls out of a projection's input, and with
    recomputation of every block's. Raises ValueError as `check_architecture` does.
    """
    check_architecture(arch, backbone, num_frames)
    _check_choice("shift_place", shift_place, SHIFT_PLACES)
    _check_choice("shift_direction", shift_direction, SHIFT_DIRECTIONS)
    clip = (num_frames, height, width_px)
    if min(*clip, num_classes) < 1 or not 0 < width < math.inf:
        raise ValueError(f"a clip of {clip}, {num_classes} classes, width {width}: all of them are positive")
    ways = 2 if shift_direction == "both" else 1
    net = _Network(arch, backbone, width, shift_fraction if arch == "tsm" else 0.0, shift_place, ways)
    walk = _Walk(channels=3, size=clip)
    net.stem(walk)
    for stage in range(4):
        net.stage(walk, stage)
    rows = 1 if arch.startswith("i3d") else num_frames
    fc = Linear("fc", walk.channels, num_classes, rows)
    walk.keep("avgpool", rows * walk.channels)
    walk.stages["global_pool"] = 1
    return Structure(
        clip, tuple(walk.convs), tuple(walk.norms), fc, walk.stages, sum(walk.kept.values()), walk.indices,
        sum(count for name, count in walk.kept.items() if not _block_of(name) or name in walk.block_inputs)
        + walk.input_ends,
        max(walk.kept_by_block().values()),
    )  # fmt: skip


def _block_of(name: str) -> str:
    """The block that a tensor belongs to, "layer1.0", or "" outside of them."""
    return ".".join(name.split(".")[:2]) if name.startswith("layer") else ""


def _check_choice(name: str, value: str, valid: Collection[str]) -> None:
    if value not in valid:
        raise ValueError(f"{name} is {value!r}; valid: {', '.join(valid)}")


@dataclass
class _Walk:
    """One clip on its way through the layers: its channels and size (T, H, W) now, and what it passed.

    `kept` maps the name of a tensor that the backward pass needs to its elements; a tensor that two layers
    keep has one name, so it counts once. `now` is the name of the tensor that the walk stands at.
    """

    channels: int
    size: Triple
    now: str = "data"
    convs: list[Conv] = field(default_factory=list)
    norms: list[Norm] = field(default_factory=list)
    stages: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    indices: int = 0
    block_inputs: set[str] = field(default_factory=set)
    input_ends: int = 0  # what falls out of the blocks' inputs, which are stored shifted

    def kept_by_block(self) -> Counter[str]:
        """What each block keeps besides its input."""
        counts: Counter[str] = Counter()
        for name, elements in self.kept.items():
            if _block_of(name):
                counts[_block_of(name)] += elements
        return counts

    @property
    def elements(self) -> int:
        return self.channels * math.prod(self.size)

    def keep(self, name: str, elements: int) -> None:
        self.kept[name] = elements

    def conv_norm(self, prefix: str, number: str, out_channels: int, kernel: Triple, stride: Triple) -> None:
        """Convolution (keeps its input) and norm (keeps the convolution's output)."""
        self.keep(self.now, self.elements)
        conv_name = f"{prefix}conv{number}"
        self._convolve(conv_name, out_channels, kernel, stride)
        self.keep(conv_name, self.elements)
        self.norms.append(Norm(f"{prefix}bn{number}", out_channels))
        self.now = f"{prefix}bn{number}"

    def relu(self) -> None:
        """In place, and it keeps its output: the tensor of the norm before it."""
        self.keep(self.now, self.elements)

    def max_pool(self, name: str, kernel: Triple, stride: Triple, padding: Triple) -> None:
        """Keeps its input and the position of each maximum."""
        self.keep(self.now, self.elements)
        self.size = _output_size(self.size, kernel, stride, padding)
        self.indices += self.elements
        self.now = name

    def shortcut(self, prefix: str, source: str, channels: int, size: Triple, stride: Triple) -> None:
        """The block's 1x1 convolution beside the branch, from tensor `source`; its norm's output is added."""
        self.keep(source, channels * math.prod(size))
        out_size = _output_size(size, (1, 1, 1), stride, (0, 0, 0))
        conv = Conv(f"{prefix}downsample.0", channels, self.channels, (1, 1, 1), out_size)
        self.convs.append(conv)
        self.norms.append(Norm(f"{prefix}downsample.1", self.channels))
        self.keep(conv.name, conv.output_elements)

    def _convolve(self, name: str, out_channels: int, kernel: Triple, stride: Triple) -> None:
        padding = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2)
        self.size = _output_size(self.size, kernel, stride, padding)
        self.convs.append(Conv(name, self.channels, out_channels, kernel, self.size))
        self.channels = out_channels


@dataclass(frozen=True)
class _Network:
    """The rules of the four architectures (the paper's Tables 1 and 2; Wang et al.; Hara et al.)."""

    arch: str
    backbone: str
    width: float
    shift_fraction: float
    shift_place: str
    shift_ways: int

    def stem(self, walk: _Walk) -> None:
        """conv1 and pool1, 2D or with the kernels and strides in time of the two I3Ds."""
        conv_t, conv_stride, pool_t, pool_stride, pool_pad = {
            "i3d_3x3x3": (7, 1, 3, 2, 1),
            "i3d_3x1x1": (5, 2, 2, 2, 0),
        }.get(self.arch, (1, 1, 1, 1, 0))
        walk.stages["data"] = walk.size[0]
        channels = scaled_channels(64, self.width)
        walk.conv_norm("", "1", channels, (conv_t, 7, 7), (conv_stride, 2, 2))
        walk.relu()
        walk.stages["conv1"] = walk.size[0]
        walk.max_pool("maxpool", (pool_t, 3, 3), (pool_stride, 2, 2), (pool_pad, 1, 1))
        walk.stages["pool1"] = walk.size[0]

    def stage(self, walk: _Walk, stage: int) -> None:
        """layer1 (stage 0, the paper's res2) to layer4 (res5), and pool2 where there is one."""
        for block in range(BLOCKS[self.backbone][stage]):
            self.block(walk, stage, block)
        walk.stages[f"res{stage + 2}"] = walk.size[0]
        if self.arch == "i3d_3x1x1" and stage == 0:
            walk.max_pool("pool2", (2, 1, 1), (2, 1, 1), (0, 0, 0))
            walk.stages["pool2"] = walk.size[0]

    def block(self, walk: _Walk, stage: int, block: int) -> None:
        """Branch, shortcut, sum, relu."""
        prefix = f"layer{stage + 1}.{block}."
        channels = scaled_channels((64, 128, 256, 512)[stage], self.width)
        first = stage > 0 and block == 0
        stride = (2 if first and self.arch == "i3d_3x3x3" else 1, *((2, 2) if first else (1, 1)))
        walk.block_inputs.add(walk.now)
        if self._shifts(walk.channels) and self.shift_place == "in_place":
            walk.now = f"{prefix}shift"
        source, in_channels, in_size = walk.now, walk.channels, walk.size
        end_channels = self._end_channels(in_channels, stage, block)
        walk.input_ends += end_channels * math.prod(in_size[1:])
        self._branch(walk, prefix, stage, block, channels, stride)
        if stride != (1, 1, 1) or walk.channels != in_channels:
            walk.shortcut(prefix, source, in_channels, in_size, stride)
            walk.keep(f"{prefix}downsample.ends", end_channels * math.prod(walk.size[1:]))
        walk.relu()

    def _branch(self, walk: _Walk, prefix: str, stage: int, block: int, channels: int, stride: Triple) -> None:
        spatial = (3 if self.arch == "i3d_3x3x3" else 1, 3, 3)
        one = (1, 1, 1)
        if self.backbone in BOTTLENECK_BACKBONES:
            pointwise = (3 if self._inflates_pointwise(stage, block) else 1, 1, 1)
            walk.conv_norm(prefix, "1", channels, pointwise, one)
            walk.relu()
            walk.conv_norm(prefix, "2", channels, spatial, stride)
            walk.relu()
            walk.conv_norm(prefix, "3", 4 * channels, one, one)
        else:
            walk.conv_norm(prefix, "1", channels, spatial, stride)
            walk.relu()
            walk.conv_norm(prefix, "2", channels, spatial, one)

    def _inflates_pointwise(self, stage: int, block: int) -> bool:
        """i3d_3x1x1: all blocks of res2, then 1010.. in res3 and res4, 010 in res5."""
        if self.arch != "i3d_3x1x1":
            return False
        return stage == 0 or block % 2 == (1 if stage == 3 else 0)

    def _shifts(self, channels: int) -> bool:
        """Whether a shift moves anything."""
        return self._fold(channels) > 0

    def _fold(self, channels: int) -> int:
        return int(channels * self.shift_fraction + 1e-9)

    def _end_channels(self, channels: int, stage: int, block: int) -> int:
        """Of what falls out of a block's input, 0 where that does not come shifted.

        The first one's does not; a residual ResNet-101 shifts every second block.
        """
        every = 2 if self.backbone == "resnet101" else 1
        rolled = self.shift_place == "residual" and block % every == 0 and (stage, block) != (0, 0)
        return self.shift_ways * self._fold(channels) if rolled else 0


def _output_size(size: Triple, kernel: Triple, stride: Triple, padding: Triple) -> Triple:
    t, h, w = ((n + 2 * p - k) // s + 1 for n, k, s, p in zip(size, kernel, stride, padding, strict=True))
    return t, h, w
