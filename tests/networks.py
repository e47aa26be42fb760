"""Networks for tests: random ones, clips for them, weights that are loaded into them, and counts to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from summit_train.core.count import Count
from summit_train.models import VideoNetwork, build_model
from summit_train.models.count import count_model
from summit_train.models.weights import LoadReport, load_pretrained
from summit_train.spec import ModelSpec


def counted(
    arch: str, backbone: str = "resnet50", *, frames: int = 8, crop: int = 224, width: float = 1.0, classes: int = 400
) -> Count:
    """Count a network as it will run."""
    model = ModelSpec.model_validate({"arch": arch, "backbone": backbone, "width": width, "num_classes": classes})
    return count_model(model, (frames, crop, crop, 3))


def random_network(
    arch: str, backbone: str | None = None, num_frames: int = 2, num_classes: int = 5, *, seed: int = 0, **options: Any
) -> VideoNetwork:
    """A narrow network that looks trained: random norms, biases and statistics, and logits of order one."""
    generator = torch.Generator().manual_seed(seed)
    options = {"width": 0.125, "generator": generator} | options
    model = build_model(arch, backbone, num_frames, num_classes, **options)
    for name, value in model.state_dict().items():
        if not value.is_floating_point():
            value.fill_(seed)
        elif value.dim() == 1:
            low, high = (0.5, 1.5) if name.endswith(("weight", "var")) else (-0.3, 0.3)
            value.uniform_(low, high, generator=generator)
    torch.nn.init.normal_(next(model.get_submodule(model.head).parameters()), generator=generator)
    return model


def load(model: VideoNetwork, content: object, folder: Path, classes: Sequence[str] | None = None) -> LoadReport:
    """Load into a network what torch.save writes of `content`."""
    torch.save(content, folder / "w.pth")
    return load_pretrained(model, folder / "w.pth", classes)


def clips(num_clips: int, num_frames: int, height: int = 32, width: int = 32) -> torch.Tensor:
    """Random clips (N, T, 3, H, W) in double, as the data give them: frames stored (N, T, H, W, 3)."""
    generator = torch.Generator().manual_seed(1)
    stored = torch.randn(num_clips, num_frames, height, width, 3, dtype=torch.double, generator=generator)
    return stored.permute(0, 1, 4, 2, 3)
