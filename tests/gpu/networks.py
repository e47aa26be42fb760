"""Networks of the whole catalog, small enough for a CPU to compute them in double precision beside a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from summit_train.models import VideoNetwork, build_model

CLASSES = 16
SHORTEST = {"i3d_3x3x3": 16, "i3d_3x1x1": 8, "slowfast": 8, "ir_csn": 8}  # frames


@dataclass(frozen=True)
class Case:
    """A network and its clips: `clips` of `frames` x `crop` x `crop` pixels; `options` are build_model's."""

    arch: str
    backbone: str | None
    frames: int = 8
    crop: int = 64
    width: float = 1.0
    clips: int = 2
    options: dict[str, Any] = field(default_factory=dict)

    def on(self, device: torch.device) -> Case:
        """Return the case as it is, or with the fewest channels for a CPU."""
        frames = min(self.frames, SHORTEST.get(self.arch, 4))
        return self if device.type == "cuda" else replace(self, width=0.125, crop=32, frames=frames)


# So wide that 16 cores compute double precision in a second or two; grouped and 3D convolutions take them longer.
CASES = {
    "tsm": Case("tsm", "resnet50"),
    "tsn": Case("tsn", "resnet50"),
    "i3d_3x3x3": Case("i3d_3x3x3", "resnet50", frames=16, crop=112, width=0.5),
    "i3d_3x1x1": Case("i3d_3x1x1", "resnet50", frames=16, crop=112, width=0.5),
    "i3d_replace": Case("i3d_replace", "resnet50", width=0.5),
    "tsm non-local": Case("tsm", "resnet50", width=0.5, options={"non_local": "tsm"}),
    "tsm past": Case("tsm", "resnet50", width=0.5, options={"shift_direction": "past"}),
    "tsm mobilenet_v2": Case("tsm", "mobilenet_v2"),
    "tsn mobilenet_v2": Case("tsn", "mobilenet_v2"),
    "tsm resnext101_32x4d": Case("tsm", "resnext101_32x4d", frames=4, width=0.5),
    "trn": Case("trn", "resnet50", width=0.5),
    "eco_lite": Case("eco_lite", None, width=0.5),
    "slowfast": Case("slowfast", "resnet50", frames=16, crop=112, width=0.5),
    "x3d_m": Case("x3d_m", None, frames=4),
    "ir_csn": Case("ir_csn", "resnet152", width=0.5),
    "vit": Case("vit", "vit_s", width=0.5),
    "vit shift": Case("vit", "vit_s", width=0.5, options={"adapter": "shift"}),
}


def build(case: Case) -> VideoNetwork:
    """Return the network of a case in double precision on the CPU, in training mode, weights from one seed.

    The head begins with outputs of order one and every factor of a normalisation above 0, so each layer has a gradient.
    Branches end in small factors, and normalisations have a larger epsilon than usual: with the few values per channel
    of a small clip a usual start magnifies roundings until nothing can be concluded in fp16 and bf16.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = (case.frames, CLASSES)
    model = build_model(case.arch, case.backbone, *sizes, width=case.width, generator=generator, **case.options)
    for module in model.modules():
        if hasattr(module, "zero_init_last"):
            module.zero_init_last()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eps = 1e-2
                low, high = (0.5, 1.0) if module.weight.any() else (0.1, 0.3)
                module.weight.uniform_(low, high, generator=generator)
                module.bias.uniform_(-0.1, 0.1, generator=generator)
        if case.arch != "trn":  # its relations have weights of order one
            head = next(model.get_submodule(model.head).parameters())
            head.normal_(0.0, head.shape[1] ** -0.5, generator=generator)
    return model.double().train()
