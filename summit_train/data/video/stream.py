"""The frames of a video one by one, in presentation order: of a file, of a pipe, or raw.

Nothing is held but the frame at hand, so the memory does not grow with the video. What is damaged is left out, counted
and named; the frames after it go on.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from io import RawIOBase
from itertools import count

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from summit_train.data.video.decode import damage_in, demuxed, error_log, is_cut_short, open_source, open_video
from summit_train.data.video.source import Budget, DecodeError, Encoded, Limits

PIPE = "standard input"
USUAL_FPS = Fraction(25)
# A stream may go on for ever.
_ENDLESS = Limits(packets=sys.maxsize, seconds=math.inf)
# Decoders give a packet's frame back within so many packets.
_MAX_DELAY = 64
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


@dataclass
class Reading:
    """What was read of a stream so far.

    num_frames: decoded, with the damaged ones. num_damaged: of them, left out. damage: the first damage of any kind.
    fps: as the container says, or the usual one; known from the first frame on.
    """

    num_frames: int = 0
    num_damaged: int = 0
    damage: str | None = None
    fps: Fraction = USUAL_FPS

    def damaged(self, reason: str) -> None:
        """Remember the first damage."""
        self.damage = self.damage or reason


def file_frames(path: str, reading: Reading) -> Iterator[StreamFrame]:
    """Yield the whole frames of a video file. Raises DecodeError where none can be read."""
    video, budget = Encoded(path), Budget(path, _ENDLESS)
    # The log starts before the opening, which reads a short file to its end.
    with error_log() as log, open_video(video, budget) as (container, stream):
        yield from _whole_frames(container, stream, log, budget, reading)
        if is_cut_short(container, stream):
            reading.damaged("the file is cut short")
    _check_any(path, reading)


def pipe_frames(file: RawIOBase, reading: Reading) -> Iterator[StreamFrame]:
    """Yield the whole frames of a container that comes in by a pipe. Raises DecodeError where none can be read."""
    budget, pipe = Budget(PIPE, _ENDLESS), _Pipe(file)
    try:
        with error_log() as log, open_source(PIPE, pipe, budget) as (container, stream):
            yield from _whole_frames(container, stream, log, budget, reading)
        pipe.check()
        _check_any(PIPE, reading)
    except DecodeError as error:
        pipe.check()
        if pipe.head[4:8] == b"ftyp" and not reading.num_frames:
            raise DecodeError(PIPE, f"no frame of this mp4 can be read: it is damaged, or {_NO_PIPE}") from error
        raise DecodeError(PIPE, error.reason if pipe.head else "is empty") from error


def raw_frames(file: RawIOBase, size: tuple[int, int], fps: Fraction, reading: Reading) -> Iterator[StreamFrame]:
    """Yield frames that come in as raw RGB pictures of this (width, height), three bytes a pixel.

    Raises DecodeError where there is none, or the size is no picture's.
    """
    width, height = size
    Budget(PIPE, _ENDLESS).size(width, height)
    reading.fps, num_bytes = fps, width * height * 3
    for number in count():
        content = _read_whole(file, num_bytes)
        if len(content) < num_bytes:
            break
        reading.num_frames += 1
        picture = np.frombuffer(content, np.uint8).reshape(height, width, 3)
        decoded = VideoFrame.from_ndarray(picture, "rgb24")
        yield StreamFrame(number, float(number / fps), time.monotonic(), decoded)
    if content:
        reading.damaged(f"ends in the middle of frame {number}: {len(content):,} of its {num_bytes:,} bytes")
    if not reading.num_frames:
        raise DecodeError(PIPE, reading.damage or "is empty")


def _read_whole(file: RawIOBase, size: int) -> bytearray:
    """Return `size` bytes, fewer at the end."""
    content, filled = bytearray(size), 0
    while filled < size and (more := file.readinto(memoryview(content)[filled:])):
        filled += more
    return content[:filled]


def _check_any(name: str, reading: Reading) -> None:
    if reading.num_frames == reading.num_damaged:
        raise DecodeError(name, reading.damage or "no frame can be decoded")


class _Pipe:
    """A pipe as FFmpeg may use it: it can be read on, and nothing else. `head`: its first bytes."""

    def __init__(self, file: RawIOBase) -> None:
        self._file = file
        self._is_interrupted = False
        self.head = b""

    def read(self, size: int) -> bytes:
        """Return what has come in, at most `size` bytes; nothing at the end."""
        try:
            content = self._file.read(size) or b""
        except KeyboardInterrupt:
            # FFmpeg, which calls this, would swallow it.
            self._is_interrupted = True
            return b""
        if len(self.head) < 8:
            self.head += content[:8]
        return content

    def check(self) -> None:
        """Raise the KeyboardInterrupt that came while FFmpeg was reading."""
        if self._is_interrupted:
            raise KeyboardInterrupt


def _whole_frames(
    container: InputContainer, stream: VideoStream, log: list[tuple[int, str, str]], budget: Budget, reading: Reading
) -> Iterator[StreamFrame]:
    reading.fps = stream.average_rate or stream.guessed_rate or USUAL_FPS
    clock, torn = _Clock(stream.time_base, reading.fps), deque[int | None](maxlen=_MAX_DELAY)
    for frame in _every_frame(container, stream, torn, budget, reading):
        # AVI stores no presentation times: with reordering FFmpeg's own guesses are wrong.
        is_guess = container.format.name == "avi" and stream.codec_context.has_b_frames
        number, seconds = reading.num_frames, clock(None if is_guess else frame.pts)
        reading.num_frames += 1
        if frame.is_corrupt or (frame.pts is not None and frame.pts in torn):
            reading.num_damaged += 1
            reading.damaged(f"frame {number} is damaged")
        else:
            yield StreamFrame(number, seconds, time.monotonic(), frame)
        _read_log(log, container, reading)
    _read_log(log, container, reading)


def _read_log(log: list[tuple[int, str, str]], container: InputContainer, reading: Reading) -> None:
    """Take what FFmpeg said of damage, and forget the rest: the log must not grow with the stream."""
    for line in damage_in(log, container):
        reading.damaged(line)
    log.clear()


def _every_frame(
    container: InputContainer, stream: VideoStream, torn: deque[int | None], budget: Budget, reading: Reading
) -> Iterator[VideoFrame]:
    """Yield what the decoder gives, past errors. torn: gets the times of packets that did not come in whole."""
    packets = demuxed(container, stream, budget)
    while True:
        try:
            packet = next(packets, None)
        except av.FFmpegError as error:
            reading.damaged(f"ends after frame {reading.num_frames}, where it is cut or damaged: {error.strerror}")
            packet = None
        if packet is not None and packet.is_corrupt:
            torn.append(packet.pts)
            reading.damaged(f"a packet after frame {reading.num_frames} is damaged or cut short")
        try:
            frames = stream.decode(packet)
        except av.FFmpegError as error:
            reading.damaged(f"decoding fails after frame {reading.num_frames}: {error.strerror}")
            frames = []
        yield from frames
        if packet is None:
            return


class _Clock:
    """From a frame's presentation time to seconds since the first frame; without a time it is one interval on."""

    def __init__(self, unit: Fraction | None, fps: Fraction) -> None:
        self._unit, self._interval = unit or 1 / fps, 1 / fps
        self._first: Fraction | None = None
        self._next = Fraction(0)

    def __call__(self, time: int | None) -> float:
        at = self._next if time is None else time * self._unit
        self._first = at if self._first is None else self._first
        self._next = at + self._interval
        return float(at - self._first)
