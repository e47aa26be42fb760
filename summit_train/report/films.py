"""Frames of videos for a page: side by side in one picture, which the page's style plays frame by frame.

Without a script: where motion is not wanted, and on paper, the same picture shows all frames.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.data.dataset import Dataset
from summit_train.data.loading import Crop, Sample, Store, read_clip
from summit_train.data.manifest.clip import Clip
from summit_train.data.video.encode import jpeg
from summit_train.data.video.render import Frames
from summit_train.report.records import RunRecord
from summit_train.spec import spec_from_values

# A view of frames in the order of playing, (T, H, W, C), and its boxes, see Boxes.targets; None of a list without any.
Seen = tuple[Frames, list[NDArray[np.float32]] | None]


@dataclass(frozen=True)
class Film:
    """`count` frames of width x height pixels, as a data URI. Without any it is empty, and `reason` says why.

    stored_size: width and height of the video's upright frame.
    """

    uri: str = ""
    count: int = 0
    width: int = 0
    height: int = 0
    reason: str = ""
    stored_size: tuple[int, int] = (0, 0)


def film(frames: Frames) -> Film:
    """Return frames, uint8 (T, height, width, 3), or grey ones (T, height, width), as a film."""
    picture = base64.b64encode(jpeg(np.concatenate(list(frames), axis=1))).decode("ascii")
    count, height, width = frames.shape[:3]
    return Film(f"data:image/jpeg;base64,{picture}", count, width, height)


def seen(store: Store, sample: Sample, crop: Crop, clip: int) -> Seen:
    """Return the view of a clip in chosen frames. Raises DecodeError."""
    decoded = read_clip(store, clip, sample, crop)
    targets = decoded.targets(store.manifest, clip)
    return decoded.pixels[0], targets[0] if targets else None


class Videos:
    """The videos of a run's validation set, as far as they are on this machine."""

    def __init__(self, run: RunRecord) -> None:
        self._store: Store | None = None
        self._reason = ""
        try:
            spec = spec_from_values(dict(run.spec), str(run.path / "spec.yaml"))
            if spec.data.modality != "rgb":
                raise UserError("the network sees optical flow")
            self._store = Dataset.open(spec, "val").store
        except (UserError, OSError) as error:
            self._reason = str(error)

    def film(self, place: int, clip: Clip, sample: Sample, crop: Crop) -> Film:
        """Return chosen frames of the clip at this place of the set."""
        if self._store is None:
            return Film(reason=self._reason)
        listed = self._store.manifest
        try:
            if place >= len(listed) or clip != listed.clip(place):
                raise UserError(f"{listed.source}: has changed since the evaluation; {clip} is in another place")
            decoded = read_clip(self._store, place, sample, crop)
            return replace(film(decoded.pixels[0]), stored_size=decoded.size)
        except (UserError, OSError) as error:
            return Film(reason=str(error))
