"""The boxes of each frame, by a stream of a detector's maps."""

from __future__ import annotations

from operator import itemgetter

import torch

from summit_train.core.text import listed
from summit_train.data.video.encode import with_areas
from summit_train.data.video.render import Frames, upright_size
from summit_train.data.video.stream import StreamFrame
from summit_train.inference.stream.stream import Stream, Values
from summit_train.inference.trained import Trained
from summit_train.tasks.detection.detect import detect

LEAST_SCORE = 0.5
_NAMED = 10  # boxes in a line of text


class BoxFinder(Stream):
    """Finds boxes frame by frame. least_score: of the boxes that are shown."""

    about = "boxes"

    def __init__(self, trained: Trained, device: torch.device, least_score: float | None = None) -> None:
        super().__init__(trained, device)
        assert trained.spec.model.detector is not None
        self._detector = trained.spec.model.detector
        self._num_classes = trained.spec.model.num_classes
        self._least_score = LEAST_SCORE if least_score is None else least_score
        self._size = (0, 0)  # width and height of the first frame, upright

    def found(self, picture: Frames) -> torch.Tensor:
        """Take the next frame, uint8 RGB (H, W, 3), of one size each time; return the rows of `detect` of it."""
        height, width, _ = picture.shape
        (rows,) = detect(self.output(picture), (height, width), self._detector, self._num_classes)
        return rows[rows[:, 1] >= self._least_score]

    def see(self, frame: StreamFrame) -> Values:
        """Return the boxes, best first, in pixels of the upright frame; a frame of another size counts as the first."""
        if not any(self._size):
            self._size = upright_size(frame.decoded)
        picture = self.picture(frame)
        across = self._size[0] / picture.shape[1]
        down = self._size[1] / picture.shape[0]
        boxes = []
        for label, score, left, top, right, bottom in self.found(picture).tolist():
            places = (left * across, top * down, (right - left) * across, (bottom - top) * down)
            box = {"label": int(label), "name": self._names[int(label)], "score": round(score, 6)}
            edges = zip(("left", "top", "width", "height"), places, strict=True)
            boxes.append(box | {key: round(place, 3) for key, place in edges})
        return {"boxes": boxes}

    def key(self, values: Values) -> object:
        return sorted(box["label"] for box in values["boxes"])

    def text(self, values: Values) -> str:
        return listed([f"{box['name']} {box['score']:.2f}" for box in values["boxes"]], _NAMED) or "no box"

    def draw(self, picture: Frames, values: Values) -> Frames:
        place = itemgetter("left", "top", "width", "height")
        boxes = [(box["label"], f"{box['name']} {box['score']:.2f}", place(box)) for box in values["boxes"]]
        return with_areas(picture, boxes)
