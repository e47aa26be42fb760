"""Frames of videos for a page: side by side in one picture, which the page's style plays frame by frame.

Without a script: where motion is not wanted, and on paper, the same picture shows all frames.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import UserError
from summit_train.data.batches.stores import Store
from summit_train.data.dataset import Dataset
from summit_train.data.manifest.clip import Clip
from summit_train.data.video.clips import Choose, Frames, ViewsOf
from summit_train.data.video.encode import jpeg
from summit_train.report.records import RunRecord
from summit_train.spec import spec_from_values

# A view of frames in the order of playing, (T, H, W, C), and its boxes, see Boxes.targets; None of a list without any.
Seen = tuple[Frames, list[NDArray[np.float32]] | None]


@dataclass(frozen=True)
class Film:
    """`count` frames of width x height pixels, as a data URI. Without any it is empty, and `reason` says why."""

    uri: str = ""
    count: int = 0
    width: int = 0
    height: int = 0
    reason: str = ""


def film(frames: Frames) -> Film:
    """Return frames, uint8 (T, height, width, 3), or grey ones (T, height, width), as a film."""
    picture = base64.b64encode(jpeg(np.concatenate(list(frames), axis=1))).decode("ascii")
    count, height, width = frames.shape[:3]
    return Film(f"data:image/jpeg;base64,{picture}", count, width, height)


def seen(store: Store, frames_of: Choose, views_of: ViewsOf, clip: int) -> Seen:
    """Return the view of a clip in chosen frames. Raises DecodeError."""
    manifest = store.manifest

    def choose(number: int) -> NDArray[np.int64]:
        return number - 1 - frames_of(number) if manifest.is_reversed(clip) else frames_of(number)

    read = store.read_views(clip, choose, views_of)
    if manifest.boxes is None:
        return read.views[0], None
    start = manifest.span(clip).start
    manifest.boxes.check(clip, manifest.path(clip), start + read.num_frames, *read.size)
    return read.views[0], manifest.boxes.targets(clip, start + read.frames[0], read.crops[0], read.size)


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

    def film(self, place: int, clip: Clip, frames_of: Choose, views_of: ViewsOf) -> Film:
        """Return chosen frames of the clip at this place of the set."""
        if self._store is None:
            return Film(reason=self._reason)
        listed = self._store.manifest
        try:
            if place >= len(listed) or clip != listed.clip(place):
                raise UserError(f"{listed.source}: has changed since the evaluation; {clip} is in another place")
            return film(seen(self._store, frames_of, views_of, place)[0])
        except (UserError, OSError) as error:
            return Film(reason=str(error))
