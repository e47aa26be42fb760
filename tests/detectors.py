"""Specs of small detectors for tests."""

from __future__ import annotations

from typing import Any

from summit_train.spec import Spec, spec_from_values


def detector_spec(**sections: Any) -> Spec:
    """The spec of a narrow R-FCN on frames of 64 x 64 pixels. Sections given as keywords are laid over it."""
    small = {"channels": 256, "anchor_sides": [16.0, 32.0], "anchor_ratios": [1.0], "grid": 3, "proposals": 20,
             "hard_examples": 8}  # fmt: skip
    values: dict[str, Any] = {
        "name": "detector",
        "task": "detection",
        "precision": "fp64",
        "model": {"arch": "tsn", "backbone": "resnet18", "width": 0.125, "num_classes": 2, "detector": small},
        "data": {"train": "train.csv", "val": "val.csv", "augment": "whole", "short_side": [64, 64], "num_frames": 2},
        "evaluate": {"mode": "stream", "crops": "full"},
    }  # fmt: skip
    for section, keys in sections.items():
        values[section] = {**values.get(section, {}), **keys} if isinstance(keys, dict) else keys
    return spec_from_values(values, "a test")
