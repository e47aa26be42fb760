"""The frames of a video one by one, in presentation order: of a file, of a pipe, or raw.

Only the current frame is held, so the memory does not grow with the video. What is damaged is left out, counted and
named; the frames after it follow.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from io import RawIOBase
from itertools import count

import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from summit_train.data.video.decode import USUAL_FPS as USUAL_FPS
from summit_train.data.video.decode import Reading as Reading
from summit_train.data.video.decode import check_end, error_log, every_frame, open_source, open_video, read_log
from summit_train.data.video.source import Budget, DecodeError, Encoded, Limits

PIPE = "standard input"
_ENDLESS = Limits(packets=sys.maxsize, seconds=math.inf)
_NO_PIPE = "its index is at the end, which only a file can be searched for; pipe matroska, mpegts or fragmented mp4"


@dataclass(frozen=True)
class StreamFrame:
    """One whole frame.

    number: from 0, in presentation order; damaged frames have theirs. seconds: since the first frame, as the container
    says. arrived: time.monotonic() when it was decoded. decoded: what a Renderer takes.
    """

    number: int
    seconds: float
    arrived: float
    decoded: VideoFrame


def file_frames(path: str, reading: Reading) -> Iterator[StreamFrame]:
    """Yield the whole frames of a video file. Raises DecodeError if none can be read."""
    video, budget = Encoded(path), Budget(path, _ENDLESS)
    # The log starts before the opening, which reads a short file to its end.
    with error_log() as log, open_video(video, budget) as (container, stream):
        yield from _whole_frames(container, stream, log, budget, reading)
        check_end(container, stream, reading)
    if reading.num_frames == reading.num_damaged:
        raise DecodeError(path, reading.damage or "no frame can be decoded")


def pipe_frames(file: RawIOBase, reading: Reading) -> Iterator[StreamFrame]:
    """Yield the whole frames of a container that arrives by a pipe. Raises DecodeError if none can be read."""
    budget, pipe = Budget(PIPE, _ENDLESS), _Pipe(file)
    try:
        with error_log() as log, open_source(PIPE, pipe, budget) as (container, stream):
            yield from _whole_frames(container, stream, log, budget, reading)
        if reading.num_frames == reading.num_damaged:
            raise DecodeError(PIPE, reading.damage or "no frame can be decoded")
    except DecodeError as error:
        if pipe.head[4:8] == b"ftyp" and not reading.num_frames:
            raise DecodeError(PIPE, f"no frame of this mp4 can be read: it is damaged, or {_NO_PIPE}") from error
        raise DecodeError(PIPE, error.reason if pipe.head else "is empty") from error
    finally:
        if pipe.is_interrupted:
            raise KeyboardInterrupt


def raw_frames(file: RawIOBase, size: tuple[int, int], fps: Fraction, reading: Reading) -> Iterator[StreamFrame]:
    """Yield frames that arrive as raw RGB pictures of this (width, height), three bytes a pixel.

    Raises DecodeError if there are none, or for a size that a frame cannot have.
    """
    width, height = size
    Budget(PIPE, _ENDLESS).size(width, height)
    reading.fps, num_bytes = fps, width * height * 3
    for number in count():
        content, filled = bytearray(num_bytes), 0
        while filled < num_bytes and (more := file.readinto(memoryview(content)[filled:])):
            filled += more
        if filled < num_bytes:
            break
        reading.num_frames += 1
        picture = np.frombuffer(content, np.uint8).reshape(height, width, 3)
        decoded = VideoFrame.from_ndarray(picture, "rgb24")
        yield StreamFrame(number, float(number / fps), time.monotonic(), decoded)
    if filled:
        reading.damaged(f"ends in the middle of frame {number}: {filled:,} of its {num_bytes:,} bytes")
    if not reading.num_frames:
        raise DecodeError(PIPE, reading.damage or "is empty")


@dataclass
class _Pipe:
    """A pipe as FFmpeg may use it, only for reading. head: its first bytes."""

    file: RawIOBase
    head: bytes = b""
    is_interrupted: bool = False

    def read(self, size: int) -> bytes:
        """Return what has arrived, at most `size` bytes; nothing at the end."""
        try:
            content = self.file.read(size) or b""
        except KeyboardInterrupt:
            # FFmpeg, which calls this, would swallow it.
            self.is_interrupted = True
            return b""
        if len(self.head) < 8:
            self.head += content[:8]
        return content


def _whole_frames(
    container: InputContainer, stream: VideoStream, log: list[tuple[int, str, str]], budget: Budget, reading: Reading
) -> Iterator[StreamFrame]:
    reading.fps = stream.average_rate or stream.guessed_rate or USUAL_FPS
    interval, first, due = 1 / reading.fps, None, Fraction(0)
    for frame, is_damaged in every_frame(container, stream, budget, reading):
        # AVI stores no presentation times: with reordering FFmpeg's own guesses are wrong.
        is_guess = container.format.name == "avi" and stream.codec_context.has_b_frames
        # A frame without a time is shown one interval after the one before it.
        shown = due if is_guess or frame.pts is None else frame.pts * (stream.time_base or interval)
        first, due = shown if first is None else first, shown + interval
        if not is_damaged:
            yield StreamFrame(reading.num_frames - 1, float(shown - first), time.monotonic(), frame)
        read_log(log, container, reading)
    read_log(log, container, reading)
