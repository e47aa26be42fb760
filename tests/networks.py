"""Counts of networks, for tests that compare with them."""

from __future__ import annotations

from summit_train.core.count import Count
from summit_train.models.count import count_model
from summit_train.spec import ModelSpec


def counted(
    arch: str, backbone: str = "resnet50", *, frames: int = 8, crop: int = 224, width: float = 1.0, classes: int = 400
) -> Count:
    """Count a network as it will run."""
    model = ModelSpec.model_validate({"arch": arch, "backbone": backbone, "width": width, "num_classes": classes})
    return count_model(model, (frames, crop, crop, 3))
