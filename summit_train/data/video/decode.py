"""Videos through PyAV: the wanted frames, and what a file holds.

A video is a file or the bytes of one in memory, and both are read in the same way. Frame i is the i-th decoded frame in
presentation order, whatever the file says of times or counts. Sizes are upright: the rotation of the display matrix is
applied. The sample aspect ratio is not (nor is it in decord and the TSM code): a picture keeps the pixels it was stored
with.
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
from summit_train.data.video.source import MAX_HELD_BYTES, AnyVideo, DecodeError, Encoded, VideoInfo

Packet: TypeAlias = "AnyPacket[VideoStream]"
Render = Callable[[VideoFrame], list[Frames]]
Pictures = dict[int, list[Frames]]
Numbered = Iterator[tuple[int, VideoFrame]]

# What is opened at all: FFmpeg also takes playlists that name other files, text and images for a video.
_FORMATS = (
    "3gp,asf,av1,avi,dv,flv,gif,h264,hevc,ivf,m4v,matroska,mjpeg,mov,mp4,mpeg,mpegts,mpegvideo,mxf,nut,"
    "obu,ogg,rm,swf,webm,wtv"
)
_OPEN: dict[str, Any] = {
    # Title, author and the like, in whatever encoding, are not needed.
    "metadata_errors": "ignore",
    "container_options": {"format_whitelist": _FORMATS, "protocol_whitelist": "file"},
}
# These decoders can leave out a frame that no other frame needs; all other frames stay the same.
_SKIPPING_CODECS = frozenset({"h264", "hevc"})


class _InMemory(BytesIO):
    """Bytes with a name, whose ending FFmpeg looks at where the bytes alone could be of several formats."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name


def _source(video: Encoded) -> AbstractContextManager[Any]:
    """What PyAV opens: the bytes, or a URL of the file, or the file opened here where its name is not UTF-8."""
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
    """Open a video for decoding; whatever FFmpeg raises until it is closed becomes a DecodeError."""
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
    """Decoders refuse a larger frame before they allocate it, also one that comes late in a stream."""
    return {"max_pixels": str(budget.limits.pixels)}


def _container(name: str, source: Any, budget: Budget) -> InputContainer:
    try:
        return cast(InputContainer, av.open(source, options=codec_options(budget), **_OPEN))
    except (av.InvalidDataError, av.ArgumentError) as error:
        raise DecodeError(name, "is no video of a kind that is read here, or its header is damaged") from error


def _video_stream(name: str, container: InputContainer) -> VideoStream:
    """The first video stream that is no cover picture, with one thread: loaders run many processes."""
    for stream in container.streams.video:
        if stream.disposition & Disposition.attached_pic:
            continue
        if stream.codec_context is None:
            raise DecodeError(name, "there is no decoder for its video codec")
        stream.codec_context.thread_count = 1
        return stream
    raise DecodeError(name, "has no video stream")


def _demuxed(container: InputContainer, stream: VideoStream, budget: Budget) -> Iterator[Packet]:
    """The video packets, without the empty ones by which PyAV marks the end."""
    for number, packet in enumerate(container.demux(stream)):
        budget.packet(number)
        if packet.size:
            yield packet


def count_packets(video: Encoded, budget: Budget) -> int:
    """How many frames the packets promise; at least one, so that decoding decides whether there is any."""
    with _open(video, budget) as (container, stream):
        return max(1, sum(not packet.is_discard for packet in _demuxed(container, stream, budget)))


def read_from_start(video: Encoded, wanted: frozenset[int], render: Render, budget: Budget) -> tuple[Pictures, int]:
    """The wanted frames' pictures, decoded from the start, and how many frames went by. Raises DecodeError."""
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
    """The wanted frames' pictures from the nearest key frames; none where it is not certain to be right."""
    try:
        with _open(video, budget) as (container, stream):
            first_size = (stream.width, stream.height)
            packets = _held(_demuxed(container, stream, budget))
            index = _index(stream, packets, num_frames)
            if index is None:
                return {}
            pictures, _ = pick(video.name, _jumped(stream, packets, index, wanted), wanted, render)
    except DecodeError:
        # Decoding from the start is the judge: it gives the frames, or the error with its right place.
        return {}
    # A video that changes its size on the way is scaled by what comes first, which a jump does not see.
    return pictures if render.stored_size == first_size and len(pictures) == len(wanted) else {}


def _held(packets: Iterable[Packet]) -> list[Packet]:
    """The packets, or none where they are too many bytes to hold; a header may name one place many times."""
    held, num_bytes = list[Packet](), 0
    for packet in packets:
        held.append(packet)
        num_bytes += packet.size
        if num_bytes > MAX_HELD_BYTES:
            return []
    return held


def _index(stream: VideoStream, packets: Sequence[Packet], num_frames: int) -> FrameIndex | None:
    """An index where jumping to a key frame is certain to give the frame asked for, else None."""
    # AVI stores no presentation times: with reordering those that FFmpeg makes up are not the frames' own.
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
    """The wanted frames (and others) with their numbers, decoded from the nearest key frames."""
    context = stream.codec_context
    if context.name == "mpeg4":
        # The encoder's name may stand in the first packet alone; the decoder mimics that encoder's rounding.
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


def probe(video: AnyVideo, limits: Limits = NO_HURRY) -> VideoInfo:
    """Decode every frame of a video and say what it holds.

    Raises DecodeError for anything that is no video, and for a video that is damaged or cut short anywhere.
    """
    video = Encoded.of(video)
    # The log from before the opening on: a short file is read to its end by it.
    budget = Budget(video.name, limits)
    with _error_log() as log, _open(video, budget) as (container, stream):
        tally = Tally(stream.time_base)
        width, height, rotation = _tally_all(_demuxed(container, stream, budget), stream, tally)
        if any(entry.pos + entry.size > container.size for entry in stream.index_entries):
            tally.damaged("the file is cut short")
        # Decoders' lines are often harmless; the container's are not, nor HEVC's, which marks no frame.
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


@contextmanager
def _error_log() -> Iterator[list[tuple[int, str, str]]]:
    """What FFmpeg logs as an error meanwhile: (level, speaker, line); some damage shows nowhere else."""
    level, skip_repeated = av.logging.get_level(), av.logging.get_skip_repeated()
    av.logging.set_level(av.logging.ERROR)
    # Else a line that the file before had too is held back.
    av.logging.set_skip_repeated(False)
    try:
        with av.logging.Capture() as lines:
            yield lines
    finally:
        av.logging.set_level(level)
        av.logging.set_skip_repeated(skip_repeated)


def _tally_all(packets: Iterable[Packet], stream: VideoStream, tally: Tally) -> tuple[int, int, int]:
    """Decode to the end, over errors too; the first frame's upright width and height, and its rotation."""
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
