"""The keys of `model.detector`, and what a task demands of the other keys."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from summit_train.spec.typed import Count, Fraction, Section

Side = Annotated[float, Field(gt=0, le=4096)]
# Not strict: below a validator of a whole section pydantic refuses a list as a tuple.
Sides = Annotated[tuple[Side, ...], Field(min_length=1, max_length=20, strict=False)]
Ratios = Annotated[tuple[Annotated[float, Field(gt=0, le=100)], ...], Field(min_length=1, max_length=20, strict=False)]


class DetectorSpec(Section):
    """R-FCN on the trunk of `model` (Dai et al. 2016), with the settings of FGFA's code; see docs/detection.md."""

    channels: Count = 1024
    """Channels of the 3x3 convolution behind the trunk: half are for the proposals, half for the boxes. Times
    model.width."""
    freeze_stem: bool = False
    """Keep the weights of conv1 and res2, of mobilenet_v2 those in front of a stride of 8. Needs model.pretrained."""
    anchor_sides: Sides = (128.0, 256.0, 512.0)
    """Sides of the square anchors, pixels of the scaled frame."""
    anchor_ratios: Ratios = (0.5, 1.0, 2.0)
    """Height over width of the anchors; all have the areas of the squares."""
    grid: Annotated[int, Field(ge=1, le=14)] = 7
    """Position-sensitive pooling has grid x grid cells."""
    proposals: Count = 300
    """Proposals of a frame, behind the suppression of their overlaps."""
    hard_examples: Count = 128
    """Proposals of a frame that are trained on: those with the highest loss."""
    nms: Fraction = 0.3
    """Of two boxes of one class that overlap by more than this IoU, only the one with the higher score is reported."""
    max_boxes: Count = 300
    """Boxes that are reported of a frame."""
    min_score: Fraction = 0.001
    """Boxes with a lower score are not reported."""
