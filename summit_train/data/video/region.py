"""A rectangle of the upright frame that is a clip's picture: a face, a mouth."""

from __future__ import annotations

from typing import NamedTuple

# Scaled to a short side of 256, a longer frame would have more than 16,384 pixels a side.
MAX_SIDE_RATIO = 64


class Region(NamedTuple):
    """left, top, width, height in pixels of the upright frame. All are 0 for WHOLE_FRAME, whatever its size."""

    left: int = 0
    top: int = 0
    width: int = 0
    height: int = 0

    def __str__(self) -> str:
        return f"{self.width} x {self.height} pixels at {self.left}, {self.top}"

    @property
    def cells(self) -> tuple[str, ...]:
        """The numbers as a list has them: nothing for the whole frame."""
        return tuple(str(number) if self != WHOLE_FRAME else "" for number in self)

    def problem(self, width: int, height: int) -> str | None:
        """Return why it does not fit a frame of this size, or None."""
        if self.left + self.width > width or self.top + self.height > height:
            return f"its region, {self}, exceeds the frame of {width} x {height}"
        if max(self.width, self.height) > MAX_SIDE_RATIO * min(self.width, self.height):
            return f"its region, {self}, is too narrow: its sides must be at most {MAX_SIDE_RATIO} to 1"
        return None


WHOLE_FRAME = Region()
