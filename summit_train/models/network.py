"""The spec's network: built, counted, and made ready to run."""

from __future__ import annotations

import math
import os
import tempfile
from collections import OrderedDict
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from summit_train.core import rng
from summit_train.core.count import Count
from summit_train.core.errors import UserError
from summit_train.core.machine import processor_digest
from summit_train.core.text import counted
from summit_train.models import VideoNetwork
from summit_train.models.build import network_of
from summit_train.models.by_name import freeze_by_name, frozen_until, lr_factors
from summit_train.models.count import count
from summit_train.models.fast import accelerate, execution
from summit_train.models.online import cache_shapes
from summit_train.models.precision import parameter_type
from summit_train.models.video import freeze_norms, freeze_trunk, trained_norms
from summit_train.spec import ModelSpec, Spec
from summit_train.spec.catalog import is_foreign
from summit_train.spec.checks import stream_problem

_COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def cpu_kernels(device: torch.device) -> str:
    """Return what the C++ kernels for CPUs are compiled for on this machine, or why a run has none."""
    return execution() if device.type == "cpu" else "not used"


def build_network(spec: Spec, generator: torch.Generator | None = None) -> VideoNetwork:
    """Build the spec's plain network, with its frozen parts, its weights drawn from `generator`."""
    network = _plain(spec.model, spec.data.num_frames, spec.data.input.channels, generator)
    for key, names in (("head_lr_factor", [network.head]), ("first_lr_factor", network.stem)):
        if getattr(spec.optimizer, key) != 1 and not any(names):
            attribute = "head" if names else "stem"
            raise UserError(f"optimizer.{key}: must be 1, because {spec.model.arch} has no attribute {attribute}")
    lr_factors(network, spec.optimizer)  # refuses names that the network does not have
    network.frozen_until = frozen_until(network, spec.optimizer)
    freeze_by_name(network, 0)
    return network


def initial_network(spec: Spec, device: torch.device) -> VideoNetwork:
    """Build the spec's network on `device`, ready to run, with weights that the seed alone decides.

    Clips are channels-last, and every convolution follows its input.
    """
    generator = torch.Generator().manual_seed(rng.seed_of(spec.seed, "weights"))
    network = build_network(spec, generator).to(device=device, dtype=parameter_type(spec.precision))
    make_ready(network, spec)
    return network


def make_ready(network: VideoNetwork, spec: Spec) -> None:
    """Let `network` run as `spec.execution` says, in place, on the device that it is on.

    Compiled networks are plain; others are accelerated. Parameters keep their names; `network.execution` describes it.
    """
    if spec.execution.recompute:
        recompute_blocks(network)
    if not spec.execution.compile:
        network.execution = accelerate(network)
        return
    separate_compile_cache()
    # Features alone: a compiler cannot take the dropout's generator. A function, so that the parameters' names stay.
    network.extract = torch.compile(network.extract)  # type: ignore[method-assign]
    network.execution = "compiled by torch.compile"


class RecomputedBlocks(nn.Sequential):
    """Blocks one after the other. Between forward and backward pass only each block's input is kept.

    The others are computed again (Chen et al., 2016). The gradients are those of nn.Sequential to the bit. For BN's
    running statistics a training step sets the momentum to 0 in its backward pass.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            if torch.is_grad_enabled() and self.training:
                # Blocks draw from no generator of torch's, and DropPath restarts its own from its seed in each pass,
                # so the state of the generators need not be kept.
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        return x


def recompute_blocks(network: VideoNetwork) -> None:
    for name in network.sequences:
        network.set_submodule(name, RecomputedBlocks(OrderedDict(network.get_submodule(name).named_children())))


def separate_compile_cache() -> None:
    """Give torch.compile a cache folder for this kind of processor, inside the user's own or the default one.

    Inductor names cache entries by source and compiler options, `-march=native` among them, so processors that share
    a cache in a home folder load each other's code. Further calls, in this process or its children, change nothing.
    """
    isa = torch.backends.cpu.get_cpu_capability()
    kind = f"{isa.lower()}-{processor_digest(isa, os.environ.get('ONEDNN_MAX_CPU_ISA', ''))}"
    parent = Path(os.environ.get(_COMPILE_CACHE) or Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}"))
    if parent.name != kind:
        (parent / kind).mkdir(mode=0o755, parents=True, exist_ok=True)  # only this user may write code there
        os.environ.update({_COMPILE_CACHE: str(parent / kind)})


def check_batch(spec: Spec) -> None:
    """Raise UserError where a normalisation that is trained would see one value of each channel in a micro-batch."""
    if spec.scale.clips_per_gpu > 1 or is_foreign(spec.model.arch):
        return
    with torch.device("meta"):
        network = build_network(spec).eval()
        num_frames, height, width, channels = spec.data.clip_shape
        clip_NTCHW = torch.zeros(1, num_frames, channels, height, width)
    sizes = list[int]()
    for norm in trained_norms(network):
        norm.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].numel() // inputs[0].shape[1]))
    network(clip_NTCHW)
    if min(sizes, default=2) < 2:
        size = f"{counted(num_frames, 'frame')} of {height} x {width} pixels"
        why = f"from one clip of {size}, a batch normalisation of {spec.model.arch} gets one value per channel"
        raise UserError(f"scale.clips_per_gpu: must be 2 or more, got 1: {why}; or try a larger data.crop")


def count_network(spec: Spec) -> Count:
    """Count the spec's network on one training clip, as it will run.

    trained_parameters: at the end of the run. Raises UserError for names of parameters that it does not have, and for a
    foreign network that takes training's pictures and not those of the evaluation.
    """
    model, data = spec.model, spec.data
    count_at = partial(count_model, model, accelerated=not spec.execution.compile)
    counted = count_at(data.clip_shape)
    if is_foreign(model.arch) and spec.evaluate.crops != "full":
        side = spec.evaluate.short_side
        try:
            count_at((data.num_frames, side, side, data.input.channels))
        except Exception as error:
            takes = f"{model.arch} takes {data.crop} x {data.crop} pixels (data.crop) but not {side} x {side}"
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
        network = _plain(model, num_frames, channels)
        if accelerated:
            accelerate(network)
    try:
        return count(network, height, width)
    except (RuntimeError, TypeError) as error:
        if not is_foreign(model.arch):
            raise
        # Tensors on the meta device have no numbers, which some networks read.
        note = f"on the CPU to be counted, as it does not run on torch's meta device: {error}"
        return replace(count(_plain(model, num_frames, channels), height, width, "cpu"), note=note)


def stream_elements(spec: Spec) -> int | None:
    """Return the elements that a stream of frames as in training caches; None where it cannot stream."""
    model, (num_frames, height, width, channels) = spec.model, spec.data.clip_shape
    if stream_problem(model) is not None:
        return None
    with torch.device("meta"):
        network = _plain(model, num_frames, channels)
    return sum(map(math.prod, cache_shapes(network, height, width)))


def _plain(model: ModelSpec, num_frames: int, channels: int, generator: torch.Generator | None = None) -> VideoNetwork:
    network = network_of(model, num_frames, channels, generator)
    if model.detector is not None:
        from summit_train.tasks.detection.rfcn import build_rfcn

        network = build_rfcn(network, model, model.detector, generator)
    freeze_norms(network, model.freeze_bn)
    if model.freeze_trunk:
        freeze_trunk(network)
    return network
