"""Which frames of a video a stream sees: every so many, and of a live source only those that it can keep up with."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from summit_train.core.errors import RunFailed, UserError
from summit_train.data.video.stream import StreamFrame

# Frames that may wait. More would make the labels late; fewer would drop frames at every hiccup.
MAX_WAITING = 4


@dataclass(frozen=True)
class Paced:
    """A frame. is_due: the stream is to see it. dropped: frames that it was to see, dropped just before this one."""

    frame: StreamFrame
    is_due: bool
    dropped: int = 0


@dataclass
class Pace:
    """skipped: frames passed over by the stride. dropped: frames that came too fast."""

    skipped: int = 0
    dropped: int = 0

    def strided(self, frames: Iterable[StreamFrame], stride: int, *, keep_skipped: bool = False) -> Iterator[Paced]:
        """Yield the frames 0, stride, 2 * stride, ... as due; the others not at all, or as not due."""
        for frame in frames:
            is_due = frame.number % stride == 0
            self.skipped += not is_due
            if is_due or keep_skipped:
                yield Paced(frame, is_due)

    def newest(self, frames: Iterable[Paced], max_waiting: int = MAX_WAITING) -> Iterator[Paced]:
        """Read on in a thread; where more than `max_waiting` frames wait, drop the oldest.

        Raises UserError as the frames do, and RunFailed where the thread fails otherwise.
        """
        waiting = _Waiting(max_waiting)
        threading.Thread(target=waiting.fill, args=(frames,), daemon=True).start()
        for paced in waiting:
            self.dropped += paced.dropped
            yield paced


class _Waiting:
    """Frames between the thread that reads and the one that takes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._frames = deque[Paced]()
        self._num_dropped = 0  # since the last frame was taken
        self._changed = threading.Condition()
        self._is_done = self._is_whole = False
        self._error: UserError | None = None

    def fill(self, frames: Iterable[Paced]) -> None:
        """Read to the end. A UserError is raised where the frames are taken, after those before it."""
        try:
            for paced in frames:
                with self._changed:
                    self._frames.append(paced)
                    if len(self._frames) > self._most:
                        self._frames.popleft()
                        self._num_dropped += 1
                    self._changed.notify()
            self._is_whole = True
        except UserError as error:
            self._error = error
        finally:
            with self._changed:
                self._is_done = True
                self._changed.notify()

    def __iter__(self) -> Iterator[Paced]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._frames or self._is_done)
                if not self._frames:
                    break
                paced = replace(self._frames.popleft(), dropped=self._num_dropped)
                self._num_dropped = 0
            yield paced
        if self._error is not None:
            raise self._error
        if not self._is_whole:
            raise RunFailed("the thread that reads the stream failed; its traceback says why")
