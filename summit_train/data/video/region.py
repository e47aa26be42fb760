"""A rectangle of the upright frame that is a clip's picture: a face, a mouth."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from summit_train.data.video.augment import View
from summit_train.data.video.render import ViewsOf
from summit_train.data.video.source import MAX_SIDE_RATIO, DecodeError


class Region(NamedTuple):
    """left, top, width, height in pixels of the upright frame."""

    left: int
    top: int
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width} x {self.height} pixels at {self.left}, {self.top}"

    def problem(self, width: int, height: int) -> str | None:
        """Return why it is no region of a frame of this size, or None."""
        if self.left + self.width > width or self.top + self.height > height:
            return f"its region, {self}, exceeds the frame of {width} x {height}"
        if max(self.width, self.height) > MAX_SIDE_RATIO * min(self.width, self.height):
            return f"its region, {self}, is too narrow: its sides must be at most {MAX_SIDE_RATIO} to 1"
        return None

    def seen_by(self, views_of: ViewsOf, video: str, place: str) -> ViewsOf:
        """Return the views that `views_of` gives of a frame of the region's size, as views of the region.

        They raise DecodeError, which names the video and the `place` of its line, for a frame that lacks the region.
        """

        def views(width: int, height: int) -> list[View]:
            if (problem := self.problem(width, height)) is not None:
                raise DecodeError(video, f"{problem} ({place})")
            return [replace(view, region=self) for view in views_of(self.width, self.height)]

        return views
