"""A trained network on a video that goes on: one frame in, the label of what was seen so far out.

Source: Lin et al., section 4.2. Each frame gives logits from its own picture and the caches of the frames before; the
logits of the last frames are averaged, as the clip network averages those of its frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import adaptive_avg_pool2d

from summit_train.core.errors import RunFailed, UserError
from summit_train.data.video.augment import test_views
from summit_train.data.video.render import Frames, Renderer
from summit_train.inference.trained import Trained, flow_problem
from summit_train.models import VideoNetwork
from summit_train.models.online import StreamNetwork
from summit_train.models.precision import Normalise
from summit_train.spec import EvaluateSpec, Spec
from summit_train.spec.catalog import stream_problem

# Mean difference of two thumbnails' levels, 0 to 255. From one frame to the next the cuts of an edited clip gave 47 to
# 130, motion up to 35; a jerk of a hand-held camera gave 47, and over eight frames fast pans give 70. A false alarm
# costs one window, a missed cut mixes two scenes.
CUT_THRESHOLD = 45.0
_THUMBNAIL = 16


@dataclass(frozen=True)
class Seen:
    """What a stream says after a frame.

    logits: float64 (classes,), averaged. reset: this frame was the first after a reset.
    """

    logits: NDArray[np.float64]
    reset: bool

    @property
    def label(self) -> int:
        """Return the most likely class; of equals the first."""
        return int(self.logits.argmax())

    @property
    def score(self) -> float:
        """Return its probability, 0 to 1."""
        return float(1 / np.exp(self.logits - self.logits.max()).sum())


class Stream:
    """A network that sees the frames of one video in turn, with its caches and the running average.

    window: frames that the average spans; 0: all since the start or the last reset. cut: a frame whose thumbnail
    differs by more than this from the one before (mean over 16 x 16 x 3 values of the absolute difference, in levels
    of 0 to 255) starts anew; None: none does. Raises ValueError for a network that cannot stream.
    """

    def __init__(self, network: VideoNetwork, device: torch.device, window: int, cut: float | None = None) -> None:
        self._network = StreamNetwork(network)
        dtype = next(network.parameters()).dtype
        self._normalise, self._device = Normalise(dtype, device), device
        self._cut, self._thumbnail = cut, torch.empty(0)
        self._caches: Sequence[torch.Tensor] = ()
        self._average = _Average(window)
        self._is_new, self._wants_reset = True, False

    def reset(self) -> None:
        """Forget all frames before the next one goes in. Signal handlers may call it."""
        self._wants_reset = True

    def see(self, picture: Frames) -> Seen:
        """Take the next frame, uint8 RGB (H, W, 3), of one size each time. Raises RunFailed for NaN or infinity."""
        is_reset = (self._is_cut(picture) or self._wants_reset) and not self._is_new
        if is_reset:
            self._caches, self._average = (), _Average(self._average.window)
        self._is_new = self._wants_reset = False
        with torch.inference_mode():
            frames = self._normalise(torch.from_numpy(picture)[None, None])[0]
            logits, self._caches = self._network(frames, self._caches)
        own = logits[0].double().cpu().numpy()
        if not np.isfinite(own).all():
            raise RunFailed("the network's scores are not finite: its weights, or what they make of this frame")
        return Seen(self._average.add(own), is_reset)

    def _is_cut(self, picture: Frames) -> bool:
        if self._cut is None:
            return False
        pixels = torch.from_numpy(picture).permute(2, 0, 1).to(torch.float32)
        before, self._thumbnail = self._thumbnail, adaptive_avg_pool2d(pixels, _THUMBNAIL)
        return bool(len(before)) and float((self._thumbnail - before).abs().mean()) > self._cut


class _Average:
    """The mean of the last `window` vectors; of all where it is 0."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._count = 0
        self._rows = np.empty((0, 0))

    def add(self, row: NDArray[np.float64]) -> NDArray[np.float64]:
        """Add a vector; return the mean."""
        if not self._count:
            self._rows = np.zeros((self.window or 1, len(row)))
        self._count += 1
        if self.window:
            self._rows[(self._count - 1) % self.window] = row
        else:
            self._rows[0] += (row - self._rows[0]) / self._count
        mean: NDArray[np.float64] = self._rows[: self._count].mean(0)
        return mean


def open_stream(trained: Trained, device: torch.device, window: int | None = None, cut: float | None = None) -> Stream:
    """Return the stream of a trained network. window: None for the frames of a training clip.

    Raises UserError where the network cannot stream.
    """
    spec = trained.spec
    problem = stream_problem(spec.model.arch, spec.model.shift_direction, spec.model.non_local)
    problem = problem or flow_problem(spec, "a stream has pictures")
    if problem is not None:
        raise UserError(f"{trained.path}: {problem}")
    return Stream(trained.network(device, ready=False), device, spec.data.num_frames if window is None else window, cut)


def stride_of(spec: Spec, asked: int | None) -> int:
    """Return the distance between two frames that the network sees: as asked, or as in training.

    Raises UserError where the training had none.
    """
    if asked is not None:
        return asked
    if spec.data.sampling == "uniform":
        raise UserError(
            "the network was trained on frames spread over each video (data.sampling uniform), which is no distance "
            "between frames: give one with --stride N"
        )
    return spec.data.frame_stride


def renderer(evaluate: EvaluateSpec) -> Renderer:
    """Return what makes a frame the picture that evaluation would see: the centre square, or the whole frame."""
    crops = "full" if evaluate.crops == "full" else 1
    return Renderer(lambda width, height: test_views(evaluate.short_side, crops, width, height))
