"""Every frame of a video in presentation order, past damage: of a file, of a pipe, or raw; and the facts of a file.

Only the current frame is held, so the memory does not grow with the video. What is damaged is left out, counted and
named; the frames after it follow.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from io import RawIOBase
from itertools import count

import av
import av.logging
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from summit_train.core.text import counted
from summit_train.data.video.augment import View
from summit_train.data.video.decode import (
    Packet,
    PacketRow,
    demuxed,
    every_frame,
    frames_by_jumps,
    index_of,
    open_video,
    packet_row,
    video_tracks,
    wanted_frames,
)
from summit_train.data.video.render import Frames, Renderer, upright_size
from summit_train.data.video.source import NO_HURRY, Budget, DecodeError, Encoded, Limits, VideoInfo

PIPE = "standard input"
USUAL_FPS = Fraction(25)
_ENDLESS = Limits(packets=sys.maxsize, seconds=math.inf)
_NO_PIPE = "its index is at the end, which only a file can be searched for; pipe matroska, mpegts or fragmented mp4"
_SAMPLES = 24  # frames by which jumps are compared with a full decode
# Decoders give a packet's frame back within this many packets.
_MAX_DELAY = 64

# FFmpeg's messages: level, speaker, line.
Log = list[tuple[int, str, str]]


@dataclass
class Progress:
    """How far a video is decoded, and what was damaged so far.

    num_frames: decoded, with the damaged ones. num_damaged: of them, left out. damage: the first damage of any kind.
    fps: as the container says, or the usual one; known from the first frame on. packets: all so far, for an index of
    them, where it is a list. has_complained: whether FFmpeg has logged an error.
    """

    num_frames: int = 0
    num_damaged: int = 0
    damage: str | None = None
    fps: Fraction = USUAL_FPS
    packets: list[PacketRow] | None = None
    has_complained: bool = False

    def damaged(self, reason: str) -> None:
        """Remember the first damage."""
        self.damage = self.damage or reason


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


def probe(video: Encoded, limits: Limits = NO_HURRY) -> VideoInfo:
    """Decode every frame of a video and return its facts.

    Where the container contradicts the decoder, of the order of frames or of what is a key frame, jumps are tried at
    sample points.
    Raises DecodeError for a file that is not a video, and for a video that is damaged or cut short anywhere, and
    OSError where the file cannot be read to its end.
    """
    budget = Budget(video.name, limits)
    progress = Progress(packets=[])
    size = (0, 0)
    times = list[tuple[int, int]]()
    shown = list[tuple[int | None, bool]]()
    with _error_log() as log, open_video(video, budget) as (container, stream):
        for frame, _ in _frames_past_damage(container, stream, log, budget, progress):
            if progress.num_frames == 1:
                size = upright_size(frame)
            shown.append((frame.pts, frame.key_frame))
            if frame.pts is not None:
                times.append((frame.pts, frame.duration))
        if progress.damage or not progress.num_frames:
            reason = progress.damage or "no frame can be decoded"
            raise DecodeError(video.name, f"{reason} ({counted(progress.num_frames, 'frame')} decoded)")
        fps = float(stream.average_rate or stream.guessed_rate or 0) or None
        duration = duration_of(times, stream.time_base)
        codec = stream.codec_context.name
        notes = list[str]()
        if len(tracks := video_tracks(container)) > 1:
            notes.append(f"has {len(tracks)} video tracks; that of {stream.width} x {stream.height} is read")
    index = index_of(progress.packets or [])
    is_order_sure = index.times.tolist() == [time for time, _ in shown] and not progress.has_complained
    are_keys_sure = all(shown[key][1] for key in index.keys.tolist()) if is_order_sure else False
    can_jump = (
        not len(index.times)
        or are_keys_sure
        or _jumps_agree(video, progress.num_frames, limits, only_keys_differ=is_order_sure)
    )
    if not can_jump:
        notes.append("is read from its start: its container is wrong about times or key frames")
    return VideoInfo(
        progress.num_frames, fps, *size, duration, codec, video.sha256(), can_jump=can_jump, notes=tuple(notes)
    )


def _jumps_agree(video: Encoded, num_frames: int, limits: Limits, *, only_keys_differ: bool) -> bool:
    """Check at sample points that jumps give the frames of a decode from the start, or that none are taken.

    only_keys_differ: else the order of frames is in doubt, and a jump is enough to say no.
    """
    numbers = sorted(set(np.linspace(0, num_frames - 1, _SAMPLES).astype(int).tolist()))
    every = enumerate(every_frame(video, Budget(video.name, limits)))
    right = {number: _whole(frame) for number, frame in wanted_frames(video.name, every, numbers)}
    for wanted in numbers:
        with suppress(DecodeError):
            budget = Budget(video.name, limits)
            for number, frame in frames_by_jumps(video, [wanted], num_frames, budget, is_checked=True):
                if not only_keys_differ or not np.array_equal(_whole(frame), right[number]):
                    return False
    return True


def _whole(frame: VideoFrame) -> Frames:
    """Return the pixels of a frame as a clip would have them."""
    width, height = upright_size(frame)
    (picture,) = Renderer([View(width, height, 0, 0, width, height)])(frame)
    return picture


def duration_of(times: list[tuple[int, int]], unit: Fraction | None) -> float | None:
    """Return seconds from the first frame's start to the last one's end, given (time, duration) as decoded.

    Without the last one's duration, a mean interval takes its place. None without times.
    """
    if not times or not unit:
        return None
    span = max(time for time, _ in times) - min(time for time, _ in times)
    last = times[-1][1] or Fraction(span, max(1, len(times) - 1))
    return float((span + last) * unit) or None


def file_frames(path: str, progress: Progress) -> Iterator[StreamFrame]:
    """Yield the whole frames of a video file. Raises DecodeError if none can be read."""
    budget = Budget(path, _ENDLESS)
    with _error_log() as log, open_video(Encoded(path), budget) as (container, stream):
        yield from _whole_frames(container, stream, log, budget, progress)


def pipe_frames(file: RawIOBase, progress: Progress) -> Iterator[StreamFrame]:
    """Yield the whole frames of a container that arrives by a pipe. Raises DecodeError if none can be read."""
    budget = Budget(PIPE, _ENDLESS)
    pipe = _Pipe(file)
    try:
        with _error_log() as log, open_video(Encoded(PIPE), budget, pipe) as (container, stream):
            yield from _whole_frames(container, stream, log, budget, progress)
    except DecodeError as error:
        if pipe.head[4:8] == b"ftyp" and not progress.num_frames:
            raise DecodeError(PIPE, f"no frame of this mp4 can be read: it is damaged, or {_NO_PIPE}") from error
        raise DecodeError(PIPE, error.reason if pipe.head else "is empty") from error
    finally:
        if pipe.is_interrupted:
            raise KeyboardInterrupt


@dataclass
class _Pipe:
    """A pipe as FFmpeg may use it, only for reading. head: its first bytes."""

    file: RawIOBase
    head: bytes = b""
    is_interrupted: bool = False

    def read(self, size: int) -> bytes:
        """Read at most `size` bytes that have arrived; b"" at the end."""
        try:
            content = self.file.read(size) or b""
        except KeyboardInterrupt:
            # FFmpeg, which calls this, would swallow it.
            self.is_interrupted = True
            return b""
        if len(self.head) < 8:
            self.head += content[:8]
        return content


def raw_frames(file: RawIOBase, size: tuple[int, int], fps: Fraction, progress: Progress) -> Iterator[StreamFrame]:
    """Yield frames that arrive as raw RGB pictures of this (width, height), three bytes a pixel.

    Raises DecodeError if there are none, or for a size that a frame cannot have.
    """
    width, height = size
    Budget(PIPE, _ENDLESS).size(width, height)
    progress.fps = fps
    num_bytes = width * height * 3
    for number in count():
        content = bytearray(num_bytes)
        filled = 0
        while filled < num_bytes and (more := file.readinto(memoryview(content)[filled:])):
            filled += more
        if filled < num_bytes:
            break
        progress.num_frames += 1
        picture = np.frombuffer(content, np.uint8).reshape(height, width, 3)
        yield StreamFrame(number, float(number / fps), time.monotonic(), VideoFrame.from_ndarray(picture, "rgb24"))
    if filled:
        progress.damaged(f"ends in the middle of frame {number}: {filled:,} of its {num_bytes:,} bytes")
    if not progress.num_frames:
        raise DecodeError(PIPE, progress.damage or "is empty")


def _whole_frames(
    container: InputContainer, stream: VideoStream, log: Log, budget: Budget, progress: Progress
) -> Iterator[StreamFrame]:
    """Yield the frames that are not damaged, with their times. Raises DecodeError if there is none."""
    progress.fps = stream.average_rate or stream.guessed_rate or USUAL_FPS
    interval = 1 / progress.fps
    first: Fraction | None = None
    due = Fraction(0)
    for frame, is_damaged in _frames_past_damage(container, stream, log, budget, progress):
        # AVI stores no presentation times: with reordering FFmpeg's own guesses are wrong.
        is_guess = container.format.name == "avi" and stream.codec_context.has_b_frames
        # A frame without a time is shown one interval after the one before it.
        shown = due if is_guess or frame.pts is None else frame.pts * (stream.time_base or interval)
        first = shown if first is None else first
        due = shown + interval
        if not is_damaged:
            yield StreamFrame(progress.num_frames - 1, float(shown - first), time.monotonic(), frame)
    if progress.num_frames == progress.num_damaged:
        raise DecodeError(budget.name, progress.damage or "no frame can be decoded")


def _frames_past_damage(
    container: InputContainer, stream: VideoStream, log: Log, budget: Budget, progress: Progress
) -> Iterator[tuple[VideoFrame, bool]]:
    """Decode to the end, past errors; yield each frame and whether it is damaged, after counting it in `progress`."""
    packets = demuxed(container, stream, budget)
    torn = deque[int | None](maxlen=_MAX_DELAY)
    packet: Packet | None = None
    is_over = False
    while not is_over:
        try:
            packet = next(packets, None)
        except av.FFmpegError as error:
            progress.damaged(f"ends after frame {progress.num_frames}, where it is cut or damaged: {error.strerror}")
            packet = None
        is_over = packet is None
        if packet is not None and progress.packets is not None:
            progress.packets.append(packet_row(packet))
        if packet is not None and packet.is_corrupt:
            torn.append(packet.pts)
            progress.damaged(f"a packet after frame {progress.num_frames} is damaged or cut short")
        try:
            frames = stream.decode(packet)
        except av.FFmpegError as error:
            progress.damaged(f"decoding fails after frame {progress.num_frames}: {error.strerror}")
            frames = []
        for frame in frames:
            is_damaged = frame.is_corrupt or (frame.pts is not None and frame.pts in torn)
            if is_damaged:
                progress.num_damaged += 1
                progress.damaged(f"frame {progress.num_frames} is damaged")
            progress.num_frames += 1
            yield frame, is_damaged
        progress.has_complained |= bool(log)
        for _, speaker, line in log:
            # Decoders' messages are often harmless; those of containers are not, nor of HEVC, which marks no frame.
            if speaker in (container.format.name, "hevc"):
                progress.damaged(f"{speaker}: {line.strip()}")
        log.clear()  # it must not grow with a stream
    # The index names a packet behind the end. (A pipe has a negative size, or None.)
    if any(entry.pos + entry.size > (container.size or -1) >= 0 for entry in stream.index_entries):
        progress.damaged("the file is cut short")


@contextmanager
def _error_log() -> Iterator[Log]:
    """Collect FFmpeg's error messages; some damage shows nowhere else.

    It starts before the file is opened, which reads a short file to its end.
    """
    level, skip_repeated = av.logging.get_level(), av.logging.get_skip_repeated()
    av.logging.set_level(av.logging.ERROR)
    # Else a message that the file before had too is dropped.
    av.logging.set_skip_repeated(False)
    try:
        with av.logging.Capture() as lines:
            yield lines
    finally:
        av.logging.set_level(level)
        av.logging.set_skip_repeated(skip_repeated)
