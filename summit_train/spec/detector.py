"""The keys of `model.detector`."""

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
    """Channels of the 3x3 convolution after the trunk, multiplied by model.width. Half are for the proposals, half for
    the detections."""
    freeze_stem: bool = False
    """Freeze conv1 and res2, of mobilenet_v2 what comes before a stride of 8. Needs model.pretrained."""
    anchor_sides: Sides = (128.0, 256.0, 512.0)
    """Sides of the square anchors, in pixels of the scaled frame."""
    anchor_ratios: Ratios = (0.5, 1.0, 2.0)
    """Height divided by width of the anchors. Each anchor has the area of its square."""
    grid: Annotated[int, Field(ge=1, le=14)] = 7
    """Position-sensitive pooling uses grid x grid cells."""
    proposals: Count = 300
    """Proposals per frame, after non-maximum suppression."""
    hard_examples: Count = 128
    """Proposals per frame that are trained on: those with the highest loss."""
    nms: Fraction = 0.3
    """Non-maximum suppression: of two detections of one class that overlap by more than this IoU, only the one with the
    higher score is kept."""
    max_boxes: Count = 300
    """Most detections per frame; those with the highest scores are kept."""
    min_score: Fraction = 0.001
    """Detections with a lower score are dropped."""
