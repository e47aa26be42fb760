"""Keys of `data` that vary the training clips beyond crop and flip, and the combinations that are refused."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from summit_train.spec.typed import Fraction, Section

Alpha = Annotated[float, Field(ge=0, le=100)]
Area = Annotated[float, Field(gt=0, le=1)]


class RandAugmentSpec(Section):
    """augment: rand_augment: operations on the crop, drawn at random, the same ones for all frames of a clip."""

    magnitude: Annotated[float, Field(ge=0, le=10)] = 7.0
    """Mean strength of an operation, 0 to 10."""
    std: Annotated[float, Field(ge=0, le=10)] = 0.5
    """Standard deviation of the strength."""
    layers: Annotated[int, Field(ge=0, le=100)] = 4
    """Operations that are drawn one after the other; each is applied with probability 1/2. 0: the crop alone."""
    crop_area: tuple[Area, Area] = (0.08, 1.0)
    """The crop's part of the frame's area is drawn from [low, high], its aspect from 3/4 to 4/3."""


class MixSpec(Section):
    """Mixes each clip, and its label, with the clip at its place in the reversed batch of its virtual GPU."""

    mixup: Alpha = 0.0
    """Blend the two clips; the share is drawn from Beta(mixup, mixup). 0: never."""
    cutmix: Alpha = 0.0
    """Replace a box, the same one in all frames; its area is drawn from Beta(cutmix, cutmix). 0: never."""
    probability: Fraction = 1.0
    """Part of the batches of a virtual GPU that are mixed."""
    switch: Fraction = 0.5
    """Part of them that get CutMix where mixup and cutmix are both above 0."""
