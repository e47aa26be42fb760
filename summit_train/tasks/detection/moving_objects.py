"""The embedded data set for detection: shapes that move over a still background, with their boxes and tracks.

The class of an object is its shape; its colours, size, angle and path say nothing of it. For a few frames in mid-video
each object is a soft light spot, the same for all classes: only who remembers the frames before knows what it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.core.rng import key
from summit_train.data.motion import SHAPES, SPLITS, MotionSet, Picture, Thing, patches
from summit_train.tasks.detection.boxes import BOX, Boxes

MAX_OBJECTS = 3
# Pixels a frame over the object's width. The mean IoU with the same box up to ten frames away is then above 0.9 (slow),
# between 0.7 and 0.9, and below 0.7 (fast).
SPEEDS = ((0.0, 0.006), (0.012, 0.02), (0.045, 0.09))
HIDDEN_FRAMES = (3, 5)


@dataclass(frozen=True)
class MovingObjects(MotionSet):
    """The settings of the set, see MotionSet; `kind` is not used, num_classes are 2 to 4 shapes."""

    size: int = 96
    num_frames: int = 24

    def __post_init__(self) -> None:
        if not 2 <= self.num_classes <= len(SHAPES):
            raise UserError(f"classes is {self.num_classes}: choose 2 to {len(SHAPES)} shapes")
        if self.size < 48 or self.num_frames < 12:
            raise UserError(f"size {self.size}, {self.num_frames} frames: boxes need 48 pixels and 12 frames or more")
        super().__post_init__()

    @property
    def classes(self) -> tuple[str, ...]:
        return SHAPES[: self.num_classes]

    def video(self, split: str, number: int) -> tuple[NDArray[np.uint8], Boxes]:
        """Return video `number` of a split, uint8 RGB (T, size, size, 3), and its boxes; first labels take turns."""
        generator = key(self.seed, "motion", SPLITS.index(split), number)
        still = 110 + (12 + 70 * self.difficulty) * patches(self.size, generator)
        count = int(generator.integers(1, MAX_OBJECTS + 1))
        labels = [number % self.num_classes, *generator.integers(self.num_classes, size=count - 1).tolist()]
        objects = [_Object(self, self.classes[label], generator) for label in labels]
        frames, rows = np.empty((self.num_frames, *still.shape)), np.zeros((self.num_frames, count), BOX)
        for frame in range(self.num_frames):
            frames[frame] = still
            for track, (one, label) in enumerate(zip(objects, labels, strict=True)):
                frames[frame] = one.drawn(frames[frame], frame)
                box = [*(one.places[frame] - one.half_side), *(one.places[frame] + one.half_side)]
                rows[frame, track] = (frame, track, label, box, False, frame in one.hidden)
        return self.noisy(frames, generator), Boxes(rows.ravel(), np.array([0, rows.size]))


class _Object(Thing):
    """An object on its way. places: x and y of its centre in each frame, (T, 2); 0 is the edge of the first pixel."""

    def __init__(self, videos: MovingObjects, shape: str, generator: np.random.Generator) -> None:
        super().__init__(videos.size * generator.uniform(0.1, 0.16), generator, shape=shape)
        angle = generator.uniform(0, 2 * np.pi)
        low, high = SPEEDS[int(generator.integers(len(SPEEDS)))]
        step = 2 * self.half_side * generator.uniform(low, high) * np.array([np.cos(angle), np.sin(angle)])
        free = videos.size - 2 * self.half_side
        way = generator.uniform(0, free, 2) + np.arange(videos.num_frames)[:, None] * step
        # It turns back at the sides of the picture.
        self.places = self.half_side + free - np.abs(way % (2 * free) - free)
        length = int(generator.integers(HIDDEN_FRAMES[0], HIDDEN_FRAMES[1] + 1))
        first = int(generator.integers(videos.num_frames // 3, videos.num_frames // 2 + 1))
        self.hidden = range(first, first + length)

    def drawn(self, picture: Picture, frame: int) -> Picture:
        """Draw the object as it is in a frame onto a copy of the picture."""
        x, y = self.places[frame] - 0.5  # from edges of pixels to their centres
        if frame not in self.hidden:
            return self.over(picture, x, y)
        rows, columns = np.mgrid[: len(picture), : len(picture)]
        distance = np.hypot(columns - x, rows - y) / self.half_side
        return np.asarray(picture + (200 - picture) * 0.8 * np.clip(1 - distance**2, 0, 1)[..., None])
