"""A copy of a streamed video with the current label drawn on it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from types import TracebackType

from summit_train.core.errors import UserError
from summit_train.data.video.augment import View
from summit_train.data.video.caption import with_caption
from summit_train.data.video.encode import Encoding, VideoWriter, open_writer
from summit_train.data.video.render import Renderer
from summit_train.data.video.stream import Reading, StreamFrame

_ENDINGS = (".mp4", ".mkv", ".mov")
# The times of a stream's frames need not be multiples of anything.
_TICK = Fraction(1, 90_000)


class Show:
    """Writes upright frames with a caption, one by one; the file appears when the block ends, in its name and place.

    path: checked at once; raises UserError where no video can be written. source: the streamed file, which it must not
    be. The video has the size of the first frame, and of each frame its time.
    """

    def __init__(self, path: str | os.PathLike[str], source: str, reading: Reading) -> None:
        self._path, self._reading = Path(path), reading
        check_writable(self._path, source)
        self._render = Renderer(lambda width, height: [View(width, height, 0, 0, width, height)])
        self._open = ExitStack()
        self._writer: VideoWriter | None = None
        self._last = -1

    def __enter__(self) -> Show:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def add(self, frame: StreamFrame, text: str) -> None:
        """Write a frame with this caption."""
        picture = self._render(frame.decoded)[0]
        if self._writer is None:
            size = (picture.shape[1], picture.shape[0])
            how = Encoding(tick=_TICK)
            self._writer = self._open.enter_context(open_writer(self._path, size, self._reading.fps, how))
        # A container may give two frames one time.
        self._last = max(round(frame.seconds / _TICK), self._last + 1)
        self._writer.add(with_caption(picture, text), self._last)


def check_writable(path: Path, source: str) -> None:
    """Raise UserError where a video cannot be written to `path`, or it is the source."""
    if path.suffix.lower() not in _ENDINGS:
        raise UserError(f"{path}: a video is written as {', '.join(_ENDINGS)}")
    if path.is_dir():
        raise UserError(f"{path}: is a folder; the name of a video is wanted")
    if path.exists() and os.path.exists(source) and os.path.samefile(path, source):
        raise UserError(f"{path}: is the video that is streamed; write to another one")
    trial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
