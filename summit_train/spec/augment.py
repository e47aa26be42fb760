"""Keys of `data` that vary the training clips beyond crop and flip, and the combinations that are refused."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from summit_train.spec.typed import Fraction, Named, OwnSpec, Section

BuiltInAugment = Literal["scale_jitter", "multi_scale_crop", "rand_augment", "whole"]
AUGMENTS: tuple[str, ...] = get_args(BuiltInAugment)
Alpha = Annotated[float, Field(ge=0, le=100)]
Area = Annotated[float, Field(gt=0, le=1)]


class AugmentSpec(OwnSpec):
    """An augmentation: a built-in one's name, or one of your own with its options."""

    kind: Annotated[str, Named(AUGMENTS)]


class RandAugmentSpec(Section):
    """Settings of augment: rand_augment, random operations on the crop, the same for all frames of a clip."""

    magnitude: Annotated[float, Field(ge=0, le=10)] = 7.0
    """Mean strength of an operation, 0 to 10."""
    std: Annotated[float, Field(ge=0, le=10)] = 0.5
    """Standard deviation of the strength."""
    layers: Annotated[int, Field(ge=0, le=100)] = 4
    """Number of operations drawn in sequence; each is applied with probability 1/2. 0: only the crop."""
    crop_area: tuple[Area, Area] = (0.08, 1.0)
    """The crop's share of the frame's area is drawn from [low, high], its aspect ratio from 3/4 to 4/3."""


class MixSpec(Section):
    """Mixes each clip, and its label, with the clip at its place in the reversed batch of its virtual GPU."""

    mixup: Alpha = 0.0
    """Mixup: blend the two clips; the share is drawn from Beta(mixup, mixup). 0: never."""
    cutmix: Alpha = 0.0
    """CutMix: replace a box, the same in all frames; its area is drawn from Beta(cutmix, cutmix). 0: never."""
    probability: Fraction = 1.0
    """Fraction of the batches of a virtual GPU that are mixed."""
    switch: Fraction = 0.5
    """If mixup and cutmix are both above 0: fraction of the mixed batches that get CutMix."""
