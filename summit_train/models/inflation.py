"""Kernels for another shape of network: inflated in time, made of a shift's taps, averaged over input channels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from summit_train.models.shift import num_shifted_channels
from summit_train.spec.catalog import ShiftDirection


class Shift(NamedTuple):
    """The temporal shift in front of a convolution: a fraction of the channels in each direction; 0 for none."""

    fraction: float = 0.125
    direction: ShiftDirection = "both"


class Fitted(NamedTuple):
    """A tensor of a file in the shape that a model needs, and how it was made; "" where the numbers are the file's."""

    value: torch.Tensor
    made: str


def shift_taps(kernel: torch.Tensor, shift: Shift) -> torch.Tensor:
    """Return the 3x1x1 kernel (O, I, 3, 1, 1) that does what `shift` and the 1x1 `kernel` (O, I, 1, 1) do.

    Channels that the shift takes from frame t+1 have the last tap alone, those from t-1 the first, all others the
    middle one. Zero padding is what the shift reads outside of the clip.
    """
    fold = num_shifted_channels(kernel.shape[1], shift.fraction)
    from_next = fold if shift.direction == "both" else 0
    taps = kernel.new_zeros(*kernel.shape[:2], 3, 1, 1)
    taps[:, :from_next, 2] = kernel[:, :from_next]
    taps[:, from_next : from_next + fold, 0] = kernel[:, from_next : from_next + fold]
    taps[:, from_next + fold :, 1] = kernel[:, from_next + fold :]
    return taps


def fitted(found: torch.Tensor, shape: torch.Size, shift: Shift | None, *, sees_clip: bool) -> Fitted | None:
    """Return `found` in the shape `shape`, or None if no published method leads to it.

    shift: that of the file's network in front of this convolution; None where the file is of a network without shifts.
    sees_clip: the convolution's input is the clip, so that it may be averaged for one of other channels.
    """
    value, made = found, []
    if value.dim() == 5 and len(shape) == 4 and value.shape[2] == 1:
        value = value.squeeze(2)  # 1x1x1 in published non-local blocks, 1x1 on frames
    if sees_clip and value.dim() >= 4 and value.shape[1] != shape[1]:
        made.append(f"averaged over {value.shape[1]} input channels")
        # Wang et al., "Temporal segment networks", section 3.2, cross-modality initialisation.
        value = value.mean(1, keepdim=True).repeat_interleave(shape[1], 1)
    if value.dim() == 4 and len(shape) == 5:
        if shift is not None and shape[2:] == (3, 1, 1) and value.shape[2:] == (1, 1):
            made.append("the shift as taps in time")
            value = shift_taps(value, shift)
        else:
            made += [f"inflated over {shape[2]} frames"] if shape[2] > 1 else []
            # On an image repeated in time this does what the 2D convolution does, away from the clip's ends, where it
            # sees its zero padding (Carreira and Zisserman, "Quo vadis", section 2.4.1).
            value = value.unsqueeze(2).repeat(1, 1, shape[2], 1, 1) / shape[2]
    return Fitted(value, ", ".join(made)) if value.shape == shape else None
