"""The keys of `model.detector`, and what the task demands of the other keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from summit_train.spec.typed import Count, Fraction, Section

if TYPE_CHECKING:
    from summit_train.spec import ModelSpec, Spec

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


def detector_of(model: ModelSpec) -> DetectorSpec:
    detector = vars(model)["detector"]
    assert isinstance(detector, DetectorSpec), "the task is another one"
    return detector


def problems(spec: Spec) -> Iterator[tuple[str, str]]:
    """Yield the keys that do not fit the task."""
    model, data = spec.model, spec.data
    if detector_of(model).freeze_stem and model.pretrained is None:
        yield "model.detector.freeze_stem", "needs trained weights; set model.pretrained, or false"
    if model.arch not in ("tsn", "tsm"):
        yield "model.arch", f"must be tsn or tsm with task detection, got {model.arch}"
    if model.arch == "tsm" and model.shift_direction != "past":
        yield "model.shift_direction", "must be past with task detection: each frame is seen without later ones"
    needed: tuple[tuple[str, object, object], ...] = (
        ("data.modality", data.modality, "rgb"), ("data.region", data.region, None), ("data.mix", data.mix, None),
        ("data.erase", data.erase, 0.0), ("data.repeats", data.repeats, 1), ("data.sampling", data.sampling, "dense"),
        ("evaluate.mode", spec.evaluate.mode, "stream"), ("evaluate.crops", spec.evaluate.crops, "full"),
        ("evaluate.precise_bn", spec.evaluate.precise_bn, 0), ("loss.class_weights", spec.loss.class_weights, None),
        ("loss.label_smoothing", spec.loss.label_smoothing, 0.0), ("model.dropout", model.dropout, 0.0),
        ("model.non_local", model.non_local, False),
    )  # fmt: skip
    if data.built_in_augment == "rand_augment":
        yield "data.augment", "rand_augment rotates and shears frames, and boxes stay upright; use whole"
    if not isinstance(data.augment, str):
        yield "data.augment", "must have no augmentation of your own with task detection: boxes would not follow it"
    for key, value, right in needed:
        if value != right:
            yield key, f"must be {'null' if right is None else right} with task detection, got {value}"
