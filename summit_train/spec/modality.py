"""Modalities: the channels of a clip's frames, and the statistics that normalise them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ModalityName = Literal["rgb", "flow"]

# The value of no motion in a picture of flow, v = round(255 (f + bound) / (2 bound)): 127.5, rounded to even.
FLOW_ZERO = 128


@dataclass(frozen=True)
class Modality:
    """What one frame of a clip holds. mean, std: of each channel, in units of the uint8 values 0 .. 255.

    crop_scales: sides of the multi-scale crop, as parts of a frame's shorter side, where the spec has none.
    """

    name: str
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_scales: tuple[float, ...] = ()


# Mean and standard deviation over ImageNet. Scales: Wang et al., "Temporal segment networks", section 3.2.
RGB = Modality(
    "rgb",
    channels=3,
    mean=(0.485 * 255, 0.456 * 255, 0.406 * 255),
    std=(0.229 * 255, 0.224 * 255, 0.225 * 255),
    crop_scales=(1.0, 0.875, 0.75, 0.66),
)


def flow(length: int) -> Modality:
    """Return the modality of frames that stack `length` fields of optical flow: channels x, y, x, y, ...

    The deviation and the scales are those of the TSM authors' code (ops/dataset_config.py, ops/models.py); their mean
    is 127.5. Here it is the value of no motion: still parts are exactly 0, as the padding of convolutions is, and a
    field turned round is exactly the negative one. To their weights that is a shift of 0.009 deviations.
    """
    channels = 2 * length
    return Modality("flow", channels, (float(FLOW_ZERO),) * channels, (0.226 * 255,) * channels, (1.0, 0.875, 0.75))
