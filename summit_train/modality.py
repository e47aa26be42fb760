"""Modalities: the channels of a clip's frames, and the statistics that normalise them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Modality:
    """What one frame of a clip holds. mean, std: of each channel, in units of the uint8 values 0 .. 255."""

    name: str
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def clip_shape(self, num_frames: int, side: int) -> tuple[int, int, int, int]:
        """Return the shape of a square uint8 clip as the loader gives it, (T, H, W, C)."""
        return (num_frames, side, side, self.channels)


# Mean and standard deviation over ImageNet.
RGB = Modality(
    "rgb",
    channels=3,
    mean=(0.485 * 255, 0.456 * 255, 0.406 * 255),
    std=(0.229 * 255, 0.224 * 255, 0.225 * 255),
)
