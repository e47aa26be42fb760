"""A trained network on a live video: one frame in, the label of what was seen so far out.

Source: Lin et al., section 4.2. Each frame gives logits from its own picture and the caches of the frames before; the
logits of the last frames are averaged, as the clip network averages those of its frames.
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
from numpy.typing import NDArray

from summit_train.core.errors import RunFailed, UserError
from summit_train.core.text import counted
from summit_train.data.video.augment import test_views
from summit_train.data.video.render import Frames, Renderer
from summit_train.data.video.stream import Reading, StreamFrame
from summit_train.inference.predict import most_probable
from summit_train.inference.trained import Trained
from summit_train.models import VideoNetwork
from summit_train.models.online import StreamNetwork
from summit_train.models.precision import Normalise
from summit_train.spec import EvaluateSpec
from summit_train.spec.catalog import stream_problem

# Frames that may wait. More would make the labels late; fewer would drop frames at every hiccup.
MAX_WAITING = 4
_LATENCIES = 100_000  # the summary gives the latencies of the last ones

Show = Callable[[StreamFrame, str], None]  # (frame, caption)


class Stream:
    """A network that sees the frames of one video in turn, with its caches and the running average.

    window: frames that the average spans; 0: all since the start. Raises ValueError for a network that cannot stream.
    """

    def __init__(self, network: VideoNetwork, device: torch.device, window: int) -> None:
        self._network = StreamNetwork(network)
        self._normalise = Normalise(next(network.parameters()).dtype, device)
        self._caches: Sequence[torch.Tensor] = ()
        self._window, self._last = window, deque[NDArray[np.float64]](maxlen=window)
        self._mean, self._count = np.zeros(1), 0  # of all frames

    def see(self, picture: Frames) -> NDArray[np.float64]:
        """Take the next frame, uint8 RGB (H, W, 3), of one size each time; return the averaged logits (classes,).

        Raises RunFailed for NaN or infinity.
        """
        with torch.inference_mode():
            frames = self._normalise(torch.from_numpy(picture)[None, None])[0]
            logits, self._caches = self._network(frames, self._caches)
        own: NDArray[np.float64] = logits[0].double().cpu().numpy()
        if not np.isfinite(own).all():
            raise RunFailed("the network's scores are not finite: its weights, or what they make of this frame")
        self._count += 1
        self._last.append(own)
        self._mean = self._mean + (own - self._mean) / self._count
        return np.stack(self._last).mean(0) if self._window else self._mean


def open_stream(trained: Trained, device: torch.device, window: int | None = None) -> Stream:
    """Return the stream of a trained network. window: None for the frames of a training clip. Raises UserError."""
    spec, model = trained.spec, trained.spec.model
    regions = "trained on regions of frames (data.region); set data.region=null if the stream shows one"
    problem = stream_problem(model.arch, model.shift_direction, model.non_local, model.adapter)
    trained.check_pictures(problem or (regions if spec.data.region else None))
    return Stream(trained.network(device, ready=False), device, spec.data.num_frames if window is None else window)


def renderer(evaluate: EvaluateSpec) -> Renderer:
    """Return what renders a frame as in evaluation: the centre square, or the whole frame."""
    crops = "full" if evaluate.crops == "full" else 1
    return Renderer(lambda width, height: test_views(evaluate.short_side, crops, width, height))


@dataclass
class Follower:
    """Follows a stream once: labels the frames 0, stride, 2 * stride, ... of its source, and counts all of them.

    names: of the classes. reading: what the source counts. kind: the network's loss.kind.
    """

    stream: Stream
    render: Renderer
    names: Sequence[str]
    reading: Reading
    stride: int
    kind: str = "softmax"
    num_seen: int = 0
    num_skipped: int = 0
    num_dropped: int = 0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCIES))
    began: float = field(default_factory=time.monotonic)

    def follow(self, frames: Iterable[StreamFrame], *, live: bool, show: Show | None) -> Iterator[dict[str, Any]]:
        """Yield the line of --json of each frame that is due.

        live: drop frames as `newest` does. show: takes all frames, or of a live source those that are seen.
        """

        def strided() -> Iterator[StreamFrame]:
            for frame in frames:
                is_due = frame.number % self.stride == 0
                self.num_skipped += not is_due
                if is_due or (show is not None and not live):
                    yield frame

        caption, result = "", None
        for frame, dropped in newest(strided()) if live else ((frame, 0) for frame in strided()):
            self.num_dropped += dropped
            if frame.number % self.stride == 0:
                result = self._label(frame, dropped)
                caption = f"{result['name']} {result['score']:.2f}"
            # Before its label is yielded, as the reader of the label may end the stream.
            if show is not None:
                show(frame, caption)
            if result is not None:
                yield result
            result = None

    def _label(self, frame: StreamFrame, dropped: int) -> dict[str, Any]:
        (best,) = most_probable(self.stream.see(self.render(frame.decoded)[0]), self.names, 1, self.kind)
        latency_s = time.monotonic() - frame.arrived  # with the wait in the queue of a live source
        self.latencies.append(latency_s)
        self.num_seen += 1
        values = {"frame": frame.number, "seconds": round(frame.seconds, 6), **best, "score": round(best["score"], 6)}
        values |= {"latency_ms": round(1000 * latency_s, 3)}
        return values | ({"dropped": dropped} if dropped else {})

    def summary(self) -> str:
        """Return the counts and the latencies in one line."""
        parts = f"{self.num_seen:,} seen, {self.num_skipped:,} skipped by the stride, {self.num_dropped:,} dropped"
        parts += f", {self.reading.num_damaged:,} damaged"
        median, late, most = 1000 * np.percentile(self.latencies or [0.0], (50, 99, 100))
        times = f"median {median:.1f} ms, 99th percentile {late:.1f} ms, max {most:.1f} ms"
        speed = self.reading.num_frames / max(1e-9, time.monotonic() - self.began)
        return f"{counted(self.reading.num_frames, 'frame')} ({parts}); latency {times}; {speed:.1f} frames/s"


def newest(frames: Iterable[StreamFrame], max_waiting: int = MAX_WAITING) -> Iterator[tuple[StreamFrame, int]]:
    """Read frames in a thread, and drop the oldest if more than `max_waiting` wait.

    Yield each frame and the number of frames dropped just before it. Raises the UserError of `frames`, after the frames
    before it, and RunFailed if the thread fails otherwise.
    """
    waiting = queue.Queue[tuple[int, StreamFrame] | Exception | None](max_waiting)

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
