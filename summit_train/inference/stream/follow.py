"""A stream followed to its end: each frame's label, the copy that shows it, and what it all took."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from summit_train.core.text import counted
from summit_train.data.video.render import Renderer
from summit_train.data.video.stream import Reading
from summit_train.inference.stream.latencies import Latencies
from summit_train.inference.stream.pace import Pace, Paced
from summit_train.inference.stream.show import Show
from summit_train.inference.stream.stream import Stream


@dataclass(frozen=True)
class Labelled:
    """A frame's label. latency_s: from the decoded frame to its label, with the wait in the queue of a live source."""

    frame: int
    seconds: float
    label: int
    name: str
    score: float
    latency_s: float
    reset: bool
    dropped: int

    def values(self) -> dict[str, Any]:
        """Return the line of --json; resets and dropped frames only where there were some."""
        values: dict[str, Any] = {
            "frame": self.frame,
            "seconds": round(self.seconds, 6),
            "label": self.label,
            "name": self.name,
            "score": round(self.score, 6),
            "latency_ms": round(1000 * self.latency_s, 3),
        }
        return values | ({"reset": True} if self.reset else {}) | ({"dropped": self.dropped} if self.dropped else {})


@dataclass
class Follower:
    """Follows a stream once. names: of the classes; reading, pace: what the frames' source and their pace count."""

    stream: Stream
    render: Renderer
    names: Sequence[str]
    reading: Reading
    pace: Pace
    show: Show | None = None
    latencies: Latencies = field(default_factory=Latencies)
    num_resets: int = 0
    began: float = field(default_factory=time.monotonic)

    def __call__(self, frames: Iterable[Paced]) -> Iterator[Labelled]:
        """Yield a label for each frame that is due, and write all frames to the show."""
        caption = ""
        for paced in frames:
            result = self._label(paced) if paced.is_due else None
            if result is not None:
                caption = f"{result.name} {result.score:.2f}"
            # Before its label is told, as the reader of the label may end the stream.
            if self.show is not None:
                self.show.add(paced.frame, caption)
            if result is not None:
                yield result

    def _label(self, paced: Paced) -> Labelled:
        frame = paced.frame
        seen = self.stream.see(self.render(frame.decoded)[0])
        latency = time.monotonic() - frame.arrived
        self.latencies.add(latency)
        self.num_resets += seen.reset
        name = self.names[seen.label]
        return Labelled(frame.number, frame.seconds, seen.label, name, seen.score, latency, seen.reset, paced.dropped)

    @property
    def num_seen(self) -> int:
        """Return the number of frames that the network has seen."""
        return self.latencies.count

    @property
    def frames_per_second(self) -> float:
        """Return the frames of the source, seen or not, that a second took."""
        return self.reading.num_frames / max(1e-9, time.monotonic() - self.began)

    def summary(self) -> str:
        """Return in one line what became of the frames, and the latencies."""
        counts = {
            "seen": self.num_seen,
            "skipped by the stride": self.pace.skipped,
            "dropped": self.pace.dropped,
            "damaged": self.reading.num_damaged,
        }
        parts = ", ".join(f"{number:,} {what}" for what, number in counts.items())
        resets = f", {counted(self.num_resets, 'reset')}" if self.num_resets else ""
        median, late = (1000 * self.latencies.quantile(part) for part in (0.5, 0.99))
        times = f"median {median:.1f} ms, 99th percentile {late:.1f} ms, max {1000 * self.latencies.maximum:.1f} ms"
        speed = f"{self.frames_per_second:.1f} frames/s"
        return f"{counted(self.reading.num_frames, 'frame')} ({parts}){resets}; latency {times}; {speed}"
