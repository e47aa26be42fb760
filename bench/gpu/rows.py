"""The rows of a table of speeds: networks that train or infer, in one precision, batch and execution.

Executions, by the names that rows have:

    accelerated    the product's default: models/fast's accelerate()
    plain          the network as the papers draw it
    official       the shift as Lin et al. published it: a view of five dimensions, zeros_like, three slice copies
    weights_last   accelerated, with the weights too in the channels-last format
    compiled       execution.compile=true
    graph          accelerated, one CUDA graph for a pass
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from summit_train.core import rng
from summit_train.models.network import build_network, make_ready
from summit_train.models.precision import mixed_precision, parameter_type
from summit_train.models.resnet import ResidualBlock
from summit_train.spec import Spec, load_spec
from summit_train.spec.source import shipped

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for bench/shift.py, which has the published formulation

from shift import OfficialShift

SPECS = {
    "tsm": "tsm_r50_8f",
    "tsn": "tsn_r50_8f",
    "i3d_3x3x3": "i3d_3x3x3_r50_16f",
    "i3d_3x1x1": "i3d_3x1x1_r50_32f",
    "images": "tsn_r50_8f",  # a plain ResNet-50 on single pictures
}
IMAGES_PER_CLIP = 8  # "images" has as many pictures in a batch as TSM has frames
SMALL = ("model.width=0.125", "data.crop=32", "data.short_side=[32,40]")


@dataclass(frozen=True)
class Row:
    """What is measured. mode: train (the product's step), pass (forward, loss, backward) or inference.

    precision: that of a spec, where fp32 means TF32 off and tf32 the same with TF32 on. batch: clips.
    """

    network: str
    mode: str
    precision: str
    batch: int
    execution: str = "accelerated"

    @property
    def name(self) -> str:
        """Return the row in words."""
        return f"{self.mode} {self.network} {self.precision} batch {self.batch} {self.execution}"


def spec_of(row: Row, *, small: bool = False) -> Spec:
    """Return the shipped spec of a row's network with the row's precision and batch, on one virtual GPU."""
    precision, images = "fp32" if row.precision == "tf32" else row.precision, row.network == "images"
    clips = row.batch * IMAGES_PER_CLIP if images else row.batch
    words = [f"precision={precision}", "scale.gpus=1", f"scale.clips_per_gpu={clips}", "model.pretrained=null"]
    words += ["data.num_frames=1"] * images + ["execution.compile=true"] * (row.execution == "compiled")
    return load_spec(shipped("configs/kinetics") / f"{SPECS[row.network]}.yaml", [*words, *(SMALL if small else ())])


@contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """Allow TF32 in products and convolutions for tf32 and forbid it for fp32, within the block."""
    if precision not in ("fp32", "tf32"):
        yield
        return
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])


@contextmanager
def inferring(spec_precision: str, device: torch.device) -> Iterator[None]:
    """Hold the contexts of inference for the block: weights are cast once in it, and a graph may read those casts."""
    with torch.inference_mode(), mixed_precision(spec_precision, device):
        yield


def reason_to_skip(row: Row, device: torch.device) -> str | None:
    """Return why this machine cannot run the row; None where it can."""
    if row.execution == "graph" and device.type != "cuda":
        return "CUDA graphs need CUDA"
    if row.precision == "fp16" and device.type != "cuda":
        return "fp16 takes a CPU minutes"
    if row.execution != "compiled" or device.type != "cuda":
        return None
    if importlib.util.find_spec("triton") is None:
        return "torch.compile needs triton on GPUs"
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "torch.compile needs a C compiler on PATH (cc, gcc or clang)"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return None if header.is_file() else f"torch.compile needs Python's C headers: there is no {header}"


def network_of(row: Row, device: torch.device, *, small: bool = False) -> nn.Module:
    """Build a row's network, with weights that depend on the network alone.

    small: compiled means traced by Dynamo, but run by PyTorch: code generation takes minutes on a slow core.
    """
    spec = spec_of(row, small=small)
    if row.network == "images" and (images := torchvision_network(spec)) is not None:
        images.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return images.to(device)
    generator = torch.Generator().manual_seed(rng.seed_of(spec.seed, "weights"))
    network = build_network(spec, generator).to(device=device, dtype=parameter_type(spec.precision))
    if row.execution == "official":
        for block in network.modules():
            if isinstance(block, ResidualBlock):
                block.shift = OfficialShift(spec.data.num_frames)
    if row.execution == "compiled" and small:
        network.extract = torch.compile(network.extract, backend="eager")  # type: ignore[method-assign]
    elif row.execution != "plain":
        make_ready(network, spec)
    if row.execution == "weights_last":
        network.to(memory_format=network.memory_format)  # type: ignore[call-overload]
    return network


class Images(nn.Module):
    """torchvision's network on single pictures, (N, 1, C, H, W), with what a training step asks of a network."""

    head, stem = "network.fc", ("network.conv1",)

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def reseed(self, seed: int) -> None:
        """Do nothing: the network draws nothing."""

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        """Return logits (N, num_classes)."""
        logits: torch.Tensor = self.network(clips.flatten(0, 1))
        return logits.float()


def torchvision_network(spec: Spec) -> Images | None:
    """Return torchvision's ResNet-50 where it can be imported and the spec's has its size; else None."""
    if spec.model.width != 1.0:
        return None
    try:
        from torchvision.models import resnet50
    except (ImportError, OSError, RuntimeError):  # it is not there, or was built for another torch
        return None
    return Images(resnet50(num_classes=spec.model.num_classes))


def random_clips(spec: Spec, device: torch.device) -> torch.Tensor:
    """Return the same normal clips (N, T, C, H, W) for each network of one shape, channels last as from the loader."""
    shape = (spec.scale.clips_per_gpu, *spec.data.input.clip_shape(spec.data.num_frames, spec.data.crop))
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return pixels.to(device, parameter_type(spec.precision)).permute(0, 1, 4, 2, 3)
