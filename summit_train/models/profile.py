"""What a network costs on one clip, counted on the network itself."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from summit_train.models.resnet import VideoResNet
from summit_train.models.rolled import Stream

# Module -> the paper's name for its output (Table 2).
_STAGES: dict[str, str] = {
    "conv1": "conv1",
    "maxpool": "pool1",
    "layer1": "res2",
    "pool2": "pool2",
    "layer2": "res3",
    "layer3": "res4",
    "layer4": "res5",
}


@dataclass(frozen=True)
class Profile:
    """One network on one clip of (T, H, W) pixels, forward; `stages` maps the paper's names to T there."""

    clip: tuple[int, int, int]
    parameters: int
    multiply_adds: int
    stages: dict[str, int]

    @property
    def frames(self) -> int:
        return self.clip[0]

    @property
    def input_bytes(self) -> int:
        """The clip as it travels: uint8, one byte an element."""
        return 3 * self.clip[0] * self.clip[1] * self.clip[2]

    @property
    def gradient_bytes(self) -> int:
        """What one rank gives to the allreduce of a step, in fp32."""
        return 4 * self.parameters

    @property
    def compute_io(self) -> float:
        """Multiply-adds for each input element (the paper's Table 1)."""
        return self.multiply_adds / self.input_bytes

    def as_dict(self) -> dict[str, Any]:
        """The object that `summit-train model --json` prints."""
        return {
            "parameters": self.parameters,
            "multiply_adds": self.multiply_adds,
            "input_bytes": self.input_bytes,
            "frames": self.frames,
            "stages": dict(self.stages),
            "compute_io": self.compute_io,
            "gradient_bytes": self.gradient_bytes,
        }


def profile_model(model: VideoResNet, height: int, width: int | None = None) -> Profile:
    """Count parameters, multiply-adds and T per stage on one clip of height x width (square without width).

    Runs a copy of the network on torch's meta device: shapes without numbers, well under a second for any
    of the paper's networks, and `model` is left alone.
    """
    clip = (model.num_frames, height, height if width is None else width)
    shadow = copy.deepcopy(model).to("meta").eval()
    stages = {"data": clip[0]}
    for name, stage in _STAGES.items():
        module = getattr(shadow, name)
        if module is not None:
            module.register_forward_hook(_record(stages, stage))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        logits = shadow(torch.empty(1, clip[0], 3, *clip[1:], device="meta"))
    assert logits.dim() == 2, "one row of logits a clip: time is averaged away"
    stages["global_pool"] = 1
    return Profile(
        clip=clip,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        multiply_adds=counter.get_total_flops() // 2,
        stages=stages,
    )


def _record(stages: dict[str, int], stage: str) -> Any:
    def hook(module: nn.Module, inputs: Any, output: torch.Tensor | Stream) -> None:
        shape = (output.frames if isinstance(output, Stream) else output).shape
        # One clip: frames are the batch of a 2D network, and the third dimension of (N, C, T, H, W).
        stages[stage] = shape[0] if len(shape) == 4 else shape[2]

    return hook
