"""A trained network on a live video: one frame in, what is told of it out.

Source: Lin et al., section 4.2. Each frame gives logits, or maps, from its picture and the caches of the frames before.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from summit_train.core.errors import RunFailed, UserError
from summit_train.core.text import counted
from summit_train.data.video.augment import View, test_views
from summit_train.data.video.render import Frames, Renderer, upright_size
from summit_train.data.video.stream import Progress, StreamFrame
from summit_train.inference.trained import Trained
from summit_train.models.online import StreamNetwork
from summit_train.models.precision import Normalise
from summit_train.spec import Spec

# Frames that may wait. More would make the labels late; fewer would drop frames at every hiccup.
_MOST_WAITING = 4
_LATENCIES = 100_000  # the summary gives the latencies of the last ones

Values = dict[str, Any]  # of a line of --json
Show = Callable[[StreamFrame, Values | None], None]  # (frame, the values of the last frame that was seen)


class Stream:
    """A trained network that sees the frames of one video in turn, with its caches.

    about: what it tells, for people. stride: between the frames that its evaluation sees.
    """

    about = ""
    stride = 1

    def __init__(self, trained: Trained, device: torch.device) -> None:
        network = trained.network(device, ready=False)
        self._network = StreamNetwork(network)
        self._names = trained.classes
        self._normalise = Normalise(next(network.parameters()).dtype, device)
        self._spec = trained.spec
        self._render: Renderer | None = None  # for the first frame's size
        self._caches: Sequence[torch.Tensor] = ()

    def picture(self, frame: StreamFrame) -> Frames:
        """Return the crop of the next frame, uint8 RGB (H, W, 3); it has one size, by the first frame."""
        if self._render is None:
            self._render = Renderer([stream_view(self._spec, *upright_size(frame.decoded))])
        (picture,) = self._render(frame.decoded)
        return picture

    def output(self, picture: Frames) -> torch.Tensor:
        """Return logits or maps (1, ...) of the next frame, uint8 RGB (H, W, 3). RunFailed for NaN or infinity."""
        with torch.inference_mode():
            frames = self._normalise(torch.from_numpy(picture)[None, None])[0]
            output: torch.Tensor
            output, self._caches = self._network(frames, self._caches)
        if not output.isfinite().all():
            raise RunFailed("the network's scores are not finite: its weights, or what they make of this frame")
        return output

    def see(self, frame: StreamFrame) -> Values:
        """Take the next frame; return the values that --json prints."""
        raise NotImplementedError

    def key(self, values: Values) -> object:
        """Select those of the values whose change prints a line."""
        raise NotImplementedError

    def text(self, values: Values) -> str:
        raise NotImplementedError

    def draw(self, picture: Frames, values: Values) -> Frames:
        raise NotImplementedError


def stream_view(spec: Spec, width: int, height: int) -> View:
    """Return the view of a frame as in evaluation: the centre square, or the whole frame."""
    short_side = spec.evaluate.short_side
    crops = "full" if spec.evaluate.crops == "full" else 1
    (view,) = test_views(short_side, crops, width, height, long_side=spec.data.long_side)
    return view


@dataclass
class Follower:
    """Follows a stream once: sees the frames 0, stride, 2 * stride, ... of its source, and counts all of them.

    see: returns the values of a frame. progress: what the source counts.
    """

    see: Callable[[StreamFrame], Values]
    progress: Progress
    stride: int
    num_seen: int = 0
    num_skipped: int = 0
    num_dropped: int = 0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCIES))
    began: float = field(default_factory=time.monotonic)

    def follow(self, frames: Iterable[StreamFrame], *, live: bool, show: Show | None) -> Iterator[Values]:
        """Yield the line of --json of each frame that is due.

        live: drop frames as `newest` does. show: takes all frames, or of a live source those that are seen.
        """

        def strided() -> Iterator[StreamFrame]:
            for frame in frames:
                is_due = frame.number % self.stride == 0
                self.num_skipped += not is_due
                if is_due or (show is not None and not live):
                    yield frame

        values: Values | None = None
        for frame, dropped in newest(strided()) if live else ((frame, 0) for frame in strided()):
            self.num_dropped += dropped
            is_due = frame.number % self.stride == 0
            if is_due:
                seen = self.see(frame)
                latency_s = time.monotonic() - frame.arrived  # with the wait in the queue of a live source
                self.latencies.append(latency_s)
                self.num_seen += 1
                values = {"frame": frame.number, "seconds": round(frame.seconds, 6), **seen}
                values |= {"latency_ms": round(1000 * latency_s, 3)} | ({"dropped": dropped} if dropped else {})
            # Before they are yielded, as the reader of the values may end the stream.
            if show is not None:
                show(frame, values)
            if is_due and values is not None:
                yield values

    def summary(self) -> str:
        """Return the counts and the latencies in one line."""
        parts = f"{self.num_seen:,} seen, {self.num_skipped:,} skipped by the stride, {self.num_dropped:,} dropped"
        parts += f", {self.progress.num_damaged:,} damaged"
        median, late, most = 1000 * np.percentile(self.latencies or [0.0], (50, 99, 100))
        times = f"median {median:.1f} ms, 99th percentile {late:.1f} ms, max {most:.1f} ms"
        speed = self.progress.num_frames / max(1e-9, time.monotonic() - self.began)
        return f"{counted(self.progress.num_frames, 'frame')} ({parts}); latency {times}; {speed:.1f} frames/s"


def newest(frames: Iterable[StreamFrame]) -> Iterator[tuple[StreamFrame, int]]:
    """Read frames in a thread, and drop the oldest if more than four wait.

    Yield each frame and the number of frames dropped just before it. Raises the UserError of `frames`, after the frames
    before it, and RunFailed if the thread fails otherwise.
    """
    waiting = queue.Queue[tuple[int, StreamFrame] | Exception | None](_MOST_WAITING)

    def read() -> None:
        end: Exception | None = RunFailed("the thread that reads the stream failed; its traceback says why")
        try:
            for numbered in enumerate(frames):
                while True:
                    try:
                        waiting.put_nowait(numbered)
                        break
                    except queue.Full:
                        with suppress(queue.Empty):  # taken just now
                            waiting.get_nowait()
            end = None
        except UserError as error:
            end = error
        finally:
            waiting.put(end)

    threading.Thread(target=read, daemon=True).start()
    due = 0
    while (found := waiting.get()) is not None:
        if isinstance(found, Exception):
            raise found
        number, frame = found
        yield frame, number - due
        due = number + 1
