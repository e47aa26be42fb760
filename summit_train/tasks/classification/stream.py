"""The label of a video so far, by a stream of its frames: the logits of the last frames, averaged.

Source: Lin et al., section 4.2. The clip network averages those of its frames in the same way.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from summit_train.data.video.encode import with_caption
from summit_train.data.video.render import Frames
from summit_train.data.video.stream import StreamFrame
from summit_train.inference.predict import most_probable
from summit_train.inference.stream.stream import Stream, Values
from summit_train.inference.trained import Trained
from summit_train.spec.checks import stream_problem


class Labeller(Stream):
    """Labels a video frame by frame.

    window: frames that the average spans; 0: all since the start; None: the frames of a training clip. Raises UserError
    for a network that cannot stream.
    """

    def __init__(self, trained: Trained, device: torch.device, window: int | None = None) -> None:
        spec = trained.spec
        regions = "trained on regions of frames (data.region); set data.region=null if the stream shows one"
        problem = stream_problem(spec.model)
        trained.check_pictures(problem or (regions if spec.data.region else None))
        super().__init__(trained, device)
        self.stride = spec.data.frame_stride
        self._kind = spec.loss.base
        window = spec.data.num_frames if window is None else window
        self._window = window
        self._last = deque[NDArray[np.float64]](maxlen=window)
        self._mean = np.zeros(1)  # of all frames
        self._count = 0
        self.about = f"the average of the last {window}" if window else "the average of all since the start"

    def logits(self, picture: Frames) -> NDArray[np.float64]:
        """Take the next frame, uint8 RGB (H, W, 3), of one size each time; return the averaged logits (classes,)."""
        own: NDArray[np.float64] = self.output(picture)[0].double().cpu().numpy()
        self._count += 1
        self._last.append(own)
        self._mean = self._mean + (own - self._mean) / self._count
        return np.stack(self._last).mean(0) if self._window else self._mean

    def see(self, frame: StreamFrame) -> Values:
        (best,) = most_probable(self.logits(self.picture(frame)), self._names, 1, self._kind)
        return {**best, "score": round(best["score"], 6)}

    def key(self, values: Values) -> object:
        return values["label"]

    def text(self, values: Values) -> str:
        return f"{values['score']:4.2f}  {values['name']}"

    def draw(self, picture: Frames, values: Values) -> Frames:
        return with_caption(picture, f"{values['name']} {values['score']:.2f}")
