"""The embedded data set: small real videos whose class is the motion, so that a single frame tells nothing.

Kind "direction": a textured object crosses a still background on a torus, in one of evenly spaced directions. It starts
at a random place and wraps around, so its place is uniform in every frame. Kind "order": coloured objects flash one
after the other; the class is the order of the colours. Without the order of the frames all classes look the same.

Every frame is a key frame: between key frames an encoder leaves traces of the motion in single frames.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.core.rng import key
from summit_train.data.manifest import ManifestRow, write_manifest
from summit_train.data.manifest.reading import write_classes
from summit_train.data.video.encode import write_video

if TYPE_CHECKING:
    from summit_train.tasks.detection.boxes import Boxes

KINDS = ("direction", "order")
SPLITS = ("train", "val")
MAX_DIRECTIONS = 8
FPS = 25
_COMPASS: dict[float, str] = {
    0: "right", 45: "up-right", 90: "up", 135: "up-left",
    180: "left", 225: "down-left", 270: "down", 315: "down-right",
}  # fmt: skip
_COLOURS = {"red": (230, 40, 40), "blue": (40, 70, 240), "green": (40, 200, 60)}
SHAPES = ("disc", "square", "ring", "cross")

Picture = NDArray[np.float64]


@dataclass(frozen=True)
class MotionSet:
    """The settings of the set. Raises UserError for values out of range.

    size: pixels of a side; num_frames: of a video; num_classes: 2 to 8 directions, or 2 or 6 orders (of two or three
    colours); kind: of KINDS; difficulty: 0 to 1, more of it means more noise, a stronger background, more still objects
    in the way, a smaller object and a wider range of speeds.
    """

    size: int = 64
    num_frames: int = 16
    num_classes: int = 4
    seed: int = 0
    kind: str = "direction"
    difficulty: float = 0.2

    def __post_init__(self) -> None:
        if self.kind == "direction" and not 2 <= self.num_classes <= MAX_DIRECTIONS:
            raise UserError(f"classes is {self.num_classes}: choose 2 to {MAX_DIRECTIONS} directions")
        if self.kind == "order" and self.num_classes not in (2, 6):
            raise UserError(f"classes is {self.num_classes}: choose 2 or 6, orders of two or three colours")
        if self.size < 16 or self.num_frames < 4:
            raise UserError(f"size {self.size}, {self.num_frames} frames: needs 16 pixels and 4 frames or more")
        if not 0 <= self.difficulty <= 1:
            raise UserError(f"difficulty is {self.difficulty}: choose a number from 0 to 1")

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes' names, label by label."""
        if self.kind == "order":
            return tuple(map("-".join, permutations(list(_COLOURS)[: 2 if self.num_classes == 2 else 3])))
        angles = [360 * label / self.num_classes for label in range(self.num_classes)]
        return tuple(_COMPASS.get(angle, f"{angle:.0f} degrees") for angle in angles)

    def video(self, split: str, number: int) -> tuple[NDArray[np.uint8], int | Boxes]:
        """Return video `number` of a split: uint8 RGB (T, size, size, 3) and its label; labels take turns.

        Moving objects have boxes in place of the label.
        """
        generator = key(self.seed, "motion", SPLITS.index(split), number)
        label = number % self.num_classes
        still = self._still(generator)
        if self.kind == "direction":
            frames = self._moving(still, 2 * math.pi * label / self.num_classes, generator)
        else:
            frames = self._flashing(still, self.classes[label].split("-"), generator)
        return self.noisy(frames, generator), label

    def noisy(self, frames: Picture, generator: np.random.Generator) -> NDArray[np.uint8]:
        noise = generator.normal(0, 2 + 28 * self.difficulty, frames.shape)
        return np.clip(np.rint(frames + noise), 0, 255).astype(np.uint8)

    def _still(self, generator: np.random.Generator) -> Picture:
        """Return a background of soft colour patches with still objects on it: (size, size, 3)."""
        picture = 110 + (12 + 70 * self.difficulty) * patches(self.size, generator)
        for _ in range(generator.binomial(6, self.difficulty / 2)):
            thing = Thing(self.size * generator.uniform(0.05, 0.1), generator)
            picture = thing.over(picture, *generator.uniform(0, self.size, 2))
        return picture

    def _radius(self, generator: np.random.Generator) -> float:
        return self.size * generator.uniform(0.2, 0.26) * (1 - 0.4 * self.difficulty)

    def _moving(self, still: Picture, angle: float, generator: np.random.Generator) -> Picture:
        """Return frames of one object that moves at `angle`, counterclockwise from the right: (T, size, size, 3)."""
        thing = Thing(self._radius(generator), generator)
        x, y = generator.uniform(0, self.size, 2)
        # About half the picture in a video of 16 frames: 1.5 to 3 pixels a frame at 64 pixels.
        low, high = 0.035 - 0.012 * self.difficulty, 0.04 + 0.02 * self.difficulty
        speed = self.size * generator.uniform(low, high) * 16 / max(16, self.num_frames)
        steps = speed * np.arange(self.num_frames)
        places = zip(x + steps * math.cos(angle), y - steps * math.sin(angle), strict=True)
        return np.stack([thing.over(still, *place) for place in places])

    def _flashing(self, still: Picture, order: Sequence[str], generator: np.random.Generator) -> Picture:
        """Return frames in which objects appear in turn, in the colours of `order`: (T, size, size, 3)."""
        frames = np.repeat(still[None], self.num_frames, axis=0)
        slot = self.num_frames / len(order)
        for turn, colour in enumerate(order):
            thing = Thing(self._radius(generator), generator, _COLOURS[colour])
            place = generator.uniform(0, self.size, 2)
            # Every turn draws alike: without their order the frames are the same in every class.
            length = max(1, round(slot * generator.uniform(0.5, 0.9)))
            start = round(turn * slot) + generator.integers(0, max(1, int(slot) - length + 1))
            frames[start : start + length] = thing.over(still, *place)
        return frames


class Thing:
    """A random shape with two-coloured stripes, turned by a random angle."""

    def __init__(
        self,
        radius: float,
        generator: np.random.Generator,
        colour: tuple[int, int, int] | None = None,
        shape: str | None = None,
    ) -> None:
        self.radius = radius
        self.shape = shape or SHAPES[generator.integers(len(SHAPES))]
        self.angle = generator.uniform(0, 2 * math.pi)
        self.colours = generator.uniform(0, 255, (2, 3))
        if colour is not None:
            self.colours = np.array([colour, 0.7 * np.array(colour)])

    def over(self, picture: Picture, x: float, y: float) -> Picture:
        """Draw the thing at (x, y) onto a copy of the picture, wrapped around at the sides."""
        size = len(picture)
        rows, columns = np.mgrid[:size, :size]
        right, down = ((axis - at + size / 2) % size - size / 2 for axis, at in ((columns, x), (rows, y)))
        along = right * math.cos(self.angle) + down * math.sin(self.angle)
        across = down * math.cos(self.angle) - right * math.sin(self.angle)
        # One pixel of soft edge: positions between the pixels differ.
        cover = np.clip(0.5 - self._outside(along, across), 0, 1)[..., None]
        stripe = np.clip(0.5 + 2 * np.sin(2 * math.pi * along / self.radius), 0, 1)[..., None]
        paint = self.colours[0] * stripe + self.colours[1] * (1 - stripe)
        return np.asarray(picture * (1 - cover) + paint * cover)

    @property
    def half_side(self) -> float:
        """Return half the side of the upright square around the thing."""
        c, s = abs(math.cos(self.angle)), abs(math.sin(self.angle))
        if self.shape == "square":
            return 0.85 * self.radius * (c + s)
        return self.radius * (max(c + 0.35 * s, 0.35 * c + s) if self.shape == "cross" else 1)

    def _outside(self, along: Picture, across: Picture) -> Picture:
        """Return the distance from the shape's edge in pixels, negative inside."""
        radius, u, v = self.radius, np.abs(along), np.abs(across)
        if self.shape == "disc":
            return np.hypot(u, v) - radius
        if self.shape == "ring":
            return np.abs(np.hypot(u, v) - 0.7 * radius) - 0.3 * radius
        if self.shape == "square":
            return np.maximum(u, v) - 0.85 * radius
        return np.maximum(np.maximum(u, v) - radius, np.minimum(u, v) - 0.35 * radius)  # cross


def patches(size: int, generator: np.random.Generator) -> Picture:
    """Return random colours on a grid of 6 x 6 cells, interpolated between its points: (size, size, 3), -1 to 1."""
    picture = generator.uniform(-1, 1, (7, 7, 3))
    at = np.linspace(0, 6, size, endpoint=False)
    low, part = at.astype(int), (at % 1)[:, None, None]
    for _ in range(2):  # along the rows, then along the columns
        picture = (picture[low] * (1 - part) + picture[low + 1] * part).swapaxes(0, 1)
    return picture


def write_motion_set(out: str | Path, num_train: int, num_val: int, videos: MotionSet) -> Iterator[ManifestRow]:
    """Write out/videos/*.mp4, out/train.csv, out/val.csv, out/classes.txt; yield each row when its video exists.

    Paths in the manifests are relative to `out`; the classes' counts differ by one at most, of moving objects those of
    the first in each video. The same arguments write the same bytes. A manifest appears after all of its videos. Raises
    UserError for fewer videos than classes.
    """
    if min(num_train, num_val) < (least := videos.num_classes):
        raise UserError(f"train {num_train}, val {num_val}: each needs one video a class at least, {least}")
    folder = Path(out)
    (folder / "videos").mkdir(parents=True, exist_ok=True)
    write_classes(folder, videos.classes)
    for split, count in zip(SPLITS, (num_train, num_val), strict=True):
        rows = []
        for number in range(count):
            frames, truth = videos.video(split, number)
            path = f"videos/{split}_{number:06d}.mp4"
            write_video(folder / path, frames, FPS, quality=12, key_every=1, b_frames=0)
            label, boxes = (truth, None) if isinstance(truth, int) else (";", truth)
            rows.append(ManifestRow(path, label, len(frames), boxes=boxes))
            yield rows[-1]
        write_manifest(folder / f"{split}.csv", rows)
