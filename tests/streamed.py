"""Helpers of tests that evaluate videos whose frames all differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from summit_train.core.comm import World
from summit_train.data.dataset import Dataset
from summit_train.data.manifest import ManifestRow, write_manifest
from summit_train.data.video.encode import write_video
from summit_train.evaluation.scores import Scores
from summit_train.evaluation.scoring import Scorer
from summit_train.models import VideoNetwork
from summit_train.models.network import initial_network
from summit_train.spec import Spec

CPU = torch.device("cpu")


def network_of(spec: Spec) -> VideoNetwork:
    """The spec's network, executed fast, with normalisations and a classifier that show in the logits."""
    model, generator = initial_network(spec, CPU), torch.Generator().manual_seed(5)
    for name, value in model.state_dict().items():
        if value.dtype.is_floating_point and value.dim() == 1:
            low, high = (0.5, 1.5) if name.endswith(("weight", "var")) else (-0.2, 0.2)
            value.uniform_(low, high, generator=generator)
    torch.nn.init.normal_(model.get_parameter("fc.weight"), generator=generator)
    return model


def noise_videos(
    folder: Path, lengths: Sequence[int], *, counted: bool = False, size: tuple[int, int] = (48, 32)
) -> str:
    """Videos whose frames all differ, and their manifest; counted: with the numbers of frames."""
    rows = []
    for number, length in enumerate(lengths):
        frames = np.random.default_rng(number).integers(0, 256, (length, size[1] // 8, size[0] // 8, 3), np.uint8)
        write_video(folder / f"{number}.mp4", frames.repeat(8, 1).repeat(8, 2), 25)
        rows.append(ManifestRow(f"{number}.mp4", number % 4, num_frames=length if counted else None))
    write_manifest(folder / "noise.csv", rows)
    return str(folder / "noise.csv")


def score(spec: Spec, model: VideoNetwork, crops: int | str = 1) -> Scores:
    views = spec.evaluate.model_copy(update={"clips": 1, "crops": crops})
    spec = spec.model_copy(update={"evaluate": views})
    found = Scorer(spec, Dataset.open(spec, "val"), World(), CPU).score(model)
    assert found is not None
    return found
