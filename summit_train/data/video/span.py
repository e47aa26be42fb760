"""A clip that is a part of its video: two frame numbers. Inside a span frames are numbered from 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from summit_train.data.video.source import DecodeError

Choose = Callable[[int], NDArray[np.int64]]

TO_THE_END = -1


class Span(NamedTuple):
    """The frames start .. end - 1 of a video; TO_THE_END as the end: all from `start` on."""

    start: int = 0
    end: int = TO_THE_END

    def __str__(self) -> str:
        return f"{self.start}:{'' if self.end == TO_THE_END else self.end}"

    @property
    def cells(self) -> tuple[str, str]:
        """Return the start and the end as a list has them: nothing for the video's own."""
        return str(self.start or ""), "" if self.end == TO_THE_END else str(self.end)

    def end_in(self, video_frames: int) -> int:
        """Return the number after the last frame's, in a video of `video_frames`."""
        return video_frames if self.end == TO_THE_END else self.end

    def frames(self, video: str, video_frames: int) -> range:
        """Return the numbers of its frames in a video of `video_frames`. Raises SpanError where one lies outside."""
        end = self.end_in(video_frames)
        if not self.start < end <= video_frames:
            raise SpanError(video, f"has {video_frames} frames, and the span {self} does not lie among them", self)
        return range(self.start, end)

    def num_frames(self, video: str, video_frames: int) -> int:
        """Return how many frames it has in a video of `video_frames`. Raises SpanError as `frames` does."""
        return len(self.frames(video, video_frames))

    def chosen_in(self, video: str, choose: Choose) -> Choose:
        """Return a choice of the video's frames that takes what `choose` takes of the span's, where `video` names it.

        The choice raises SpanError for a video that the span does not lie in.
        """
        return lambda video_frames: self.start + choose(self.num_frames(video, video_frames))


WHOLE = Span()


class SpanError(DecodeError):
    """A span that does not lie in its video, which may itself be good."""

    def __init__(self, path: str, reason: str, span: Span) -> None:
        super().__init__(path, reason)
        self.span = span

    def __reduce__(self) -> tuple[type[SpanError], tuple[str, str, Span]]:  # type: ignore[override]
        return (type(self), (self.path, self.reason, self.span))


def located_error(path: str, reason: str, span: Span) -> DecodeError:
    """Return the error of a span, or of the whole file."""
    return DecodeError(path, reason) if span == WHOLE else SpanError(path, reason, span)


def span_of(error: DecodeError) -> Span:
    """Return the span that is bad; WHOLE where it is the file, and with it all of its spans."""
    return error.span if isinstance(error, SpanError) else WHOLE
