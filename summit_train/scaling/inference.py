"""The forward pass of a spec's network alone, as the paper's Table 1 and Figure 3a measure it."""

from __future__ import annotations

import contextlib

import torch

from summit_train.spec import Spec
from summit_train.training.network import fresh_model
from summit_train.training.step import AUTOCAST, parameter_type
from summit_train.training.stopwatch import Mark


class InferenceBench:
    """A network with random weights and one batch of `clips` random clips, which lies on the device already."""

    def __init__(self, spec: Spec, device: torch.device, clips: int) -> None:
        self._device = device
        self._autocast = AUTOCAST.get(spec.precision)
        self._model = fresh_model(spec, device).eval()
        shape = (clips, spec.data.num_frames, spec.data.crop, spec.data.crop, 3)
        pixels = torch.randn(shape, device=device, dtype=parameter_type(spec.precision))
        self._clips = pixels.permute(0, 1, 4, 2, 3)  # channels-last in memory, as from the loader

    def repeat(self, passes: int) -> float:
        """Seconds of a forward pass, the mean over `passes` of them."""
        context = torch.autocast(self._device.type, self._autocast) if self._autocast else contextlib.nullcontext()
        with torch.inference_mode(), context:
            start = Mark(self._device)
            for _ in range(passes):
                self._model(self._clips)
            return start.seconds_to(Mark(self._device)) / passes
