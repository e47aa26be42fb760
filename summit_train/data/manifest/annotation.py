"""What a list says of its clips besides their classes, such as where objects are. Only its task knows what that is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from summit_train.data.manifest.tables import Table
from summit_train.data.video.augment import View


class Annotation:
    """What a list says of its N clips. A clip is named by its place in the list, `clip`.

    task: the task that it is for. title: what it consists of, for people; header: the columns of a list that has it.
    types: of its columns, which a packed set keeps under these names. own_list: such a list has rows of its own format,
    not a row for each clip.
    """

    task: ClassVar[str]
    title: ClassVar[str]
    header: ClassVar[str]
    types: ClassVar[Mapping[str, Any]]
    own_list: ClassVar[bool] = False

    @classmethod
    def read(cls, source: Path, classes: tuple[str, ...] | None) -> tuple[Iterable[Table], Annotation] | None:
        """Read a CSV: the clips as tables, and what it says of them; None if it has none of that. Raises UserError."""
        raise NotImplementedError

    @classmethod
    def of_columns(cls, columns: Mapping[str, NDArray[Any]], num_clips: int, source: str) -> Annotation:
        """Return that of a packed set. Raises ValueError for columns that do not fit together."""
        raise NotImplementedError

    @classmethod
    def list_rows(cls, clips: Iterable[Any]) -> Iterator[Sequence[object]]:
        """Yield the rows of a list of its own format, its header first. clips: a reading.ManifestRow of each."""
        raise NotImplementedError

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """The columns of `types`: what the fingerprint of a list depends on, and what a packed set keeps."""
        raise NotImplementedError

    def only(self, clip: int) -> Annotation:
        """Return that of one clip."""
        raise NotImplementedError

    def cells(self) -> Mapping[str, object]:
        """Return the columns that it adds to the row of its one clip, in a list of the usual format."""
        return {}

    def clip_columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns of `reading.Manifest` that follow from it."""
        return {}

    def check_list(self, frame_counts: NDArray[np.int32]) -> None:
        """Raise UserError where it does not fit the numbers of frames that the list has, -1 where unknown."""

    def check_training(self, num_classes: int, class_names: Sequence[str]) -> None:
        """Raise UserError where a network cannot learn from it."""

    def check(self, clip: int, path: str | Path, num_frames: int, width: int, height: int) -> None:
        """Raise DecodeError where it does not fit the frames of the clip's video, `path`."""

    def num_frames(self) -> NDArray[np.int64]:
        """Return how many frames each video has at least, by its annotation."""
        raise NotImplementedError

    def cut(self, videos: NDArray[np.int64], starts: NDArray[np.int64]) -> Annotation:
        """Return that of spans, which begin at these frames of these videos, and end where the next one begins."""
        raise NotImplementedError

    def targets(self, clip: int, frames: NDArray[np.int64], view: View, size: tuple[int, int]) -> Any:
        """Return what a view shows of it in the frames (T,), by their numbers in the video.

        size: width and height of the frame that the view was made for.
        """
        raise NotImplementedError

    def drawn(self, frames: NDArray[np.uint8], targets: Any, places: Sequence[int], scale: float) -> NDArray[np.uint8]:
        """Return the frames at these places of a view, scaled, (n, H, W, 3), with its targets drawn into them."""
        return frames

    def stacked(self, targets: Sequence[Any]) -> NDArray[Any]:
        """Return the targets of n views as the array (n, ...) that the loss takes."""
        raise NotImplementedError
