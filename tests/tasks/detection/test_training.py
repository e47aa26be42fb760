"""A tiny detector learns to find a bright square.

The micro-batches are made by hand: a square on a background that is the same everywhere, where all anchors tie. On any
ranks and after a resume: "detector" of tests/training/test_golden_runs.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from summit_train.core import rng
from summit_train.core.comm import World
from summit_train.data.batches.loader import MicroBatch
from summit_train.models.network import initial_network
from summit_train.models.precision import Normalise
from summit_train.plan import make_plan
from summit_train.spec import Spec
from summit_train.tasks.detection.detect import detect
from summit_train.tasks.detection.geometry import iou
from summit_train.training.build import build_step
from tests.detectors import detector_spec
from tests.worlds import take_step

CPU, SIDE = torch.device("cpu"), 64


def _batch(step: int, virtual_gpu: int, clips: int = 1, frames: int = 2) -> MicroBatch:
    """Clips of one bright square each, of 24 to 32 pixels, which moves by a pixel a frame; the first frame is empty."""
    draw = rng.key(0, "squares", step, virtual_gpu)
    pixels = np.full((clips, frames, SIDE, SIDE, 3), 40, np.uint8)
    labels = np.full((clips, frames, 2, 5), -1, np.float32)
    for clip in range(clips):
        side, label = int(draw.integers(24, 33)), int(draw.integers(2))
        left, top = draw.integers(0, SIDE - side - frames, 2).tolist()
        for t in range(1, frames):
            pixels[clip, t, top : top + side, left + t : left + t + side, label] = 250
            labels[clip, t, 1] = left + t, top, left + t + side, top + side, label
    return MicroBatch(step, virtual_gpu, torch.from_numpy(pixels), torch.from_numpy(labels), torch.arange(clips))


def _spec(**sections: Any) -> Spec:
    """An online detector on 6 virtual GPUs."""
    model = detector_spec().model.model_dump(mode="json", exclude={"pretrained"})
    model |= {"arch": "tsm", "shift_direction": "past", **sections.pop("model", {})}
    usual = {"scale": {"gpus": 6, "clips_per_gpu": 1}, "optimizer": {"weight_decay": 5e-4, "clip_norm": 10.0}}
    return detector_spec(model=model, **usual | sections)


@pytest.mark.nightly
def test_a_tiny_detector_finds_a_bright_square() -> None:
    """After 150 steps of 8 clips, on 24 clips that it has not seen."""
    detector = detector_spec().model.model_dump(mode="json")["detector"] | {"channels": 512}
    spec = _spec(
        precision="fp32",
        model={"width": 0.25, "detector": detector},
        optimizer={"weight_decay": 5e-4},
        scale={"gpus": 1},
    )
    model = initial_network(spec, CPU)
    step = build_step(spec, make_plan(spec, 1, 60), World(), model, CPU)
    losses = []
    for number in range(150):
        lr = 0.2 * min(1, (number + 1) / 10) if number < 120 else 0.02
        losses.append(take_step(step, [_batch(number, 0, clips=8)], lr).read(8, 1, 1).loss)
    assert sum(losses[-10:]) < sum(losses[:10]) / 3

    test = _batch(0, 1, clips=24)
    assert spec.model.detector is not None
    with torch.inference_mode():
        maps = model.eval()(Normalise(torch.float32, CPU)(test.clips))
        found = [detect(one, (SIDE, SIDE), spec.model.detector, 2) for one in maps.unbind(1)]
    assert max([float(boxes[:, 1].max()) for boxes in found[0] if len(boxes)], default=0.0) < 0.05  # empty frames
    objects = test.labels[:, 1, 1]
    overlaps = [float(iou(boxes[:1, 2:], one[None, :4])) for boxes, one in zip(found[1], objects, strict=True)]
    labels = [bool(boxes[0, 0] == one[4]) for boxes, one in zip(found[1], objects, strict=True)]
    assert sum(overlap > 0.5 for overlap in overlaps) >= 18 and sum(labels) >= 16
