"""The spec's network, made ready to run, and what it cannot run with."""

from __future__ import annotations

import math
import os
import tempfile
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from summit_train.core import rng
from summit_train.core.errors import UserError
from summit_train.core.machine import processor_digest
from summit_train.core.text import counted
from summit_train.models import VideoNetwork
from summit_train.models.build import build_network
from summit_train.models.count import count_network
from summit_train.models.fast import accelerate, execution
from summit_train.models.precision import parameter_type
from summit_train.models.video import trained_norms
from summit_train.spec import Spec
from summit_train.spec.catalog import is_foreign

_COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_WRONG = 0.1  # relative error of a gradient; a right one in bf16 is off by 0.002


def cpu_kernels(device: torch.device) -> str:
    """Return the target of this machine's C++ kernels for CPUs, or why a run has none."""
    return execution() if device.type == "cpu" else "not used"


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


def check_arithmetic(spec: Spec, device: torch.device) -> None:
    """Raise UserError where the gradients of `spec` on `device` would be wrong.

    With torch 2.13.0 on a CPU with AVX-512, oneDNN's weight gradient of a 3D convolution in bf16 is uninitialised
    memory where clips have exactly two frames and the kernel sees three. I3D 3x3x3 with 16 frames has two in res4.
    """
    if device.type != "cpu" or spec.precision != "bf16" or 2 not in count_network(spec).stages.values():
        return
    if error_of_two_frames() > _WRONG:
        wrong = "this CPU's library computes wrong gradients of 3D convolutions over two frames"
        has = f"a stage of {spec.model.title} has two with data.num_frames {spec.data.num_frames}"
        raise UserError(f"precision bf16: {wrong}, and {has}; take precision=fp32")


def error_of_two_frames() -> float:
    """Return the relative error of a weight gradient in bf16, of a kernel of three frames over two; inf for a NaN."""
    generator = torch.Generator().manual_seed(0)
    clips, grad = (torch.randn(2, 16, 2, 4, 4, generator=generator).bfloat16() for _ in range(2))
    gradients = list[torch.Tensor]()
    for dtype in (torch.bfloat16, torch.float64):
        weight = torch.full((16, 16, 3, 1, 1), 0.125, dtype=dtype, requires_grad=True)
        out = functional.conv3d(clips.to(dtype), weight, padding=(1, 0, 0))
        gradients += torch.autograd.grad(out, weight, grad.to(dtype))
    found, right = gradients
    error = float((found.double() - right).norm() / right.norm())
    return error if error < math.inf else math.inf
