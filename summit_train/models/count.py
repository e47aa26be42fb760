"""Count a network on itself: shapes without numbers, on torch's meta device."""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from summit_train.core.count import Count, Layer
from summit_train.core.errors import UserError
from summit_train.models.build import build_network, plain_network
from summit_train.models.by_name import freeze_by_name
from summit_train.models.fast import accelerate
from summit_train.models.online import cache_shapes
from summit_train.models.video import VideoNetwork
from summit_train.spec import ModelSpec, Spec
from summit_train.spec.catalog import is_foreign
from summit_train.spec.checks import stream_problem

# What autocast keeps in fp32, as additional 16-bit elements per element: of a softmax its result, beside a 16-bit copy,
# and of a layer norm its input, which is as large as its result.
_WIDE = {"SoftmaxBackward0": 2, "NativeLayerNormBackward0": 1}


def count(model: VideoNetwork, height: int, width: int | None = None, device: str = "meta") -> Count:
    """Count `model` on one clip of height x width pixels (square without width), on a copy, in about 0.1 s."""
    clip = (model.num_frames, height, height if width is None else width)
    shadow = copy.deepcopy(model).to(device).eval()
    seen = _Watch(shadow)
    # Channels last, as clips arrive.
    input_NTCHW = torch.zeros(1, *clip, model.in_channels, device=device).permute(0, 1, 4, 2, 3)
    kept = torch.autograd.graph.saved_tensors_hooks(seen.keep, lambda tensor: tensor)
    with FlopCounterMode(display=False) as counter, torch.enable_grad(), kept:
        output = shadow(input_NTCHW)
    pooled = {"global_pool": 1} if output.dim() == 2 else {}  # a detector's maps are those of each frame
    outside = seen.outside()
    by_block = Counter[str]()
    for storage, (elements, block) in seen.floats.items():
        if storage not in outside:
            by_block[block] += elements
    recomputed = (seen.before[block] + elements for block, elements in by_block.items())
    wide = {block: sum(added.values()) for block, added in seen.wide.items()}
    return Count(
        clip=clip,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained_parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        multiply_adds=counter.get_total_flops() // 2,
        input_bytes=input_NTCHW.numel(),
        layers=tuple(seen.layers),
        stages={"data": clip[0], **seen.stages, **pooled},
        kept_elements=sum(elements for elements, _ in seen.floats.values()),
        index_elements=sum(seen.indices.values()),
        recomputed_elements=max([sum(outside.values()), *recomputed]),
        wide_elements=sum(wide.values()),
        recomputed_wide_elements=wide.pop("", 0) + 2 * max(wide.values(), default=0),  # with their gradients
        largest_block_elements=max(by_block.values(), default=0),
        has_bn=any(isinstance(module, _BatchNorm) for module in model.modules()),
        note=model.note,
    )


def count_network(spec: Spec) -> Count:
    """Count the spec's network on one training clip, as it will run.

    trained_parameters: at the end of the run. Raises UserError for names of parameters that it does not have, and for a
    foreign network that takes training's pictures and not those of the evaluation.
    """
    data = spec.data
    count_at = partial(count_model, spec.model, accelerated=not spec.execution.compile)
    counted = count_at(data.clip_shape)
    if is_foreign(spec.model.arch) and spec.evaluate.crops != "full":
        side = spec.evaluate.short_side
        try:
            count_at((data.num_frames, side, side, data.input.channels))
        except Exception as error:
            takes = f"{spec.model.arch} takes {data.crop} x {data.crop} pixels (data.crop) but not {side} x {side}"
            raise UserError(f"evaluate.short_side: {takes}: {error}") from error
    if spec.optimizer.freeze or spec.optimizer.lr_factors:
        with torch.device("meta"):
            network = build_network(spec)
        freeze_by_name(network, spec.schedule.epochs)
        trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
        counted = replace(counted, trained_parameters=trained)
    return counted


@cache
def count_model(model: ModelSpec, clip_shape: tuple[int, int, int, int], *, accelerated: bool = True) -> Count:
    """Count a network on one clip of (T, H, W, C)."""
    num_frames, height, width, channels = clip_shape
    with torch.device("meta"):
        network = plain_network(model, num_frames, channels)
        if accelerated:
            accelerate(network)
    try:
        return count(network, height, width)
    except (RuntimeError, TypeError) as error:
        if not is_foreign(model.arch):
            raise
        # Tensors on the meta device have no numbers, which some networks read.
        note = f"on the CPU to be counted, as it does not run on torch's meta device: {error}"
        return replace(count(plain_network(model, num_frames, channels), height, width, "cpu"), note=note)


def stream_elements(spec: Spec) -> int | None:
    """Return the elements that a stream of frames as in training caches; None where it cannot stream."""
    num_frames, height, width, channels = spec.data.clip_shape
    if stream_problem(spec.model) is not None:
        return None
    with torch.device("meta"):
        network = plain_network(spec.model, num_frames, channels)
    return sum(map(math.prod, cache_shapes(network, height, width)))


class _Watch:
    """The observations of hooks while `network` runs once.

    floats: the storages that autograd keeps -> their elements and the first block that keeps them, or "" for one
    outside the blocks. indices, block_inputs: storages -> elements. before: blocks -> the elements outside of them when
    they begin. wide: blocks -> storages -> what autocast adds. alive: the tensors, so that no storage is reused.
    """

    def __init__(self, network: VideoNetwork) -> None:
        self.layers: list[Layer] = []
        self.stages: dict[str, int] = {}
        self.floats: dict[int, tuple[int, str]] = {}
        self.indices: dict[int, int] = {}
        self.block_inputs: dict[int, int] = {}
        self.before: dict[str, int] = {}
        self.wide: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self.alive: list[torch.Tensor] = []
        self.block = ""
        self.parameters = {_storage(parameter) for parameter in network.parameters()}
        self.titles = network.stages
        self.sequences = network.sequences
        for name, module in network.named_modules():
            module.register_forward_hook(partial(self.leave, name))
            if name.rpartition(".")[0] in self.sequences:
                module.register_forward_pre_hook(partial(self.enter, name))

    def enter(self, name: str, block: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.block = name
        self.alive.append(inputs[0])
        self.block_inputs[_storage(inputs[0])] = inputs[0].numel()
        self.before[name] = sum(self.outside().values())

    def outside(self) -> dict[int, int]:
        """Return the storages that stay where blocks are computed again, with their elements."""
        return self.block_inputs | {storage: number for storage, (number, block) in self.floats.items() if not block}

    def leave(self, name: str, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        elements = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if isinstance(module, nn.Conv2d | nn.Conv3d | nn.Linear):
            product = (output.numel() // len(module.weight), module.weight[0].numel(), len(module.weight))
            self.layers.append(Layer(name, elements, product))
        elif elements and self.layers:
            self.layers[-1] = replace(self.layers[-1], parameters=self.layers[-1].parameters + elements)
        if name in self.titles:
            # One clip: frames are the batch of a 2D network, and the third dimension of (N, C, T, H, W).
            self.stages[self.titles[name]] = output.shape[0] if output.dim() == 4 else output.shape[2]
        if name.rpartition(".")[0] in self.sequences:
            self.block = ""

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that autograd keeps for the backward pass."""
        storage = _storage(tensor)
        made = tensor if tensor._base is None else tensor._base
        self.alive.append(tensor)
        if factor := _WIDE.get(type(made.grad_fn).__name__):
            self.wide[self.block][storage] = factor * made.numel()
        if tensor.dim() >= 2 and storage not in self.parameters:
            if tensor.dtype == torch.int64:
                self.indices[storage] = tensor.numel()
            # What is kept outside of the blocks stays, whichever block had it first.
            elif not self.block or storage not in self.floats:
                self.floats[storage] = (tensor.untyped_storage().nbytes() // tensor.element_size(), self.block)
        return tensor


def _storage(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage; meta tensors have no address."""
    return int(tensor.untyped_storage()._cdata)
