"""A clip that is a part of its video, and the error of a video, or of a part of one, that cannot be read."""

from __future__ import annotations

import os
from typing import NamedTuple

from summit_train.core.errors import UserError
from summit_train.data.video.region import WHOLE_FRAME, Region

TO_THE_END = -1


class Span(NamedTuple):
    """The frames start .. end - 1 of a video; TO_THE_END: all from `start` on. Within it frames are numbered from 0."""

    start: int = 0
    end: int = TO_THE_END

    def __str__(self) -> str:
        return f"{self.start}:{'' if self.end == TO_THE_END else self.end}"

    @property
    def cells(self) -> tuple[str, str]:
        """The start and the end as a list has them: nothing for the video's own."""
        return str(self.start or ""), "" if self.end == TO_THE_END else str(self.end)

    def frames(self, video: str, video_frames: int) -> range:
        """Return the numbers of its frames in a video of `video_frames`. Raises DecodeError if one lies outside."""
        end = video_frames if self.end == TO_THE_END else self.end
        if not self.start < end <= video_frames:
            raise DecodeError(video, f"has {video_frames} frames, and the span {self} does not lie among them", self)
        return range(self.start, end)


WHOLE = Span()


class DecodeError(UserError):
    """A video that cannot be read: its path and why.

    span, region: the bad part; WHOLE and WHOLE_FRAME mean all spans and all regions of the file.
    """

    def __init__(
        self, path: str | os.PathLike[str], reason: str, span: Span = WHOLE, region: Region = WHOLE_FRAME
    ) -> None:
        super().__init__(f"{os.fspath(path)}: {reason}")
        self.path = os.fspath(path)
        self.reason = reason
        self.span = span
        self.region = region

    def __reduce__(self) -> tuple[type[DecodeError], tuple[str, str, Span, Region]]:
        # The default would call DecodeError(message) when a worker process sends the error home.
        return type(self), (self.path, self.reason, self.span, self.region)
