"""Find the boxes of whole videos, frame by frame: each video once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from summit_train.data.batches.loader import FrameBlock, whole_videos
from summit_train.data.manifest.boxes import Boxes
from summit_train.data.video.source import DecodeError
from summit_train.detection.detect import detect
from summit_train.detection.detections import Detections
from summit_train.detection.measures import BOX
from summit_train.evaluation.scoring import Results, Scorer, Streamer, unreadable

COLUMNS = 7  # frame, label, score, left, top, right, bottom


class DetectionScorer(Scorer):
    """Finds the boxes of every frame of the videos, as a stream sees them: with the frames before, without later ones.

    The result of a video is float32 (n, 7), see Detections. Maps that are not finite give a row of NaN.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        return (0, COLUMNS)

    def _results(self, model: nn.Module, videos: Sequence[int]) -> Results:
        spec, manifest, boxes = self.spec, self.dataset.manifest, self.dataset.manifest.boxes
        assert boxes is not None
        streamer = Streamer(model, spec, self.device)
        for video in whole_videos(spec.data, spec.evaluate, self.dataset.store, videos, np.arange):
            caches: list[torch.Tensor] = []
            found = [np.zeros((0, COLUMNS), np.float32)]
            try:
                for block in video.blocks():
                    if (problem := boxes.problem(video.video, block.num_frames, *block.size)) is not None:
                        raise DecodeError(manifest.path(video.video), problem)
                    caches = self._add(found, streamer, block, caches)
            except DecodeError as error:
                yield unreadable(video, error, spec.data)
            else:
                yield np.concatenate(found)

    def _add(
        self, found: list[NDArray[np.float32]], streamer: Streamer, block: FrameBlock, caches: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Add the boxes of a block's frames to `found`, in pixels of the stored frame; return the caches after them."""
        detector = self.spec.model.detector
        assert detector is not None
        height, width = block.views.shape[2:4]
        scale = np.array([block.size[0] / width, block.size[1] / height] * 2, np.float32)
        for place, number in enumerate(block.numbers.tolist()):
            frame_NCHW = streamer.normalise(block.views[:, place : place + 1])[:, 0]
            maps, caches = streamer.network(frame_NCHW, caches)
            (boxes,) = detect(maps.float(), (height, width), detector, self.spec.model.num_classes)
            rows = np.full((len(boxes), COLUMNS), number, np.float32)
            rows[:, 1:] = boxes.cpu().numpy()
            rows[:, BOX] *= scale
            found.append(rows if maps.isfinite().all() else np.full((1, COLUMNS), np.nan, np.float32))
        return caches

    def _gathered(
        self, clips: NDArray[np.int64], results: Sequence[NDArray[Any]], is_read: NDArray[np.bool_]
    ) -> Detections:
        boxes = self.dataset.manifest.boxes
        assert boxes is not None
        truth = [boxes.of(clip) for clip in clips.tolist()]
        ends, box_ends = (np.cumsum([0, *map(len, parts)], dtype=np.int64) for parts in (results, truth))
        rows = np.concatenate(results).astype(np.float32)
        true = Boxes(np.concatenate(truth), box_ends)
        return Detections(clips, is_read, rows, ends, true, self.spec.model.num_classes)
