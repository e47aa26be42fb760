"""A trained network on a live video: one frame in, the label of what was seen so far out.

Source: Lin et al., section 4.2. Each frame gives logits from its own picture and the caches of the frames before; the
logits of the last frames are averaged, as the clip network averages those of its frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import adaptive_avg_pool2d

from summit_train.core.errors import RunFailed
from summit_train.data.video.augment import test_views
from summit_train.data.video.render import Frames, Renderer
from summit_train.inference.trained import Trained
from summit_train.models import VideoNetwork
from summit_train.models.online import StreamNetwork
from summit_train.models.precision import Normalise
from summit_train.spec import EvaluateSpec
from summit_train.spec.catalog import stream_problem

# Mean difference of two thumbnails' levels, 0 to 255. From one frame to the next the cuts of an edited clip gave 47 to
# 130, motion up to 35; a jerk of a hand-held camera gave 47, and over eight frames fast pans give 70. A false alarm
# costs one window, a missed cut mixes two scenes.
CUT_THRESHOLD = 45.0
_THUMBNAIL = 16


class Stream:
    """A network that sees the frames of one video in turn, with its caches and the running average.

    window: frames that the average spans; 0: all since the start or the last reset. cut: a frame resets the stream if
    its thumbnail differs by more than this from the one before (mean over 16 x 16 x 3 values of the absolute
    difference, in levels of 0 to 255); None: no frame does. Raises ValueError for a network that cannot stream.
    """

    def __init__(self, network: VideoNetwork, device: torch.device, window: int, cut: float | None = None) -> None:
        self._network = StreamNetwork(network)
        self._normalise = Normalise(next(network.parameters()).dtype, device)
        self._window, self._cut, self._thumbnail = window, cut, torch.empty(0)
        self._caches: Sequence[torch.Tensor] = ()
        self._last = deque[NDArray[np.float64]](maxlen=window)
        self._mean, self._count = np.zeros(1), 0  # of all frames since the last reset

    def see(self, picture: Frames) -> tuple[NDArray[np.float64], bool]:
        """Take the next frame, uint8 RGB (H, W, 3), of one size each time; return the averaged logits (classes,).

        And whether this frame is the first after a reset. Raises RunFailed for NaN or infinity.
        """
        is_reset = False
        if self._cut is not None:
            pixels = torch.from_numpy(picture).permute(2, 0, 1).to(torch.float32)
            before, self._thumbnail = self._thumbnail, adaptive_avg_pool2d(pixels, _THUMBNAIL)
            is_reset = bool(len(before)) and float((self._thumbnail - before).abs().mean()) > self._cut
        if is_reset:
            self._caches, self._mean, self._count = (), np.zeros(1), 0
            self._last.clear()
        with torch.inference_mode():
            frames = self._normalise(torch.from_numpy(picture)[None, None])[0]
            logits, self._caches = self._network(frames, self._caches)
        own: NDArray[np.float64] = logits[0].double().cpu().numpy()
        if not np.isfinite(own).all():
            raise RunFailed("the network's scores are not finite: its weights, or what they make of this frame")
        self._count += 1
        self._last.append(own)
        self._mean = self._mean + (own - self._mean) / self._count
        return np.stack(self._last).mean(0) if self._window else self._mean, is_reset


def open_stream(trained: Trained, device: torch.device, window: int | None = None, cut: float | None = None) -> Stream:
    """Return the stream of a trained network. window: None for the frames of a training clip. Raises UserError."""
    spec = trained.spec
    trained.check_pictures(stream_problem(spec.model.arch, spec.model.shift_direction, spec.model.non_local))
    return Stream(trained.network(device, ready=False), device, spec.data.num_frames if window is None else window, cut)


def renderer(evaluate: EvaluateSpec) -> Renderer:
    """Return what renders a frame as in evaluation: the centre square, or the whole frame."""
    crops = "full" if evaluate.crops == "full" else 1
    return Renderer(lambda width, height: test_views(evaluate.short_side, crops, width, height))
