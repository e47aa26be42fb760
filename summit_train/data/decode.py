"""Videos in and out through PyAV: the wanted frames of a clip, what a file holds, and a small encoder.

This is the only module that imports `av`. Frame i is the i-th decoded frame in presentation order, whatever the file
says of times or counts. Sizes are upright: the rotation of the display matrix is applied, the sample aspect ratio is
not (as in decord and the TSM code), so a picture keeps the pixels that it was stored with.
"""

from __future__ import annotations

import os
import stat
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path

import av
import av.logging
import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

from summit_train.data.augment import View

Frames = NDArray[np.uint8]
Choose = Callable[[int], NDArray[np.int64]]

# What is opened at all: FFmpeg also takes playlists that name other files, text and images for a video.
_FORMATS = (
    "mov,mp4,matroska,webm,avi,ogg,mpegts,mpeg,mpegvideo,m4v,flv,asf,gif,mxf,nut,ivf,obu,h264,hevc,dv,rm,wtv,swf"
)
# A larger file is not held in memory: it is decoded from its start, packet by packet.
_MAX_HELD_BYTES = 64 << 20
# A jump must save at least this many frames to be worth the decoder's flush.
_MIN_SAVED_FRAMES = 4
# Decoders that skip a frame no other frame needs when told to, without a change to the frames that are not skipped.
_SKIPPING_CODECS = frozenset({"h264", "hevc"})


class DecodeError(ValueError):
    """A video that cannot be read; `path` and `reason` say which and why."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(f"{os.fspath(path)}: {reason}")
        self.path = os.fspath(path)
        self.reason = reason

    def __reduce__(self) -> tuple[type[DecodeError], tuple[str, str]]:
        # The default would call DecodeError(message) when a worker process sends the error home.
        return (type(self), (self.path, self.reason))


@dataclass(frozen=True)
class VideoInfo:
    """What a full decode found.

    `width` and `height` are upright pixels; `rotation` is the display matrix's, in degrees counterclockwise;
    `duration` in seconds spans the decoded frames, `None` where they carry no times.
    """

    num_frames: int
    fps: float | None
    width: int
    height: int
    duration: float | None
    codec: str
    rotation: int


# ---------------------------------------------------------------------------------------------- opening


def _check_regular(path: str) -> None:
    """Look before FFmpeg opens the path: a FIFO would hang it."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise DecodeError(path, getattr(error, "strerror", None) or str(error)) from error
    if stat.S_ISDIR(status.st_mode):
        raise DecodeError(path, "is a directory, not a video file")
    if not stat.S_ISREG(status.st_mode):
        raise DecodeError(path, "is not a regular file")
    if status.st_size == 0:
        raise DecodeError(path, "is empty")


def _video_stream(path: str, container: InputContainer) -> VideoStream:
    """The first video stream that is no cover picture, set to one thread: the processes are the parallelism."""
    for stream in container.streams.video:
        if stream.disposition & Disposition.attached_pic:
            continue
        if stream.codec_context is None:
            raise DecodeError(path, "no decoder for its video codec")
        stream.codec_context.thread_count = 1
        return stream
    raise DecodeError(path, "has no video stream")


@contextmanager
def _open(path: str) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a file for decoding; whatever FFmpeg raises until it is closed becomes a DecodeError."""
    _check_regular(path)
    try:
        # "file:" keeps a name such as "a:b.mp4" from being taken for a protocol.
        with av.open(
            f"file:{path}",
            metadata_errors="ignore",
            container_options={"format_whitelist": _FORMATS, "protocol_whitelist": "file"},
        ) as container:
            yield container, _video_stream(path, container)
    except av.FFmpegError as error:
        raise DecodeError(path, f"cannot be decoded: {error.strerror}") from error
    except UnicodeError as error:
        raise DecodeError(path, f"cannot be opened: {error}") from error


# ---------------------------------------------------------------------------------------------- orientation


def _orientation(frame: VideoFrame) -> tuple[bool, bool, bool]:
    """(transpose, flip x, flip y) that turn a frame upright, in that order.

    The display matrix sends the stored pixel (x, y) to (a x + c y, b x + d y); it is nine native 32-bit integers
    a b u c d v x y w (FFmpeg, libavutil/display.h). An angle between the quarter turns goes to the nearest one.
    """
    side = frame.side_data.get("DISPLAYMATRIX") if frame.rotation or len(frame.side_data) else None
    if side is None:
        return (False, False, False)
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(side))
    if abs(a) + abs(d) >= abs(b) + abs(c):
        return (False, a < 0, d < 0)
    return (True, c < 0, b < 0)


def _turn(picture: Frames, orientation: tuple[bool, bool, bool]) -> Frames:
    """(H, W, 3) as stored -> (H', W', 3) upright, without a copy."""
    transpose, flip_x, flip_y = orientation
    if transpose:
        picture = picture.transpose(1, 0, 2)
    return picture[:: -1 if flip_y else 1, :: -1 if flip_x else 1]


class _Renderer:
    """Turns decoded frames into the crops of the asked views: scaled by swscale on the way to RGB."""

    def __init__(self, views_of: Callable[[int, int], Sequence[View]]) -> None:
        self._views_of = views_of
        self._views: Sequence[View] = ()
        self._reformatter = VideoReformatter()

    def __call__(self, frame: VideoFrame) -> list[Frames]:
        """One contiguous (crop_height, crop_width, 3) picture for each view."""
        orientation = _orientation(frame)
        if not self._views:
            size = (frame.height, frame.width) if orientation[0] else (frame.width, frame.height)
            self._views = self._views_of(*size)
        scaled = {(v.width, v.height): self._scaled(frame, v, orientation) for v in self._views}
        return [_cut(scaled[v.width, v.height], v) for v in self._views]

    def _scaled(self, frame: VideoFrame, view: View, orientation: tuple[bool, bool, bool]) -> Frames:
        width, height = (view.height, view.width) if orientation[0] else (view.width, view.height)
        rgb = self._reformatter.reformat(
            frame, width, height, "rgb24", interpolation=Interpolation.BILINEAR, threads=1
        )
        return _turn(rgb.to_ndarray(), orientation)


def _cut(picture: Frames, view: View) -> Frames:
    crop = picture[view.y : view.y + view.crop_height, view.x : view.x + view.crop_width]
    return np.ascontiguousarray(crop[:, ::-1] if view.flip else crop)


# ---------------------------------------------------------------------------------------------- reading


def _decoded(stream: VideoStream, packets: Iterable[Packet]) -> Iterator[tuple[int, VideoFrame]]:
    """Every frame with its number, from the start."""
    frames = (frame for packet in chain(packets, [None]) for frame in stream.decode(packet))
    return enumerate(frames)


def _pick(
    path: str, numbered: Iterable[tuple[int, VideoFrame]], wanted: frozenset[int], render: _Renderer
) -> tuple[dict[int, list[Frames]], int]:
    """Render the wanted frames; also the number of frames seen until the last of them, or to the file's end."""
    pictures: dict[int, list[Frames]] = {}
    num_seen = 0
    for number, frame in numbered:
        num_seen = number + 1
        if number in wanted:
            if frame.is_corrupt:
                raise DecodeError(path, f"frame {number} is damaged")
            pictures[number] = render(frame)
            if len(pictures) == len(wanted):
                break
    return pictures, num_seen


class _Index:
    """Where each frame's packet stands, for a clip whose compressed data is held in memory.

    Only for clips where the packets' times name the frames without doubt: as many packets as the manifest has frames,
    each with a time of its own.
    """

    def __init__(self, packets: Sequence[Packet]) -> None:
        self.packets = packets
        shown = sorted((p.pts, position) for position, p in enumerate(packets) if not p.is_discard)
        self.position = [position for _, position in shown]
        self.number = {pts: number for number, (pts, _) in enumerate(shown)}
        self.keys = [number for number, position in enumerate(self.position) if packets[position].is_keyframe]

    def spans(self, wanted: Iterable[int]) -> Iterator[tuple[Sequence[Packet], frozenset[int]]]:
        """The stretches that are decoded without a jump: their packets and the frames wanted of them."""
        span: list[int] = []
        start = 0
        for number in sorted(wanted):
            key = self.keys[max(bisect_right(self.keys, number) - 1, 0)]
            if key <= number and key > (span[-1] if span else -1) + _MIN_SAVED_FRAMES:
                yield from self._stretch(start, span)
                start, span = self.position[key], []
            span.append(number)
        yield from self._stretch(start, span)

    def _stretch(self, start: int, span: Sequence[int]) -> Iterator[tuple[Sequence[Packet], frozenset[int]]]:
        if span:
            yield self.packets[start : max(self.position[i] for i in span) + 1], frozenset(span)


def _index(stream: VideoStream, packets: Sequence[Packet], num_frames: int | None) -> _Index | None:
    """An index where jumping to a key frame is certain to give the frame asked for, else None."""
    times = [packet.pts for packet in packets if not packet.is_discard]
    if num_frames != len(times) or None in times or len(set(times)) != len(times):
        return None
    # AVI stores no presentation times: with reordering those that FFmpeg makes up are not the frames' own.
    if stream.container.format.name == "avi" and stream.codec_context.has_b_frames:
        return None
    index = _Index(packets)
    return index if index.keys else None


def _jumped(stream: VideoStream, index: _Index, wanted: frozenset[int]) -> Iterator[tuple[int, VideoFrame]]:
    """The wanted frames (and others) with their numbers, decoded from the nearest key frames."""
    context = stream.codec_context
    for packets, span in index.spans(wanted):
        for packet in packets:
            if context.name in _SKIPPING_CODECS:
                context.skip_frame = "DEFAULT" if index.number.get(packet.pts) in span else "NONREF"
            yield from _numbered(index, stream.decode(packet))
        yield from _numbered(index, stream.decode(None))
        context.flush_buffers()


def _numbered(index: _Index, frames: Iterable[VideoFrame]) -> Iterator[tuple[int, VideoFrame]]:
    return ((index.number[frame.pts], frame) for frame in frames if frame.pts in index.number)


def _demuxed(container: InputContainer, stream: VideoStream) -> Iterator[Packet]:
    """The video packets, without the empty ones by which PyAV marks the end."""
    return (packet for packet in container.demux(stream) if packet.size)


def _num_packets(path: str) -> int:
    with _open(path) as (container, stream):
        return sum(not packet.is_discard for packet in _demuxed(container, stream))


def _sequential(path: str, wanted: frozenset[int], render: _Renderer) -> tuple[dict[int, list[Frames]], int]:
    with _open(path) as (container, stream):
        return _pick(path, _decoded(stream, _demuxed(container, stream)), wanted, render)


def _by_jumps(path: str, wanted: frozenset[int], render: _Renderer, num_frames: int) -> dict[int, list[Frames]]:
    """The wanted frames' pictures from the nearest key frames, or some or none of them where that is not certain."""
    if os.path.getsize(path) > _MAX_HELD_BYTES:
        return {}
    try:
        with _open(path) as (container, stream):
            index = _index(stream, list(_demuxed(container, stream)), num_frames)
            return _pick(path, _jumped(stream, index, wanted), wanted, render)[0] if index else {}
    except DecodeError:
        # Decoding from the start is the judge: it gives the frames, or the error with its right place.
        return {}


def read_views(
    path: str | os.PathLike[str],
    choose: Choose,
    views_of: Callable[[int, int], Sequence[View]],
    num_frames: int | None = None,
    *,
    seek: bool = True,
) -> Frames:
    """Read K clips of T frames of one video in C views: uint8 RGB (K * C, T, height, width, 3), clip by clip.

    choose: from the number of frames to frame numbers int64 (K, T), in any order and with repeats; views_of: from the
    upright (width, height) in pixels to C views whose crops have one size. Both are pure: they may be called again.
    num_frames: what the manifest says; without it the packets are counted. Where the file turns out to hold fewer
    frames, `choose` is asked again with the true number. Each frame is decoded and scaled once.
    seek: decode from the nearest key frames where that is certain to give the same frames; needs `num_frames`.
    Raises DecodeError where the file cannot be read or a frame up to the last one wanted is damaged.
    """
    path = os.fspath(path)
    render = _Renderer(views_of)
    count = num_frames or _num_packets(path) or 1
    chosen = _chosen(choose, count)
    wanted = frozenset(chosen.ravel().tolist())
    pictures = _by_jumps(path, wanted, render, count) if seek and num_frames else {}
    if len(pictures) < len(wanted):
        pictures, num_seen = _sequential(path, wanted, render)
        if not num_seen:
            raise DecodeError(path, "no frame can be decoded")
        if len(pictures) < len(wanted):
            chosen = _chosen(choose, num_seen)
            pictures, _ = _sequential(path, frozenset(chosen.ravel().tolist()), render)
    clips = [[pictures[i][view] for i in row] for row in chosen.tolist() for view in range(len(pictures[row[0]]))]
    return np.asarray(clips)


def _chosen(choose: Choose, num_frames: int) -> NDArray[np.int64]:
    chosen = np.asarray(choose(num_frames))
    if not chosen.size or chosen.min() < 0 or chosen.max() >= num_frames:
        raise ValueError(f"the frames chosen of {num_frames} do not lie among them: {chosen.tolist()}")
    return chosen


def read_clip(
    path: str | os.PathLike[str],
    choose: Choose,
    view_of: Callable[[int, int], View],
    num_frames: int | None = None,
    *,
    seek: bool = True,
) -> Frames:
    """Read one clip in one view: uint8 RGB (T, crop_height, crop_width, 3); see `read_views`.

    choose gives (T,) frame numbers, view_of one View.
    """
    views = read_views(path, lambda n: choose(n)[None], lambda w, h: [view_of(w, h)], num_frames, seek=seek)
    return views[0]



# ---------------------------------------------------------------------------------------------- probing


@contextmanager
def _error_log() -> Iterator[list[tuple[int, str, str]]]:
    """What FFmpeg logs as an error meanwhile: (level, who, message); some damage shows nowhere else."""
    level = av.logging.get_level()
    av.logging.set_level(av.logging.ERROR)
    try:
        with av.logging.Capture() as lines:
            yield lines
    finally:
        av.logging.set_level(level)


class _Tally:
    """What a full decode adds up to."""

    def __init__(self, time_base: Fraction | None) -> None:
        # The stream's: a frame that is flushed out at the end has none of its own.
        self.time_base = time_base
        self.num_frames = 0
        self.size = (0, 0)
        self.rotation = 0
        self.times: list[int] = []
        self.last_duration = 0
        self.damage = ""

    def add(self, frame: VideoFrame) -> None:
        if not self.num_frames:
            transpose = _orientation(frame)[0]
            self.size = (frame.height, frame.width) if transpose else (frame.width, frame.height)
            self.rotation = frame.rotation
        if frame.is_corrupt:
            self.damaged(f"frame {self.num_frames} is damaged")
        if frame.pts is not None:
            self.times.append(frame.pts)
            self.last_duration = frame.duration
        self.num_frames += 1

    def damaged(self, reason: str) -> None:
        self.damage = self.damage or reason

    @property
    def duration(self) -> float | None:
        """Seconds from the first frame's start to the last one's end (one mean interval, where that is not said)."""
        if not self.times or not self.time_base:
            return None
        span = max(self.times) - min(self.times)
        last = self.last_duration or (span / (len(self.times) - 1) if len(self.times) > 1 else 0)
        return float((span + last) * self.time_base) or None


def probe(path: str | os.PathLike[str]) -> VideoInfo:
    """Decode every frame of a file and say what it holds.

    Raises DecodeError for anything that is no video, and for a video that is damaged or cut short anywhere.
    """
    path = os.fspath(path)
    with _open(path) as (container, stream):
        tally = _Tally(stream.time_base)
        with _error_log() as log:
            _tally_all(container, stream, tally)
        _judge(path, container, stream, tally, log)
        rate = stream.average_rate or stream.guessed_rate
        return VideoInfo(
            num_frames=tally.num_frames,
            fps=float(rate) if rate else None,
            width=tally.size[0],
            height=tally.size[1],
            duration=tally.duration,
            codec=stream.codec_context.name,
            rotation=tally.rotation,
        )


def _tally_all(container: InputContainer, stream: VideoStream, tally: _Tally) -> None:
    """Decode to the end, over errors too: the count of good frames belongs to the report."""
    for packet in chain(_demuxed(container, stream), [None]):
        if packet is not None and packet.is_corrupt:
            tally.damaged(f"the packet after frame {tally.num_frames} is damaged or cut short")
        try:
            for frame in stream.decode(packet):
                tally.add(frame)
        except av.FFmpegError as error:
            tally.damaged(f"decoding fails after frame {tally.num_frames}: {error.strerror}")


def _judge(
    path: str, container: InputContainer, stream: VideoStream, tally: _Tally, log: list[tuple[int, str, str]]
) -> None:
    """Raise DecodeError where the decode showed damage."""
    size = os.path.getsize(path)
    if any(entry.pos + entry.size > size for entry in stream.index_entries):
        tally.damaged("the file is cut short")
    # Decoders' lines are often harmless; the containers' are not, nor HEVC's, whose decoder marks no frame.
    spoken = [f"{who}: {line.strip()}" for _, who, line in log if who in (container.format.name, "hevc")]
    if spoken:
        tally.damaged(spoken[0])
    if tally.damage:
        raise DecodeError(path, f"{tally.damage} ({tally.num_frames} frames decoded)")
    if not tally.num_frames:
        raise DecodeError(path, "no frame can be decoded")


# ---------------------------------------------------------------------------------------------- writing


def write_video(
    path: str | os.PathLike[str],
    frames: Frames,
    fps: int | Fraction = 25,
    *,
    codec: str | None = None,
    quality: int = 18,
    key_every: int = 12,
    b_frames: int = 2,
    rotation: int = 0,
    times: Sequence[int] | None = None,
) -> None:
    """Encode uint8 RGB frames (T, H, W, 3); the container follows the path's extension. The same input, the same bytes.

    codec: libx264 where this PyAV has it, else mpeg4. quality: x264's constant rate factor, 0 is the finest (for
    mpeg4 it is scaled to its quantiser). key_every: frames from one key frame to the next; b_frames: most of them in
    a row. rotation: counterclockwise degrees of the display matrix; times: presentation time of every frame in units
    of 1 / fps, rising (default 0, 1, 2, ...). The file appears under its name only when it is complete.
    """
    target = Path(path)
    codec = codec or ("libx264" if "libx264" in av.codecs_available else "mpeg4")
    temporary = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        with av.open(f"file:{temporary}", "w", options={"fflags": "+bitexact"}) as container:
            stream = container.add_stream(codec, rate=fps, options=_encoder_options(codec, quality))
            _set_up(stream, frames, key_every, b_frames, rotation)
            for number, picture in enumerate(frames):
                frame = VideoFrame.from_ndarray(picture, "rgb24")
                frame.pts = number if times is None else times[number]
                frame.time_base = 1 / Fraction(fps)
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _encoder_options(codec: str, quality: int) -> dict[str, str]:
    if codec == "mpeg4":
        return {"qscale": str(max(1, quality // 6)), "flags": "+bitexact+qscale"}
    return {"crf": str(quality), "preset": "fast", "flags": "+bitexact"}


def _set_up(stream: VideoStream, frames: Frames, key_every: int, b_frames: int, rotation: int) -> None:
    _, stream.height, stream.width, _ = frames.shape
    # Half-resolution colour needs even sides.
    stream.pix_fmt = "yuv420p" if stream.width % 2 == stream.height % 2 == 0 else "yuv444p"
    stream.codec_context.thread_count = 1
    stream.codec_context.gop_size = key_every
    stream.codec_context.max_b_frames = b_frames
    if rotation:
        stream.set_display_rotation(rotation)
