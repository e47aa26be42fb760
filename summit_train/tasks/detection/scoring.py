"""Find the boxes of whole videos, frame by frame: each video once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from summit_train.data.batches.loader import WholeVideo
from summit_train.evaluation.scoring import Results, Streamer, VideoScorer
from summit_train.tasks.detection.boxes import Boxes
from summit_train.tasks.detection.detect import detect
from summit_train.tasks.detection.detections import Detections
from summit_train.tasks.detection.measures import BOX, COLUMNS


class DetectionScorer(VideoScorer[Detections]):
    """Finds the boxes of every frame of the videos, as a stream sees them: with the frames before, without later ones.

    The result of a video is float32 (n, 7), see Detections. Maps that are not finite give a row of NaN.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        return (0, COLUMNS)

    def results(self, model: nn.Module, videos: Sequence[int]) -> Results:
        yield from self.each_video(videos, np.arange, partial(self._detect, Streamer(model, self.spec, self.device)))

    @property
    def _truth(self) -> Boxes:
        boxes = self.dataset.manifest.boxes
        assert isinstance(boxes, Boxes)
        return boxes

    def _detect(self, streamer: Streamer, video: WholeVideo) -> Results:
        model = self.spec.model
        path = self.dataset.manifest.path(video.video)
        assert model.detector is not None
        caches: list[torch.Tensor] = []
        found = [np.zeros((0, COLUMNS), np.float32)]
        for block in video.blocks():
            self._truth.check(video.video, path, block.num_frames, *block.size)
            height, width = block.views.shape[2:4]
            for place, number in enumerate(block.numbers.tolist()):
                frame_NCHW = streamer.normalise(block.views[:, place : place + 1])[:, 0]
                maps, caches = streamer.network(frame_NCHW, caches)
                (boxes,) = detect(maps.float(), (height, width), model.detector, model.num_classes)
                rows = np.full((len(boxes), COLUMNS), number, np.float32)
                rows[:, 1:] = boxes.cpu().numpy()
                rows[:, BOX] *= np.array([block.size[0] / width, block.size[1] / height] * 2, np.float32)
                found.append(rows if maps.isfinite().all() else np.full((1, COLUMNS), np.nan, np.float32))
            yield None
        yield np.concatenate(found)

    def gathered(
        self, clips: NDArray[np.int64], results: Sequence[NDArray[Any]], is_read: NDArray[np.bool_]
    ) -> Detections:
        truth = [self._truth.of(clip) for clip in clips.tolist()]
        ends, box_ends = (np.cumsum([0, *map(len, parts)], dtype=np.int64) for parts in (results, truth))
        rows = np.concatenate(results).astype(np.float32)
        true = Boxes(np.concatenate(truth), box_ends)
        return Detections(clips, is_read, rows, ends, true, self.spec.model.num_classes)
