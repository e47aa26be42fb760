"""What Lin, Gan and Han, "Training Kinetics in 15 Minutes" (2019), published: Tables 1 and 3, section 4.

And how often published machines failed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from summit_train.spec import Spec
from summit_train.spec.catalog import architecture

TRAINING_VIDEOS = 240_000  # section 4.1, "roughly"
VALIDATION_VIDEOS = 20_000
EPOCHS = 100


# GPU-hours between two failures that end a job, as published. Llama 3: 419 unexpected interruptions of 16,384 H100 in
# 54 days (Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.4). OPT-175B: one in 7.5 hours on 992 A100
# (glennklockwood.com/garden/job-reliability, from its log book). Titan: 27.1 hours for each 10,000 of its 18,688 K20X
# nodes (the same page, from Gupta et al., "Failures in large scale systems", SC 2017).
GPU_HOURS = {"OPT-175B": 7_440.0, "Llama 3": 50_700.0, "Titan": 271_000.0}


@dataclass(frozen=True)
class Table1Row:
    """One row of Table 1, with ResNet-50 and 224 x 224 pixels: top-1 in percent, multiply-adds and parameters,
    videos a second of one P100 at inference with 16 clips, multiply-adds for each input element.

    utilisation: achieved over peak, in multiples of I3D 3x1x1's (section 3 a); the paper prints no percentage.
    """

    top1: float
    multiply_adds: float
    parameters: float
    frames: int
    clips_per_second: float
    compute_io: float
    utilisation: float


TABLE_1: dict[str, Table1Row] = {
    "i3d_3x3x3": Table1Row(68.0, 40e9, 47.0e6, 16, 63.1, 16.6e3, 1.8),
    "i3d_3x1x1": Table1Row(73.3, 33e9, 29.3e6, 32, 41.9, 6.85e3, 1.0),
    "tsm": Table1Row(74.1, 33e9, 24.3e6, 8, 84.8, 27.4e3, 2.0),
}
SLOWEST = "i3d_3x1x1"  # Table 1 counts throughput and compute/IO in multiples of it

# Section 3 c, Figure 3c: speed over 8 nodes (4 P100s each) against 8 times one node's, as the text bounds it.
SCALABILITY = {"tsm": "over 98 %", "i3d_3x3x3": "under 85 %"}


@dataclass(frozen=True)
class Table3Row:
    """One row of Table 3: TSM, ResNet-50, 8 frames. `seconds` as it is printed, to the minute up to 32 nodes."""

    nodes: int
    clips_per_gpu: int
    top1: float
    std: float
    seconds: int | None = None

    @property
    def gpus(self) -> int:
        return 6 * self.nodes

    @property
    def global_batch(self) -> int:
        return self.gpus * self.clips_per_gpu


# The rows without a time were trained with gradient accumulation on fewer nodes.
TABLE_3 = (
    Table3Row(1, 16, 74.12, 0.11, 49 * 3600 + 55 * 60),
    Table3Row(8, 8, 74.12, 0.08, 7 * 3600 + 7 * 60),
    Table3Row(16, 8, 74.18, 0.14, 3 * 3600 + 38 * 60),
    Table3Row(32, 8, 74.14, 0.10, 1 * 3600 + 50 * 60),
    Table3Row(64, 8, 74.10, 0.08, 55 * 60 + 56),
    Table3Row(128, 8, 73.99, 0.04, 28 * 60 + 14),
    Table3Row(256, 8, 73.99, 0.07, 14 * 60 + 13),
    Table3Row(384, 8, 72.52, 0.07, 10 * 60 + 9),
    Table3Row(512, 8, 69.80, 0.13),
    Table3Row(1024, 8, 62.22, 0.17),
)
TIMED_ROWS = tuple(row for row in TABLE_3 if row.seconds is not None)


def label_of(spec: Spec) -> str:
    """Name a spec's network as the paper does: I3D 3x3x3, 16 frames."""
    return f"{architecture(spec.model.arch).title}, {spec.data.num_frames} frames"


def table_1_row(spec: Spec) -> dict[str, Any] | None:
    """Return Table 1's row of the spec's network, with its throughput in multiples of the slowest's; else None."""
    model = spec.model
    data = spec.data
    row = TABLE_1.get(spec.model.arch)
    network = (model.backbone, model.non_local, model.width, data.clip_shape)
    if row is None or network != ("resnet50", False, 1.0, (row.frames, 224, 224, 3)):
        return None
    return asdict(row) | {"relative_throughput": row.clips_per_second / TABLE_1[SLOWEST].clips_per_second}


def is_table_3_network(spec: Spec) -> bool:
    """Check that the spec is Table 3's: TSM, ResNet-50, 8 frames of 224 x 224 pixels, 400 classes."""
    model = spec.model
    data = spec.data
    found = (model.arch, model.backbone, model.non_local, model.width, model.num_classes, data.clip_shape)
    return found == ("tsm", "resnet50", False, 1.0, 400, (8, 224, 224, 3))
