"""The numbers that a network computes with: their type, and the pixels that it gets."""

from __future__ import annotations

import contextlib

import torch

from summit_train.spec.catalog import RGB, Modality

AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


def parameter_type(precision: str) -> torch.dtype:
    """Return the type of the weights: fp16 and bf16 are types of the activations only."""
    return torch.float64 if precision == "fp64" else torch.float32


def mixed_precision(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context in which a network computes its activations in `precision`."""
    dtype = AUTOCAST.get(precision)
    return torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()


class Normalise:
    """Turn uint8 frames (N, T, H, W, C) into float (N, T, C, H, W), normalised as `modality` says, channels last.

    The bytes are permuted as a view: their order in memory is the channels-last order already. The constants stay on
    the device, as copying them there in every step would make the host wait.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, modality: Modality = RGB) -> None:
        self._mean = torch.tensor(modality.mean, dtype=dtype, device=device)
        self._std = torch.tensor(modality.std, dtype=dtype, device=device)

    def __call__(self, frames_NTHWC: torch.Tensor) -> torch.Tensor:
        frames = frames_NTHWC.to(self._mean.device, non_blocking=True).to(self._mean.dtype)
        return frames.sub_(self._mean).div_(self._std).permute(0, 1, 4, 2, 3)
