"""RandAugment (Cubuk et al. 2020): operations drawn at random, the same ones for all frames of a clip.

Operations, their strengths and the order of the draws are those of timm's `rand-m7-n4-mstd0.5-inc1`
(timm/data/auto_augment.py), the setting of PySlowFast and VideoMAE, with bicubic interpolation and grey where a frame
has no pixels. They see the crop, as in timm. At the greatest strength, posterize keeps one bit, where timm's keeps
none or, with Pillow 13, fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from summit_train.data.video.render import Frames
from summit_train.spec.model_data import RandAugmentSpec

_STRONGEST = 10.0
_GREY = (128, 128, 128)
_BICUBIC = Image.Resampling.BICUBIC


class Kind(NamedTuple):
    """An operation. amount: its argument at the greatest strength, 10; one that `is_signed` has a random sign."""

    apply: Callable[[Image.Image, float], Image.Image]
    amount: float = 0.0
    is_signed: bool = False


def _affine(img: Image.Image, *matrix: float) -> Image.Image:
    return img.transform(img.size, Image.Transform.AFFINE, matrix, resample=_BICUBIC, fillcolor=_GREY)


def _enhance(enhancer: Callable[[Image.Image], ImageEnhance._Enhance]) -> Kind:
    return Kind(lambda img, by: enhancer(img).enhance(max(0.1, 1.0 + by)), 0.9, True)


KINDS = {
    "auto_contrast": Kind(lambda img, _: ImageOps.autocontrast(img)),
    "equalize": Kind(lambda img, _: ImageOps.equalize(img)),
    "invert": Kind(lambda img, _: ImageOps.invert(img)),
    "rotate": Kind(lambda img, by: img.rotate(by, resample=_BICUBIC, fillcolor=_GREY), 30, True),  # degrees
    "posterize": Kind(lambda img, by: ImageOps.posterize(img, max(1, 4 - int(by))), 4),  # bits are kept
    "solarize": Kind(lambda img, by: ImageOps.solarize(img, 256 - int(by)), 256),
    "solarize_add": Kind(
        lambda img, by: img.point([min(255, v + int(by)) if v < 128 else v for v in range(256)] * 3), 110
    ),
    "color": _enhance(ImageEnhance.Color),
    "contrast": _enhance(ImageEnhance.Contrast),
    "brightness": _enhance(ImageEnhance.Brightness),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "shear_x": Kind(lambda img, by: _affine(img, 1, by, 0, 0, 1, 0), 0.3, True),
    "shear_y": Kind(lambda img, by: _affine(img, 1, 0, 0, by, 1, 0), 0.3, True),
    "translate_x": Kind(lambda img, by: _affine(img, 1, 0, by * img.width, 0, 1, 0), 0.45, True),
    "translate_y": Kind(lambda img, by: _affine(img, 1, 0, 0, 0, 1, by * img.height), 0.45, True),
}
_NAMES = tuple(KINDS)
Operation = tuple[str, float]  # the name of a kind, and its argument


class RandAugment:
    """Varies a clip as `augment: rand_augment` varies its crop; the options are keys of data.rand_augment."""

    def __init__(self, **options: Any) -> None:
        self._spec = RandAugmentSpec(**options)

    def __call__(self, clip: Frames, generator: np.random.Generator) -> Frames:
        return apply_operations(draw_operations(self._spec, generator), clip)


def draw_operations(spec: RandAugmentSpec, generator: np.random.Generator) -> list[Operation]:
    """Draw the operations of one clip: of `layers` draws with repeats, each is dropped with probability 1/2."""
    operations = list[Operation]()
    for number in generator.integers(len(_NAMES), size=spec.layers):
        kind = KINDS[_NAMES[number]]
        if generator.random() > 0.5:
            continue
        strength = float(generator.normal(spec.magnitude, spec.std)) if spec.std else spec.magnitude
        argument = max(0.0, min(strength, _STRONGEST)) / _STRONGEST * kind.amount
        if kind.is_signed and generator.random() > 0.5:
            argument = -argument
        operations.append((_NAMES[number], argument))
    return operations


def apply_operations(operations: Sequence[Operation], clip: Frames) -> Frames:
    """Return the clip, uint8 RGB (T, height, width, 3), after the operations on each of its frames."""
    if not operations:
        return clip
    pictures = []
    for frame in clip:
        picture = Image.fromarray(frame)
        for name, argument in operations:
            picture = KINDS[name].apply(picture, argument)
        pictures.append(np.asarray(picture))
    return np.stack(pictures)
