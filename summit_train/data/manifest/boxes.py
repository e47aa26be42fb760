"""The boxes of a list of videos: which object is where, in which frame."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# One box of one frame, in pixels of the upright frame as it is stored: left and top are the edges of the first pixel,
# right and bottom those behind the last one. track: the same for an object in all frames of its video. label: from 0.
# ignored: neither finding nor missing it is an error. hidden: it can hardly be seen in this frame alone.
BOX = np.dtype(
    [
        ("frame", "<i4"),
        ("track", "<i4"),
        ("label", "<i4"),
        ("box", "<f4", (4,)),
        ("ignored", "?"),
        ("hidden", "?"),
    ]
)


@dataclass(frozen=True, eq=False)
class Boxes:
    """The boxes of V videos. rows: (B,) of BOX, by video, in it by frame. ends: int64 (V + 1,), 0 first.

    Video v has rows[ends[v]:ends[v + 1]].
    """

    rows: NDArray[np.void]
    ends: NDArray[np.int64]

    def of(self, video: int) -> NDArray[np.void]:
        return self.rows[self.ends[video] : self.ends[video + 1]]
