"""What Lin, Gan, Wang and Han, "TSM" (journal version), published: Tables 2, 3, 5 and 6, row by row as printed.

Nothing here is measured or counted. A row names the network of this package that it is about, if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

SOMETHING, KINETICS = "Something-Something V1", "Kinetics"


@dataclass(frozen=True)
class ModelKeys:
    """A network by its spec's keys. Several `frames`: an ensemble of as many networks, one for each."""

    arch: str
    backbone: str | None
    frames: tuple[int, ...] = (8,)
    non_local: Literal["tsm", "original"] | None = None


@dataclass(frozen=True)
class Row:
    """One row of a table. None: not printed.

    top1: percent on the validation set, by data set. multiply_adds: of one of the `clips` of a video (the paper prints
    "153G x 2"). clips_per_second: videos a second. network: the row's network here.
    """

    label: str
    family: Literal["TSM", "TSN", "TRN", "ECO", "I3D", "other 3D"]
    top1: Mapping[str, float]
    frames: str | None = None
    multiply_adds: float | None = None
    parameters: float | None = None
    clips: int = 1
    latency_ms: float | None = None
    clips_per_second: float | None = None
    network: ModelKeys | None = None


@dataclass(frozen=True)
class Table:
    """A table of the paper. `setting`: how its figures were obtained."""

    number: int
    title: str
    setting: str
    rows: tuple[Row, ...]


_tsn, _tsm = partial(ModelKeys, "tsn"), partial(ModelKeys, "tsm")
_ECO_LITES = ModelKeys("eco_lite", None, (16, 20, 24, 32))
_TRN, _TSM_NL = ModelKeys("trn", "resnet50"), _tsm("resnet50", non_local="tsm")

# Without the two-stream rows, which have no multiply-adds. Parameters are printed as with 400 classes: TSM's 24.3 M
# would be 23.9 M with the data set's 174. TRN's 31.8 M is printed; the public code has 27.0 M (26.6 M with 174).
# The footnotes: non-local I3D keeps more frames than the original; GCN includes its region proposal network.
_TABLE_2 = (
    Row("TSN, BN-Inception", "TSN", {SOMETHING: 19.5}, "8", 16e9, 10.7e6),
    Row("TSN, ResNet-50", "TSN", {SOMETHING: 19.7}, "8", 33e9, 24.3e6, network=_tsn("resnet50")),
    Row("TRN multi-scale, BN-Inception", "TRN", {SOMETHING: 34.4}, "8", 16e9, 18.3e6),
    Row("TRN multi-scale, ResNet-50", "TRN", {SOMETHING: 38.9}, "8", 33e9, 31.8e6, network=_TRN),
    Row("ECO, 8 frames", "ECO", {SOMETHING: 39.6}, "8", 32e9, 47.5e6),
    Row("ECO, 16 frames", "ECO", {SOMETHING: 41.4}, "16", 64e9, 47.5e6),
    Row("ECO-lite ensemble", "ECO", {SOMETHING: 46.4}, "92", 267e9, 150e6, network=_ECO_LITES),
    Row("I3D of [60]", "I3D", {SOMETHING: 41.6}, "32", 153e9, 28.0e6, clips=2),
    Row("Non-local I3D of [60]", "I3D", {SOMETHING: 44.4}, "32", 168e9, 35.3e6, clips=2),
    Row("Non-local I3D + GCN", "I3D", {SOMETHING: 46.1}, "32", 303e9, 62.2e6, clips=2),
    Row("CorrNet-50", "other 3D", {SOMETHING: 49.3}, "32", 115e9, None, clips=10),
    Row("ip-CSN-152", "other 3D", {SOMETHING: 53.3}, "32", 83.3e9, 33.0e6, clips=10),
    Row("TSM, 8 frames", "TSM", {SOMETHING: 45.6}, "8", 33e9, 24.3e6, network=_tsm("resnet50")),
    Row("TSM, 16 frames", "TSM", {SOMETHING: 47.2}, "16", 65e9, 24.3e6, network=_tsm("resnet50", (16,))),
    Row("TSM ensemble", "TSM", {SOMETHING: 49.7}, "24", 98e9, 48.6e6, network=_tsm("resnet50", (8, 16))),
)

# "RX-101" is ResNeXt-101; which one is not printed. 32x8d is our reading.
_TABLE_3 = (
    Row("TSN, MobileNetV2", "TSN", {KINETICS: 66.5}, network=_tsn("mobilenet_v2")),
    Row("TSM, MobileNetV2", "TSM", {KINETICS: 69.5}, network=_tsm("mobilenet_v2")),
    Row("TSN, ResNet-50", "TSN", {KINETICS: 70.7}, network=_tsn("resnet50")),
    Row("TSM, ResNet-50", "TSM", {KINETICS: 74.1}, network=_tsm("resnet50")),
    Row("TSN, ResNeXt-101", "TSN", {KINETICS: 72.4}, network=_tsn("resnext101_32x8d")),
    Row("TSM, ResNeXt-101", "TSM", {KINETICS: 76.3}, network=_tsm("resnext101_32x8d")),
    Row("TSN, non-local ResNet-50", "TSN", {KINETICS: 74.6}, network=_tsn("resnet50", non_local="tsm")),
    Row("TSM, non-local ResNet-50", "TSM", {KINETICS: 75.7}, network=_TSM_NL),
)

# Frames are not printed: those of each network's own paper, and 8 for TSM.
_NL_I3D = ModelKeys("i3d_3x1x1", "resnet50", (32,), "original")
_SLOWFAST, _X3D = ModelKeys("slowfast", "resnet50", (32,)), ModelKeys("x3d_m", None, (16,))
_TABLE_5 = (
    Row("I3D, non-local ResNet-50", "I3D", {KINETICS: 74.9}, latency_ms=30.7, network=_NL_I3D),
    Row("SlowFast, ResNet-50", "other 3D", {KINETICS: 75.6}, latency_ms=33.3, network=_SLOWFAST),
    Row("TSM, non-local ResNet-50", "TSM", {KINETICS: 75.7}, latency_ms=25.6, network=_TSM_NL),
    Row("X3D-M", "other 3D", {KINETICS: 76.0}, latency_ms=73.5, network=_X3D),
    Row("ir-CSN-152", "other 3D", {KINETICS: 76.8}, latency_ms=138.6, network=ModelKeys("ir_csn", "resnet152", (32,))),
    Row("TSM, ResNeXt-101", "TSM", {KINETICS: 76.3}, latency_ms=40.7, network=_tsm("resnext101_32x8d")),
)

# The first row is printed with 306 G and 41.6 %, which Table 2 gives to I3D, and with 35.3 M, which is its NL I3D's.
# The throughputs of the first two rows cannot be read in the text of the paper that this was taken from.
_I3D, _REPLACE = ModelKeys("i3d_3x1x1", "resnet50", (32,)), ModelKeys("i3d_replace", "resnet50")
_BOTH_8, _BOTH_16 = {SOMETHING: 45.6, KINETICS: 74.1}, {SOMETHING: 47.2, KINETICS: 74.7}
_TABLE_6 = (
    Row("I3D of [60]", "I3D", {SOMETHING: 41.6}, None, 306e9, 35.3e6, 1, 165.3),
    Row("ECO, 16 frames", "ECO", {SOMETHING: 41.4}, "16", 64e9, 47.5e6, 1, 30.6),
    Row("I3D 3x1x1", "I3D", {KINETICS: 73.3}, None, 33e9, 29.3e6, 1, 25.8, 42.4, _I3D),
    Row("I3D replace", "I3D", {SOMETHING: 44.9}, None, 48e9, 33.0e6, 1, 28.0, 37.9, _REPLACE),
    Row("TSM, 8 frames", "TSM", _BOTH_8, "8", 33e9, 24.3e6, 1, 17.4, 77.4, _tsm("resnet50")),
    Row("TSM, 16 frames", "TSM", _BOTH_16, "16", 65e9, 24.3e6, 1, 29.0, 39.5, _tsm("resnet50", (16,))),
)

TABLES = {
    table.number: table
    for table in (
        Table(2, "TSM and other methods on Something-Something V1", "one clip a video unless noted", _TABLE_2),
        Table(3, "TSM on other backbones, Kinetics", "ten clips a video", _TABLE_3),
        Table(5, "latency and accuracy on Kinetics", "latency: RTX 2080 Ti, batch 1, mean of 200 passes", _TABLE_5),
        Table(6, "latency and throughput", "Tesla P100; latency with batch 1, throughput with 16", _TABLE_6),
    )
}
