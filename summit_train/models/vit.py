"""ViT on video, with VideoMAE's parameter names: joint attention over a clip's tubelets, or an image ViT on each frame.

The first is the network that VideoMAE fine-tunes (Tong et al., 2022). In the second nothing but an adapter joins the
frames: the temporal shift (Lin et al., "TSM"), here of tokens, or an ST-Adapter (Pan et al., 2022).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import get_args

import torch
from torch import nn
from torch.nn import functional

from summit_train.models.resnet import scaled_channels
from summit_train.models.shift import TemporalShift
from summit_train.models.video import AddedModule, Dropout, DropPath, VideoNetwork
from summit_train.spec import NetworkSpec
from summit_train.spec.catalog import Positions

# Heads of 64 channels, and blocks: "An image is worth 16x16 words" (Dosovitskiy et al.), Table 1; S: DeiT, Table 1.
VARIANTS = {"vit_s": (6, 12), "vit_b": (12, 12), "vit_l": (16, 24)}
PATCH = 16  # pixels
TUBELET = 2  # frames
SIDE = 14  # patches along a side of 224 pixels, for which published networks have positions
_EPS = 1e-6  # of the normalisations


class Attention(nn.Module):
    """softmax(q k^T / sqrt(d)) v in each head (Vaswani et al., "Attention is all you need", section 3.2).

    Keys have no bias: it would add the same number to all scores of a query, which the softmax ignores.
    """

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(channels))
        self.v_bias = nn.Parameter(torch.zeros(channels))
        self.proj = nn.Linear(channels, channels)

    def forward(self, x_NLC: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x_NLC).chunk(3, -1)
        q = q + self.q_bias.to(q.dtype)
        v = v + self.v_bias.to(v.dtype)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        # Not torch's fused attention, whose backward pass on GPUs sums in any order: equal runs would differ.
        weights = torch.softmax(q.shape[-1] ** -0.5 * q @ k.transpose(-2, -1), dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class STAdapter(AddedModule):
    """x + up(conv(down(x))) on the patches of frames; conv is depthwise, over three frames. The class token passes.

    Pan et al., "ST-Adapter", section 3.2, with half of the channels inside, without an activation, as in its code. With
    conv at 0 it begins as the identity.
    """

    def __init__(self, channels: int, num_frames: int) -> None:
        super().__init__()
        inner = channels // 2
        self.num_frames = num_frames
        self.fc1 = nn.Linear(channels, inner)
        self.conv = nn.Conv3d(inner, inner, (3, 1, 1), padding=(1, 0, 0), groups=inner)
        self.fc2 = nn.Linear(inner, channels)

    def forward(self, x_MLC: torch.Tensor) -> torch.Tensor:
        token = x_MLC[:, :1]
        patches = x_MLC[:, 1:]
        y_NTPC = self.fc1(patches).unflatten(0, (-1, self.num_frames))
        y_NCTP1 = self.conv(y_NTPC.permute(0, 3, 1, 2).unsqueeze(-1))
        y_MPC = y_NCTP1.squeeze(-1).permute(0, 2, 3, 1).flatten(0, 1)
        return torch.cat([token, patches + self.fc2(y_MPC)], 1)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with places for what joins frames.

    `adapter`: an ST-Adapter in front of the first branch and its shortcut. `shift`: the temporal shift in front of the
    branch. num_frames: of a clip in the first dimension, which lose a branch together.
    """

    def __init__(self, channels: int, heads: int, drop_path: float, num_frames: int) -> None:
        super().__init__()
        self.adapter: nn.Module = nn.Identity()
        self.shift: nn.Module = nn.Identity()
        self.norm1 = nn.LayerNorm(channels, _EPS)
        self.attn = Attention(channels, heads)
        self.drop_path1 = DropPath(drop_path, num_frames)
        self.norm2 = nn.LayerNorm(channels, _EPS)
        layers = {"fc1": nn.Linear(channels, 4 * channels), "act": nn.GELU(), "fc2": nn.Linear(4 * channels, channels)}
        self.mlp = nn.Sequential(OrderedDict(layers))
        self.drop_path2 = DropPath(drop_path, num_frames)

    def forward(self, x_NLC: torch.Tensor) -> torch.Tensor:
        x = self.adapter(x_NLC)
        shifted = self.shift(x.transpose(1, 2)).transpose(1, 2)  # it takes channels in the second dimension
        x = x + self.drop_path1(self.attn(self.norm1(shifted)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class ViT(VideoNetwork):
    """The common parts of both forms: patches, blocks, the classifier, initial weights, and how published files fit."""

    sequences = ("blocks",)
    stem = ("patch_embed.proj",)

    def __init__(self, spec: NetworkSpec, num_frames: int, in_channels: int, *, frames_as_images: bool) -> None:
        super().__init__(num_frames, {"patch_embed": "patches"}, in_channels)
        assert spec.backbone is not None
        heads, depth = VARIANTS[spec.backbone]
        self.channels = channels = heads * scaled_channels(64, spec.width)
        conv = nn.Conv2d if frames_as_images else nn.Conv3d
        patch = (PATCH, PATCH) if frames_as_images else (TUBELET, PATCH, PATCH)
        self.patch_embed = nn.Sequential(OrderedDict(proj=conv(in_channels, channels, patch, patch)))  # type: ignore[arg-type]
        # Huang et al., "Deep networks with stochastic depth": the first block stays, the last goes most often.
        rates = [spec.drop_path * number / (depth - 1) for number in range(depth)]
        together = num_frames if frames_as_images else 1
        self.blocks = nn.Sequential(*(Block(channels, heads, rate, together) for rate in rates))
        self.dropout = Dropout(spec.dropout)
        self.fc = nn.Linear(channels, spec.num_classes)

    def initialise_head(self, generator: torch.Generator | None) -> None:
        """Draw VideoMAE's weights: truncated N(0, 0.02), patches as torch's convolutions; the classifier stays."""
        patches = self.get_parameter("patch_embed.proj.weight")
        bound = patches[0].numel() ** -0.5
        patches.uniform_(-bound, bound, generator=generator)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module is not self.fc:
                nn.init.trunc_normal_(module.weight, std=0.02, generator=generator)
            elif isinstance(module, STAdapter):
                nn.init.zeros_(module.conv.weight)

    def fitted(self, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a file's tensors with biases and weights of the attention as they are here, and without positions.

        A bias of the keys is left out, which changes nothing (see Attention). Raises ValueError for parts of an
        attention that do not belong together, and for another network's positions, which no name shows.
        """
        tensors = dict(found)
        for name in found:
            prefix, _, last = name.rpartition(".attn.")
            if last == "qkv.bias":  # V-JEPA's and timm's
                bias = tensors.pop(name)
                if bias.dim() != 1 or len(bias) % 3:
                    raise ValueError(f"{name} must be of queries, keys and values, got shape {tuple(bias.shape)}")
                q, _, v = bias.chunk(3)
                tensors |= {f"{prefix}.attn.q_bias": q, f"{prefix}.attn.v_bias": v}
            elif last == "query.weight":  # transformers'
                names = [f"{prefix}.attn.{part}.weight" for part in ("query", "key", "value")]
                tensors[f"{prefix}.attn.qkv.weight"] = _joined({name: tensors.pop(name, None) for name in names})
        if "norm_pre.weight" in found:
            raise ValueError("it has a normalisation before its blocks, as CLIP's ViTs, which vit does not have")
        return tensors


class VideoViT(ViT):
    """Joint attention over all tubelets of a clip, their mean, a normalisation, the classifier."""

    memory_format = torch.channels_last_3d

    def __init__(self, spec: NetworkSpec, num_frames: int, in_channels: int) -> None:
        super().__init__(spec, num_frames, in_channels, frames_as_images=False)
        self.positions = spec.positions
        self.fc_norm = nn.LayerNorm(self.channels, _EPS)

    def extract(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised mean of the tokens of clips (N, C, T, H, W), (N, F)."""
        patches_NCTHW = self.patch_embed(x)
        places = fixed_positions(self.positions, patches_NCTHW.shape[2:], self.channels, x.device)
        # In the weights' type: what the blocks add to is fp32 in bf16, too.
        tokens_NLC = patches_NCTHW.flatten(2).transpose(1, 2) + places.to(self.fc_norm.weight.dtype)
        return self.fc_norm(self.blocks(tokens_NLC).mean(1))

    def fitted(self, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Check the positions of V-JEPA's files, which are fixed, but not those of VideoMAE's, which have none."""
        tensors = super().fitted(found)
        theirs = tensors.pop("pos_embed", None)
        if theirs is None:
            return tensors
        for kind in get_args(Positions):
            places = fixed_positions(kind, (8, SIDE, SIDE), self.channels, torch.device("cpu"))[None]
            if theirs.shape == places.shape and torch.allclose(theirs.double(), places, atol=1e-2):
                if kind == self.positions:
                    return tensors
                raise ValueError(f"its pos_embed needs model.positions={kind}, got {self.positions}")
        right = "that of V-JEPA's files for 16 frames of 224 pixels"
        raise ValueError(f"its pos_embed must be {right}; the rotary positions of V-JEPA 2 do not fit at all")


class FrameViT(ViT):
    """An image ViT on each frame: a class token, attention within the frame, and logits averaged over the frames.

    The adapter, a shift or an ST-Adapter, joins the frames.
    """

    undecayed = ("cls_token", "pos_embed")  # as in timm and BEiT

    def __init__(self, spec: NetworkSpec, num_frames: int, in_channels: int) -> None:
        super().__init__(spec, num_frames, in_channels, frames_as_images=True)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, self.channels))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + SIDE * SIDE, self.channels))
        self.norm = nn.LayerNorm(self.channels, _EPS)
        for block in self.blocks:
            if spec.adapter == "shift":
                block.shift = TemporalShift(num_frames, spec.shift_fraction, spec.shift_direction)
            else:
                block.adapter = STAdapter(self.channels, num_frames)

    def extract(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised class tokens of frames (N*T, C, H, W), (N*T, F)."""
        patches_MCHW = self.patch_embed(x)
        grid = resized(self.pos_embed[:, 1:], *patches_MCHW.shape[2:])
        tokens_MPC = patches_MCHW.flatten(2).transpose(1, 2) + grid
        tokens_MPC = torch.cat([(self.cls_token + self.pos_embed[:, :1]).expand(len(x), -1, -1), tokens_MPC], 1)
        return self.norm(self.blocks(tokens_MPC)[:, 0])

    def initialise_head(self, generator: torch.Generator | None) -> None:
        super().initialise_head(generator)
        for embedding in (self.cls_token, self.pos_embed):
            nn.init.trunc_normal_(embedding, std=0.02, generator=generator)


def _joined(parts: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
    """Return matrices one below the other. Raises ValueError where one is missing or of another shape."""
    found = {name: part for name, part in parts.items() if part is not None}
    if missing := [name for name in parts if name not in found]:
        raise ValueError(f"it has {', '.join(found)} and no {', '.join(missing)}")
    shapes = {tuple(part.shape) for part in found.values()}
    if len(shapes) > 1 or any(len(shape) != 2 for shape in shapes):
        shown = ", ".join(f"{name} {tuple(part.shape)}" for name, part in found.items())
        raise ValueError(f"these must be matrices of one shape: {shown}")
    return torch.cat(list(found.values()))


def fixed_positions(kind: Positions, grid: Sequence[int], channels: int, device: torch.device) -> torch.Tensor:
    """Return the positions of a grid (T, H, W) of patches: sines and cosines (T*H*W, channels) in double precision.

    "index" (VideoMAE): of the patch's number, a sine and a cosine in turn. "grid" (V-JEPA): of the time in half of the
    channels, then of the row and of the column in a quarter each, sines before cosines. "grid_uniform" (V-JEPA with
    uniform_power, as published): in a third each, rounded up to a sine and a cosine more; the last ones are cut off.
    """
    axes = [torch.arange(length, dtype=torch.float64, device=device) for length in grid]
    if kind == "index":
        angles = _angles(torch.arange(math.prod(grid), dtype=torch.float64, device=device), channels)
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    places = torch.meshgrid(*axes, indexing="ij")
    third = 2 * math.ceil(channels / 6)
    shares = (channels // 2, channels // 4, channels // 4) if kind == "grid" else (third, third, third)
    of_axes = [_angles(place.flatten(), share) for place, share in zip(places, shares, strict=True)]
    return torch.cat([wave for angles in of_axes for wave in (angles.sin(), angles.cos())], 1)[:, :channels]


def _angles(places: torch.Tensor, channels: int) -> torch.Tensor:
    """Return p / 10000^(2i / channels), i < channels / 2, for each place p (Vaswani et al., section 3.5)."""
    powers = torch.arange(0, channels, 2, dtype=torch.float64, device=places.device) / channels
    return places[:, None] / 10000**powers


def resized(grid_1PC: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return the positions of SIDE x SIDE patches for another number of them, by bicubic interpolation.

    Without timm's antialiasing, with which finished runs of less than 224 pixels would be other networks.
    As two matrix products: the backward pass of torch's interpolation sums in any order on GPUs.
    """
    if (height, width) == (SIDE, SIDE):
        return grid_1PC
    identity = torch.eye(SIDE, dtype=grid_1PC.dtype, device=grid_1PC.device).view(1, SIDE, SIDE, 1)
    sizes = ((height, 1), (width, 1))
    rows, columns = (functional.interpolate(identity, size, mode="bicubic")[0, :, :, 0].T for size in sizes)
    grid_HWC = grid_1PC.view(SIDE, SIDE, -1)
    return torch.einsum("hi,wj,ijc->hwc", rows, columns, grid_HWC).flatten(0, 1)[None].to(grid_1PC.dtype)
