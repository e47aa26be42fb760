"""Follow a stream to its end: the label of each frame that is due, the counts, a copy of the video with labels."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import check_output
from summit_train.core.text import counted
from summit_train.data.video.augment import View
from summit_train.data.video.encode import Write, open_writer, with_caption
from summit_train.data.video.render import Renderer
from summit_train.data.video.stream import Reading, StreamFrame
from summit_train.inference.predict import most_probable
from summit_train.inference.stream.stream import Stream

# Frames that may wait. More would make the labels late; fewer would drop frames at every hiccup.
MAX_WAITING = 4
_LATENCIES = 100_000  # the summary gives the latencies of the last ones
_ENDINGS = (".mp4", ".mkv", ".mov")
# The times of a stream's frames need not be multiples of anything.
_TICK = Fraction(1, 90_000)

Show = Callable[[StreamFrame, str], None]  # (frame, caption)


@dataclass
class Follower:
    """Follows a stream once: labels the frames 0, stride, 2 * stride, ... of its source, and counts all of them.

    names: of the classes. reading: what the source counts.
    """

    stream: Stream
    render: Renderer
    names: Sequence[str]
    reading: Reading
    stride: int
    num_seen: int = 0
    num_skipped: int = 0
    num_dropped: int = 0
    num_resets: int = 0
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
        logits, is_reset = self.stream.see(self.render(frame.decoded)[0])
        (best,) = most_probable(logits, self.names, 1)
        latency_s = time.monotonic() - frame.arrived  # with the wait in the queue of a live source
        self.latencies.append(latency_s)
        self.num_seen += 1
        self.num_resets += is_reset
        values = {"frame": frame.number, "seconds": round(frame.seconds, 6), **best, "score": round(best["score"], 6)}
        values |= {"latency_ms": round(1000 * latency_s, 3)} | ({"reset": True} if is_reset else {})
        return values | ({"dropped": dropped} if dropped else {})

    def summary(self) -> str:
        """Return the counts and the latencies in one line."""
        parts = (
            f"{self.num_seen:,} seen, {self.num_skipped:,} skipped by the stride, {self.num_dropped:,} dropped, "
            f"{self.reading.num_damaged:,} damaged"
        )
        resets = f", {counted(self.num_resets, 'reset')}" if self.num_resets else ""
        median, late, most = 1000 * np.percentile(self.latencies or [0.0], (50, 99, 100))
        times = f"median {median:.1f} ms, 99th percentile {late:.1f} ms, max {most:.1f} ms"
        speed = self.reading.num_frames / max(1e-9, time.monotonic() - self.began)
        return f"{counted(self.reading.num_frames, 'frame')} ({parts}){resets}; latency {times}; {speed:.1f} frames/s"


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


@contextmanager
def shown_in(path: str, source: str, reading: Reading) -> Iterator[Show]:
    """Yield a function that adds a frame with a caption to a copy of the video: upright, at its time.

    All frames get the size of the first. The file appears when the block ends; after an error nothing is left of it.
    Raises UserError at once if no video can be written to `path`, or it is the source.
    """
    if Path(path).suffix.lower() not in _ENDINGS:
        raise UserError(f"--show must be a name that ends in {', '.join(_ENDINGS)}, got {path}")
    if os.path.exists(path) and os.path.exists(source) and os.path.samefile(path, source):
        raise UserError(f"--show {path}: is the video that is streamed; write to another file")
    check_output("--show", path, path)
    render = Renderer(lambda width, height: [View(width, height, 0, 0, width, height)])
    write: Write | None = None
    last = -1

    def add(frame: StreamFrame, caption: str) -> None:
        nonlocal write, last
        picture = render(frame.decoded)[0]
        if write is None:
            size = (picture.shape[1], picture.shape[0])
            write = stack.enter_context(open_writer(path, size, reading.fps, tick=_TICK))
        last = max(round(frame.seconds / _TICK), last + 1)  # a container may give two frames one time
        write(with_caption(picture, caption), last)

    with ExitStack() as stack:
        yield add
