"""The boxes of each frame, by a stream of a detector's maps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from summit_train.core.text import listed
from summit_train.data.video.encode import Drawn, with_boxes
from summit_train.data.video.render import Frames, Renderer, turn_in
from summit_train.data.video.stream import StreamFrame
from summit_train.detection.detect import detect
from summit_train.inference.stream.stream import Stream, Values, renderer
from summit_train.inference.trained import Trained
from summit_train.spec.detection import DetectorSpec

LEAST_SCORE = 0.5
_NAMED = 10  # boxes in a line of text


class BoxFinder:
    """Finds boxes frame by frame. names: of the classes. least_score: of the boxes that are shown."""

    about = "boxes"

    def __init__(
        self, stream: Stream, render: Renderer, names: Sequence[str], detector: DetectorSpec, least_score: float
    ) -> None:
        self._stream, self._render, self._names = stream, render, names
        self._detector, self._least_score = detector, least_score
        self._size = (0, 0)  # width and height of the first frame, upright

    def found(self, picture: Frames) -> torch.Tensor:
        """Take the next frame, uint8 RGB (H, W, 3), of one size each time; return the rows of `detect` of it."""
        height, width, _ = picture.shape
        (rows,) = detect(self._stream.see(picture), (height, width), self._detector, len(self._names))
        return rows[rows[:, 1] >= self._least_score]

    def see(self, frame: StreamFrame) -> Values:
        """Return the boxes, best first, in pixels of the upright frame; a frame of another size counts as the first."""
        if not any(self._size):
            self._size = turn_in(frame.decoded).size(frame.decoded.width, frame.decoded.height)
        (picture,) = self._render(frame.decoded)
        across, down = self._size[0] / picture.shape[1], self._size[1] / picture.shape[0]
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
        def drawn(label: int, name: str, score: float, left: float, top: float, width: float, height: float) -> Drawn:
            return label, f"{name} {score:.2f}", (left, top, left + width, top + height)

        return with_boxes(picture, [drawn(**box) for box in values["boxes"]])


def open_boxes(trained: Trained, device: torch.device, least_score: float) -> BoxFinder:
    """Return what finds boxes with a trained detector."""
    detector = trained.spec.model.detector
    assert detector is not None
    stream = Stream(trained.network(device, ready=False), device)
    return BoxFinder(stream, renderer(trained.spec), trained.classes, detector, least_score)
