"""What is known of a video without a decoder: the error, the facts, and how they add up frame by frame."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from summit_train.errors import UserError


class DecodeError(UserError, ValueError):
    """A video that cannot be read; `path` and `reason` say which and why."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(f"{os.fspath(path)}: {reason}")
        self.path = os.fspath(path)
        self.reason = reason

    def __reduce__(self) -> tuple[type[DecodeError], tuple[str, str]]:
        # The default would call DecodeError(message) when a worker process sends the error home.
        return (type(self), (self.path, self.reason))


@dataclass(frozen=True)
class Encoded:
    """A video as it is stored: its bytes, and what messages call it; or without them the file of that name.

    Bytes are decoded as the file would be: a format that the bytes leave open is told by the ending of `name`.
    """

    name: str
    content: bytes | None = None

    @classmethod
    def of(cls, video: AnyVideo) -> Encoded:
        """The same, also of a path."""
        return video if isinstance(video, Encoded) else cls(os.fspath(video))

    def check(self) -> None:
        """Raise DecodeError where there is nothing to decode."""
        if self.content is None:
            check_regular_file(self.name)
        elif not self.content:
            raise DecodeError(self.name, "is empty")


AnyVideo: TypeAlias = "Encoded | str | os.PathLike[str]"


@dataclass(frozen=True)
class VideoInfo:
    """What a full decode found.

    width and height are of the upright picture, in pixels; duration in seconds spans the decoded frames, None
    where they carry no times; rotation is the display matrix's, in degrees counterclockwise.
    """

    num_frames: int
    fps: float | None
    width: int
    height: int
    duration: float | None
    codec: str
    rotation: int


def check_regular_file(path: str) -> None:
    """Raise DecodeError for what is no file with something in it: FFmpeg would wait for ever on a FIFO."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise DecodeError(path, error.strerror or str(error)) from error
    except ValueError as error:  # a zero byte in the name
        raise DecodeError(path, str(error)) from error
    if stat.S_ISDIR(status.st_mode):
        raise DecodeError(path, "is a directory, not a video file")
    if not stat.S_ISREG(status.st_mode):
        raise DecodeError(path, "is not a regular file")
    if status.st_size == 0:
        raise DecodeError(path, "is empty")


class Tally:
    """The facts of a full decode as they come in, and the first damage met."""

    def __init__(self, time_base: Fraction | None) -> None:
        self._time_base = time_base
        self._times: list[int] = []
        self._last_duration = 0
        self.num_frames = 0
        self.damage: str | None = None

    def add(self, time: int | None, duration: int, is_damaged: bool) -> None:
        """One decoded frame: its presentation time and duration in units of the time base."""
        if is_damaged:
            self.damaged(f"frame {self.num_frames} is damaged")
        if time is not None:
            self._times.append(time)
            self._last_duration = duration
        self.num_frames += 1

    def damaged(self, reason: str) -> None:
        """Note damage; what comes first is what is told."""
        self.damage = self.damage or reason

    @property
    def duration(self) -> float | None:
        """Seconds from the first frame's start to the last one's end (where not said, a mean interval on)."""
        if not self._times or not self._time_base:
            return None
        span = max(self._times) - min(self._times)
        last = self._last_duration or Fraction(span, max(1, len(self._times) - 1))
        return float((span + last) * self._time_base) or None
