"""What all video networks share: from clip to logits, random draws by key, frozen norms, initial weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from summit_train.models.non_local import NonLocal
from summit_train.spec.catalog import FreezeBN, Pool1

if TYPE_CHECKING:
    from typing_extensions import Self


class KeyedModule(nn.Module):
    """A module with a random generator of its own, whose draws depend neither on ranks nor on what ran before.

    `reseed(seed)` before a micro-batch makes the draws of that micro-batch depend on the seed alone (and on the kind of
    device that the generator is on: CPU and CUDA draw different numbers).
    """

    def __init__(self) -> None:
        super().__init__()
        self._seed = 0
        self._generator: torch.Generator | None = None

    def reseed(self, seed: int) -> None:
        """Restart the draws from `seed` in [0, 2**63); torch's CPU generator reads the low 32 bits."""
        self._seed = seed
        if self._generator is not None:
            self._generator.manual_seed(seed)

    def generator_on(self, device: torch.device) -> torch.Generator:
        """Return the generator, which continues after its last draw."""
        # Made here and not in __init__, since a module does not know its device before it is moved there.
        if self._generator is None or self._generator.device != device:
            self._generator = torch.Generator(device).manual_seed(self._seed)
        return self._generator

    def __getstate__(self) -> dict[str, Any]:
        # A CUDA generator cannot be copied or pickled; the seed can.
        return {**self.__dict__, "_generator": None}


class Dropout(KeyedModule):
    """Zeroes each element with probability `p` in [0, 1) in training and scales the rest by 1 / (1 - p)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.p == 0.0 or not self.training:
            return x
        # Drawn in fp32 whatever x is: under autocast the same elements fall as without it.
        draw = torch.rand(x.shape, generator=self.generator_on(x.device), device=x.device)
        return x * (draw >= self.p).to(x.dtype).div_(1.0 - self.p)


class DropPath(KeyedModule):
    """Zeroes whole clips with probability `p` in [0, 1) in training and scales the others by 1 / (1 - p).

    Huang et al., "Deep networks with stochastic depth", section 3. num_frames: of a clip in the first dimension. Each
    pass draws the same from the seed: a block that is computed again in the backward pass leaves out the same clips.
    """

    def __init__(self, p: float, num_frames: int = 1) -> None:
        super().__init__()
        self.p = p
        self.num_frames = num_frames

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.p == 0.0 or not self.training:
            return x
        generator = self.generator_on(x.device).manual_seed(self._seed)
        draw = torch.rand(len(x) // self.num_frames, generator=generator, device=x.device)
        kept = (draw >= self.p).to(x.dtype).div_(1.0 - self.p).repeat_interleave(self.num_frames)
        return x * kept.view(-1, *[1] * (x.dim() - 1))


class AddedModule(nn.Module):
    """A module that a network adds to a published trunk. It is trained where the trunk is frozen."""


class VideoNetwork(nn.Module):
    """A network on clips: float (N, T, C, H, W), in any memory format, to logits (N, num_classes).

    A subclass has a backbone, `extract`, and a head, `classify`. If these are not its own, they are `avgpool` of its
    `feature_maps`, and `dropout` and the linear layer `fc`. It sees every frame as an image of the batch (TSN,
    TSM) or the clip as a volume (I3D). Logits are fp32, or wider where the input is.

    `memory_format`: channels_last for images, channels_last_3d for volumes: that of frames stored as (N, T, H, W, C).
    `stages`: the modules after which T is reported, with the paper's names for them (Table 2).
    `sequences`: the nn.Sequentials whose members are the layers of a layer decay, and can be computed again in the
    backward pass. `stem`: the names of the convolutions that see the clip. `head`: the classifier's name.
    `undecayed`: names of weights that, like biases, have no weight decay.
    `frozen_until`: names of what a spec freezes, and for how many epochs (models.by_name.frozen_until).
    `pool1_form`: the pooling after conv1, if public networks with the same parameters differ in it.
    Where the head is a global average and one linear layer, `extract` averages what `feature_maps` returns.
    `sources`: SHA-256 of the files that build it, where they are not this package's, as keys of an experiment.
    `replaceable`: whether models/fast may replace its modules. `note`: on how it was built, for people.
    """

    memory_format: torch.memory_format = torch.channels_last
    sequences: tuple[str, ...] = ()
    stem: tuple[str, ...] = ("conv1",)
    head = "fc"
    pool1_form: Pool1 | None = None
    sources: Mapping[str, str] = MappingProxyType({})
    undecayed: tuple[str, ...] = ()
    frozen_until: Mapping[str, float] = MappingProxyType({})
    replaceable = True
    note = ""
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
        return self.per_clip(self.classify(self.extract(self.to_input(clip_NTCHW))), shape[0])

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

    def per_clip(self, outputs: torch.Tensor, num_clips: int) -> torch.Tensor:
        """Return the logits of each clip: the mean over its images or volumes."""
        # bf16 logits of 8 frames are averaged in fp32, so that the loss sees all their digits.
        wide = torch.promote_types(outputs.dtype, torch.float32)
        return outputs.view(num_clips, -1, outputs.shape[1]).mean(1, dtype=wide)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules but frozen normalisations, which stay in evaluation mode."""
        super().train(mode)
        for module in self.modules():
            if is_frozen(module):
                module.eval()
        return self

    def reseed(self, seed: int) -> None:
        """Make the random draws that follow, of dropout and of others, a function of `seed` alone."""
        for number, module in enumerate(m for m in self.modules() if isinstance(m, KeyedModule)):
            module.reseed((seed + number) % 2**63)

    def fitted(self, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a file's tensors, under this network's names, in its form. Raises ValueError for another network's."""
        return dict(found)

    def layer_numbers(self) -> dict[str, int]:
        """Return the layer of each parameter, by name: 1, 2, ... for the members of `sequences`, in their order.

        Pathways side by side are numbered side by side. What a module registers in front of its first block is layer 0;
        everything else belongs to the last layer, the classifier's. Without `sequences` that is all there is.
        """
        blocks: dict[str, int] = {}
        depths = Counter[str]()  # blocks of each module
        for sequence in self.sequences:
            parent, dot, _ = sequence.rpartition(".")
            for child, _ in self.get_submodule(sequence).named_children():
                depths[parent + dot] += 1
                blocks[f"{sequence}.{child}."] = depths[parent + dot]
        last = max(depths.values(), default=-1) + 1
        ahead = set(depths)  # modules whose first block is still to come
        numbers: dict[str, int] = {}
        for name, _ in self.named_parameters():
            block = next((block for block in blocks if name.startswith(block)), None)
            if block is not None:
                ahead -= {parent for parent in ahead if block.startswith(parent)}
                numbers[name] = blocks[block]
            else:
                numbers[name] = 0 if any(name.startswith(parent) for parent in ahead) else last
        return numbers

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
    inside_non_local = _modules_of_non_local(model)
    with torch.no_grad():
        for module in model.modules():
            if module in inside_non_local:
                continue
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                fan_out = module.out_channels * module.weight[0, 0].numel()
                module.weight.normal_(0.0, (2.0 / fan_out) ** 0.5, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, nn.Linear):
                module.weight.normal_(0.0, 0.001, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
        model.initialise_head(generator)
        for module in model.modules():
            if isinstance(module, NonLocal):
                module.initialise(generator)


def freeze_norms(network: nn.Module, which: FreezeBN) -> None:
    """Freeze the normalisations of `network`: "all", "all_but_first", as TSN's partial BN, or "none".

    A frozen one normalises by its running statistics and keeps them, and its weight and bias get no gradient (Lin et
    al., "TSM", section 5.1). Those of non-local blocks are never frozen, as in Lin et al.'s code: with its weight at 0
    such a block would never learn.
    """
    if which == "none":
        return
    inside_non_local = _modules_of_non_local(network)
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    for norm in norms[1:] if which == "all_but_first" else norms:
        if norm not in inside_non_local:
            norm.requires_grad_(False).eval()


def freeze_trunk(network: VideoNetwork) -> None:
    """Freeze everything but the classifier (in a TRN the frames' linear layer too), adapters and non-local blocks."""
    network.requires_grad_(False)
    # MobileNetV2 has no fc: all of its classifier is its head.
    classifier = {network.get_submodule(network.head), getattr(network, "fc", None)}
    for module in network.modules():
        if module in classifier or isinstance(module, AddedModule | NonLocal):
            module.requires_grad_(True)
    network.train(network.training)  # frozen normalisations are in evaluation mode


def is_frozen(module: nn.Module) -> bool:
    """True if a normalisation's weight gets no gradient; of one without weight, if it is marked `frozen`."""
    if not isinstance(module, _BatchNorm):
        return False
    return not module.weight.requires_grad if module.weight is not None else getattr(module, "frozen", False)


def trained_norms(network: nn.Module) -> list[_BatchNorm]:
    """Return the normalisations whose running statistics training moves: those that have some and are not frozen."""
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm) and not is_frozen(module)]
    return [norm for norm in norms if norm.running_mean is not None]


@contextmanager
def norm_momentum(norms: Sequence[_BatchNorm], momentum: float) -> Iterator[None]:
    """Give normalisations another momentum for the block: 0 keeps their running statistics, 1 forgets earlier ones."""
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = momentum
    try:
        yield
    finally:
        for norm, earlier in zip(norms, before, strict=True):
            norm.momentum = earlier


def _modules_of_non_local(network: nn.Module) -> set[nn.Module]:
    return {module for block in network.modules() if isinstance(block, NonLocal) for module in block.modules()}
