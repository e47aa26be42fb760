"""Decoding videos with PyAV: the wanted frames, or the facts of the whole file.

A video is a file, or the bytes of one in memory. Frame i is the i-th decoded frame in presentation order, whatever the
file says of times or counts. Sizes are upright: the display matrix's rotation is applied. The sample aspect ratio is
not, as in decord and the TSM code: a picture keeps its stored pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fractions import Fraction
from io import BytesIO
from itertools import chain
from typing import Any, TypeAlias, cast

import av
import av.logging
from av.container import InputContainer
from av.packet import Packet as AnyPacket
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from summit_train.data.video.keyframes import FrameIndex, pick
from summit_train.data.video.limits import NO_HURRY, Budget, Limits
from summit_train.data.video.render import Frames, Renderer, turn_in
from summit_train.data.video.source import MAX_HELD_BYTES, DecodeError, Encoded, VideoInfo

Packet: TypeAlias = "AnyPacket[VideoStream]"
Render = Callable[[VideoFrame], list[Frames]]
Pictures = dict[int, list[Frames]]
Numbered = Iterator[tuple[int, VideoFrame]]

# FFmpeg would also open playlists that name other files, text and images as videos.
_FORMATS = (
    "3gp,asf,av1,avi,dv,flv,gif,h264,hevc,ivf,m4v,matroska,mjpeg,mov,mp4,mpeg,mpegts,mpegvideo,mxf,nut,"
    "obu,ogg,rm,swf,webm,wtv"
)
_OPEN: dict[str, Any] = {
    # Titles and authors may be in any encoding and are not needed.
    "metadata_errors": "ignore",
    "container_options": {"format_whitelist": _FORMATS, "protocol_whitelist": "file"},
}
# These decoders can skip frames that no other frame needs, without changing the others.
_SKIPPING_CODECS = frozenset({"h264", "hevc"})


class _InMemory(BytesIO):
    """Bytes with a name: FFmpeg looks at its extension where the bytes could be of several formats."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name


def _source(video: Encoded) -> AbstractContextManager[Any]:
    """Return what PyAV opens: the bytes, the file's URL, or the opened file where its name is not UTF-8."""
    # "file:" keeps a name such as "a:b.mp4" from being taken for a protocol.
    url = f"file:{video.name}"
    if video.content is not None:
        return _InMemory(video.content, url)
    try:
        url.encode()
    except UnicodeEncodeError:
        return open(video.name, "rb")
    return nullcontext(url)


@contextmanager
def _open(video: Encoded, budget: Budget) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a video for decoding; errors of FFmpeg within the block become DecodeErrors."""
    video.check()
    try:
        with _source(video) as source, _container(video.name, source, budget) as container:
            stream = _video_stream(video.name, container)
            budget.size(stream.width, stream.height)
            stream.codec_context.options = codec_options(budget)
            yield container, stream
    except av.FFmpegError as error:
        raise DecodeError(video.name, f"cannot be decoded: {error.strerror}") from error
    except MemoryError as error:
        raise DecodeError(video.name, "wants more memory than a video may have") from error
    except OSError as error:
        raise DecodeError(video.name, error.strerror or str(error)) from error


def codec_options(budget: Budget) -> dict[str, str]:
    """Return options with which a decoder refuses too large a frame before it allocates it."""
    return {"max_pixels": str(budget.limits.pixels)}


def _container(name: str, source: Any, budget: Budget) -> InputContainer:
    try:
        return cast(InputContainer, av.open(source, options=codec_options(budget), **_OPEN))
    except (av.InvalidDataError, av.ArgumentError) as error:
        raise DecodeError(name, "is no video of a kind that is read here, or its header is damaged") from error


def _video_stream(name: str, container: InputContainer) -> VideoStream:
    """Return the first video stream that is no cover picture, with one thread: loaders run many processes."""
    for stream in container.streams.video:
        if stream.disposition & Disposition.attached_pic:
            continue
        if stream.codec_context is None:
            raise DecodeError(name, "there is no decoder for its video codec")
        stream.codec_context.thread_count = 1
        return stream
    raise DecodeError(name, "has no video stream")


def _demuxed(container: InputContainer, stream: VideoStream, budget: Budget) -> Iterator[Packet]:
    """Yield the video packets, without the empty ones by which PyAV marks the end."""
    for number, packet in enumerate(container.demux(stream)):
        budget.packet(number)
        if packet.size:
            yield packet


def count_packets(video: Encoded, budget: Budget) -> int:
    """Count the frames that the packets promise; at least 1, because only decoding can tell that there is none."""
    with _open(video, budget) as (container, stream):
        return max(1, sum(not packet.is_discard for packet in _demuxed(container, stream, budget)))


def read_from_start(video: Encoded, wanted: frozenset[int], render: Render, budget: Budget) -> tuple[Pictures, int]:
    """Decode from the start; return the wanted frames' pictures and the number of frames seen. Raises DecodeError."""
    with _open(video, budget) as (container, stream):
        packets = chain(_demuxed(container, stream, budget), [None])
        frames = (frame for packet in packets for frame in stream.decode(packet))
        pictures, num_seen = pick(video.name, enumerate(frames), wanted, render)
    if not num_seen:
        raise DecodeError(video.name, "no frame can be decoded")
    return pictures, num_seen


def read_by_jumps(
    video: Encoded, wanted: frozenset[int], render: Renderer, num_frames: int, budget: Budget
) -> Pictures:
    """Decode from the nearest key frames; return the wanted pictures, or none where they might be wrong."""
    try:
        with _open(video, budget) as (container, stream):
            first_size = (stream.width, stream.height)
            packets = _held(_demuxed(container, stream, budget))
            index = _index(stream, packets, num_frames)
            if index is None:
                return {}
            pictures, _ = pick(video.name, _jumped(stream, packets, index, wanted), wanted, render)
    except DecodeError:
        # Decoding from the start decides: it gives the frames, or the error at its right place.
        return {}
    # A video that changes its size is scaled by its first frame, which a jump does not see.
    return pictures if render.stored_size == first_size and len(pictures) == len(wanted) else {}


def _held(packets: Iterable[Packet]) -> list[Packet]:
    """Return the packets, or none where they are too many bytes: a header may name one place many times."""
    held, num_bytes = list[Packet](), 0
    for packet in packets:
        held.append(packet)
        num_bytes += packet.size
        if num_bytes > MAX_HELD_BYTES:
            return []
    return held


def _index(stream: VideoStream, packets: Sequence[Packet], num_frames: int) -> FrameIndex | None:
    """Return an index where jumps to key frames are certain to give the right frames, else None."""
    # AVI stores no presentation times: with reordering FFmpeg's own guesses are wrong.
    if stream.container.format.name == "avi" and stream.codec_context.has_b_frames:
        return None
    try:
        return FrameIndex(
            times=[packet.pts for packet in packets],
            keys=[packet.is_keyframe for packet in packets],
            discarded=[packet.is_discard for packet in packets],
            num_frames=num_frames,
        )
    except ValueError:
        return None


def _jumped(stream: VideoStream, packets: Sequence[Packet], index: FrameIndex, wanted: frozenset[int]) -> Numbered:
    """Yield the wanted frames (and others) with their numbers, decoded from the nearest key frames."""
    context = stream.codec_context
    if context.name == "mpeg4":
        # The first packet may name the encoder, whose rounding the decoder imitates.
        stream.decode(packets[0])
        context.flush_buffers()
    for span in index.spans(wanted):
        for packet in packets[span.first : span.last + 1]:
            if context.name in _SKIPPING_CODECS:
                needed = packet.pts in span.times
                context.skip_frame = "DEFAULT" if needed else "NONREF"
            yield from index.numbered(stream.decode(packet))
        yield from index.numbered(stream.decode(None))
        context.flush_buffers()


def probe(video: Encoded, limits: Limits = NO_HURRY) -> VideoInfo:
    """Decode every frame of a video and return its facts.

    Raises DecodeError for a file that is no video, and for a video that is damaged or cut short anywhere.
    """
    # The log starts before the opening, which reads a short file to its end.
    budget = Budget(video.name, limits)
    with _error_log() as log, _open(video, budget) as (container, stream):
        tally = Tally(stream.time_base)
        width, height, rotation = _tally_all(_demuxed(container, stream, budget), stream, tally)
        if any(entry.pos + entry.size > container.size for entry in stream.index_entries):
            tally.damaged("the file is cut short")
        # Decoders' messages are often harmless; those of containers are not, nor of HEVC, which marks no frame.
        for _, speaker, line in log:
            if speaker in (container.format.name, "hevc"):
                tally.damaged(f"{speaker}: {line.strip()}")
        if tally.damage or not tally.num_frames:
            reason = tally.damage or "no frame can be decoded"
            raise DecodeError(video.name, f"{reason} ({tally.num_frames} frames decoded)")
        fps = float(stream.average_rate or stream.guessed_rate or 0) or None
        codec = stream.codec_context.name
        return VideoInfo(tally.num_frames, fps, width, height, tally.duration, codec, rotation)


class Tally:
    """Collects the facts of a full decode, and the first damage."""

    def __init__(self, time_base: Fraction | None) -> None:
        self._time_base = time_base
        self._times: list[int] = []
        self._last_duration = 0
        self.num_frames = 0
        self.damage: str | None = None

    def add(self, time: int | None, duration: int, is_damaged: bool) -> None:
        """Add a decoded frame: its presentation time and duration in units of the time base."""
        if is_damaged:
            self.damaged(f"frame {self.num_frames} is damaged")
        if time is not None:
            self._times.append(time)
            self._last_duration = duration
        self.num_frames += 1

    def damaged(self, reason: str) -> None:
        """Note damage; only the first is kept."""
        self.damage = self.damage or reason

    @property
    def duration(self) -> float | None:
        """Return seconds from the first frame's start to the last one's end (where unknown, a mean interval on)."""
        if not self._times or not self._time_base:
            return None
        span = max(self._times) - min(self._times)
        last = self._last_duration or Fraction(span, max(1, len(self._times) - 1))
        return float((span + last) * self._time_base) or None


@contextmanager
def _error_log() -> Iterator[list[tuple[int, str, str]]]:
    """Collect FFmpeg's error messages (level, speaker, line); some damage shows nowhere else."""
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


def _tally_all(packets: Iterable[Packet], stream: VideoStream, tally: Tally) -> tuple[int, int, int]:
    """Decode to the end, past errors; return the first frame's upright width, height and rotation."""
    first = (0, 0, 0)
    for packet in chain(packets, [None]):
        if packet is not None and packet.is_corrupt:
            tally.damaged(f"a packet after frame {tally.num_frames} is damaged or cut short")
        try:
            for frame in stream.decode(packet):
                if not tally.num_frames:
                    first = (*turn_in(frame).size(frame.width, frame.height), frame.rotation)
                tally.add(frame.pts, frame.duration, frame.is_corrupt)
        except av.FFmpegError as error:
            tally.damaged(f"decoding fails after frame {tally.num_frames}: {error.strerror}")
    return first
