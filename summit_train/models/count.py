"""What a network costs on one clip, counted on the network itself: shapes without numbers, on torch's meta device."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from summit_train.models.video import VideoNetwork


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer, with the parameters of the normalisations that follow it.

    `product` is the layer as a matrix product, (rows, inner, columns): its multiply-adds are theirs multiplied.
    """

    name: str
    parameters: int
    product: tuple[int, int, int]

    @property
    def multiply_adds(self) -> int:
        """Return the multiply-adds of the forward pass."""
        return math.prod(self.product)


@dataclass(frozen=True)
class Count:
    """One network on one clip of (T, H, W) pixels, forward.

    `layers` are in the order in which they run. `stages` maps the paper's names to T there (Table 2). `kept_elements`
    are the floats that a forward pass keeps for the backward pass, each tensor once, without statistics per channel and
    dropout; `index_elements` are 64-bit positions, which max pools keep. With recomputed blocks only
    `outside_elements`, those outside the blocks and the blocks' inputs, stay all the time, and `largest_block_elements`
    while that block is computed again.
    """

    clip: tuple[int, int, int]
    parameters: int
    multiply_adds: int
    input_bytes: int
    layers: tuple[Layer, ...]
    stages: dict[str, int]
    kept_elements: int
    index_elements: int
    outside_elements: int
    largest_block_elements: int

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes that one rank gives to the allreduce of a step, in fp32."""
        return 4 * self.parameters

    @property
    def compute_io(self) -> float:
        """Return multiply-adds for each input element (the paper's Table 1)."""
        return self.multiply_adds / self.input_bytes

    def activation_bytes(self, bytes_per_element: int = 4, recompute: bool = False) -> int:
        """Return the most memory that one clip's activations hold between forward and backward pass."""
        elements = self.outside_elements + self.largest_block_elements if recompute else self.kept_elements
        return bytes_per_element * elements + 8 * self.index_elements

    def values(self) -> dict[str, Any]:
        """Return the object that `summit-train model --json` prints."""
        return {
            "parameters": self.parameters,
            "multiply_adds": self.multiply_adds,
            "input_bytes": self.input_bytes,
            "frames": self.clip[0],
            "stages": dict(self.stages),
            "compute_io": self.compute_io,
            "gradient_bytes": self.gradient_bytes,
        }


def count(model: VideoNetwork, height: int, width: int | None = None) -> Count:
    """Count `model` on one clip of height x width pixels (square without width); `model` is left alone.

    Takes about 0.1 s for a ResNet-50: a copy without numbers runs once.
    """
    clip = (model.num_frames, height, height if width is None else width)
    shadow = copy.deepcopy(model).to("meta").eval()
    walk = _Walk(shadow)
    # Channels last, as clips arrive.
    input_NTCHW = torch.empty(1, *clip, model.in_channels, device="meta").permute(0, 1, 4, 2, 3)
    with FlopCounterMode(display=False) as counter, torch.enable_grad(), walk.watched():
        logits = shadow(input_NTCHW)
    assert logits.dim() == 2, "one row of logits a clip: time is averaged away"
    outside, by_block = dict(walk.block_inputs), Counter[str]()
    for place, (elements, block) in walk.floats.items():
        if block and place not in outside:
            by_block[block] += elements
        else:
            outside[place] = elements
    return Count(
        clip=clip,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        multiply_adds=counter.get_total_flops() // 2,
        input_bytes=input_NTCHW.numel(),
        layers=tuple(walk.layers),
        stages={"data": clip[0], **walk.stages, "global_pool": 1},
        kept_elements=sum(elements for elements, _ in walk.floats.values()),
        index_elements=sum(walk.indices.values()),
        outside_elements=sum(outside.values()),
        largest_block_elements=max(by_block.values(), default=0),
    )


@dataclass
class _Walk:
    """What hooks see while the network runs once.

    `floats` maps a storage that autograd keeps to its elements and the first block that keeps it, or "" where one of
    the modules outside of the blocks does.
    `block_inputs` maps the storages of their inputs to elements.
    `alive` holds the tensors, so that no storage is used twice.
    """

    network: VideoNetwork
    layers: list[Layer] = field(default_factory=list)
    stages: dict[str, int] = field(default_factory=dict)
    floats: dict[int, tuple[int, str]] = field(default_factory=dict)
    indices: dict[int, int] = field(default_factory=dict)
    block_inputs: dict[int, int] = field(default_factory=dict)
    block: str = ""
    alive: list[torch.Tensor] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Hook the network for the block."""
        for name, module in self.network.named_modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d | nn.Linear):
                module.register_forward_hook(self._layer(name))
            elif isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.register_forward_hook(self._norm)
        for name, title in self.network.stages.items():
            self.network.get_submodule(name).register_forward_hook(self._stage(title))
        for name in self.network.blocks:
            for number, block in self.network.get_submodule(name).named_children():
                block.register_forward_pre_hook(self._enter(f"{name}.{number}"))
                block.register_forward_hook(self._leave)
        parameters = {_place(parameter) for parameter in self.network.parameters()}

        def _keep(tensor: torch.Tensor) -> torch.Tensor:
            place = _place(tensor)
            self.alive.append(tensor)
            if tensor.dim() >= 2 and place not in parameters:
                if tensor.dtype == torch.int64:
                    self.indices[place] = tensor.numel()
                else:
                    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                    # What is kept outside of the blocks stays, whichever block had it first.
                    if not self.block or place not in self.floats:
                        self.floats[place] = (elements, self.block)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(_keep, lambda tensor: tensor):
            yield

    def _layer(self, name: str) -> Callable[..., None]:
        def _hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            weight = module.weight
            assert isinstance(weight, torch.Tensor)
            parameters = sum(parameter.numel() for parameter in module.parameters())
            product = (output.numel() // len(weight), weight[0].numel(), len(weight))
            self.layers.append(Layer(name, parameters, product))

        return _hook

    def _norm(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if self.layers:
            last = self.layers[-1]
            own = sum(parameter.numel() for parameter in module.parameters())
            self.layers[-1] = Layer(last.name, last.parameters + own, last.product)

    def _stage(self, title: str) -> Callable[..., None]:
        def _hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            # One clip: frames are the batch of a 2D network, and the third dimension of (N, C, T, H, W).
            self.stages[title] = output.shape[0] if output.dim() == 4 else output.shape[2]

        return _hook

    def _enter(self, name: str) -> Callable[..., None]:
        def _hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            self.block = name
            self.alive.append(inputs[0])
            self.block_inputs[_place(inputs[0])] = inputs[0].numel()

        return _hook

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.block = ""


def _place(tensor: torch.Tensor) -> int:
    """Return what tells one storage from another; meta tensors have no address."""
    return int(tensor.untyped_storage()._cdata)
