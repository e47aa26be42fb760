"""Videos and pictures through PyAV: the wanted frames, what a file holds, and a small encoder.

`render` makes pixels of decoded frames; these two modules alone import `av`, and `clips` puts together what they give.
A video is a file or the bytes of one in memory, and both are read in the same way. Frame i is the i-th decoded frame in
presentation order, whatever the file says of times or counts. Sizes are upright: the rotation of the display matrix is
applied. The sample aspect ratio is not (nor is it in decord and the TSM code): a picture keeps the pixels it was stored
with.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fractions import Fraction
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, cast

import av
import av.logging
from av.container import InputContainer
from av.packet import Packet as AnyPacket
from av.stream import Disposition
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from summit_train.data.jpeg import layout_of, part_of
from summit_train.data.keyframes import FrameIndex, pick
from summit_train.data.limits import NO_HURRY, Budget, Limits
from summit_train.data.render import Frames, Renderer, turn_in
from summit_train.data.video import AnyVideo, DecodeError, Encoded, Tally, VideoInfo

Packet: TypeAlias = "AnyPacket[VideoStream]"
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
# The packets of a larger video are not held in memory: it is decoded from its start, packet by packet.
MAX_HELD_BYTES = 64 << 20
_PICTURE_CODECS = {b"\xff\xd8": "mjpeg", b"\x89PNG": "png"}
_PICTURE_ENDS = {"mjpeg": b"\xff\xd9", "png": b"IEND"}
_TRAILING_BYTES = 256  # that some programs leave behind a picture's end
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
            stream.codec_context.options = _codec_options(budget)
            yield container, stream
    except av.FFmpegError as error:
        raise DecodeError(video.name, f"cannot be decoded: {error.strerror}") from error
    except MemoryError as error:
        raise DecodeError(video.name, "wants more memory than a video may have") from error
    except OSError as error:
        raise DecodeError(video.name, error.strerror or str(error)) from error


def _codec_options(budget: Budget) -> dict[str, str]:
    """Decoders refuse a larger frame before they allocate it, also one that comes late in a stream."""
    return {"max_pixels": str(budget.limits.pixels)}


def _container(name: str, source: Any, budget: Budget) -> InputContainer:
    try:
        return cast(InputContainer, av.open(source, options=_codec_options(budget), **_OPEN))
    except (av.InvalidDataError, av.ArgumentError) as error:
        raise DecodeError(
            name, "is no video of a kind that is read here, or its header is damaged"
        ) from error


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


def read_from_start(
    video: Encoded, wanted: frozenset[int], render: Renderer, budget: Budget
) -> tuple[Pictures, int]:
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


def _jumped(
    stream: VideoStream, packets: Sequence[Packet], index: FrameIndex, wanted: frozenset[int]
) -> Numbered:
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


class PictureReader:
    """Reads JPEG and PNG pictures in each of the renderer's views; one decoder for all that bring their tables."""

    def __init__(self, render: Renderer, budget: Budget) -> None:
        self._render, self._budget = render, budget
        self._decoder: VideoCodecContext | None = None

    def read(self, name: str, content: bytes) -> list[Frames]:
        """A picture. Raises DecodeError, also for one that is cut short.

        Of a JPEG that allows it only the blocks are decoded that the views need; damage elsewhere in it is not seen.
        """
        layout = layout_of(content) if _ends(content, "mjpeg") else None
        part = None if layout is None else part_of(content, layout, self._render.box(layout.width, layout.height))
        if layout is None or part is None:
            return self._render(_picture(name, content, self._budget)[1])
        self._decoder = self._decoder or _picture_decoder("mjpeg", self._budget)
        _, frame = _picture(name, part.content, self._budget, self._decoder)
        return self._render(self._render.on_canvas(frame, part.left, part.top, (layout.width, layout.height)))


def probe_picture(name: str, content: bytes, budget: Budget) -> tuple[str, int, int]:
    """Decode a JPEG or PNG picture: (codec, upright width, height). Raises DecodeError."""
    codec, frame = _picture(name, content, budget)
    return (codec, *turn_in(frame).size(frame.width, frame.height))


def _picture_decoder(codec: str, budget: Budget) -> VideoCodecContext:
    context = cast(VideoCodecContext, av.CodecContext.create(codec, "r"))
    # Else what is missing of a picture would be grey.
    context.options = {"err_detect": "explode", **_codec_options(budget)}
    context.thread_count = 1
    return context


def _picture(
    name: str, content: bytes, budget: Budget, decoder: VideoCodecContext | None = None
) -> tuple[str, VideoFrame]:
    codec = next((codec for start, codec in _PICTURE_CODECS.items() if content.startswith(start)), None)
    if codec is None:
        raise DecodeError(name, "is no JPEG or PNG picture" if content else "is empty")
    budget.time()
    if not _ends(content, codec):
        raise DecodeError(name, "is cut short")
    try:
        frames = (decoder or _picture_decoder(codec, budget)).decode(AnyPacket(content))
    except (av.FFmpegError, MemoryError) as error:
        raise DecodeError(name, f"cannot be decoded: {getattr(error, 'strerror', error)}") from error
    if len(frames) != 1:
        raise DecodeError(name, "is damaged: no picture can be decoded")
    budget.size(frames[0].width, frames[0].height)
    return codec, frames[0]


def _ends(content: bytes, codec: str) -> bool:
    return _PICTURE_ENDS[codec] in content[-_TRAILING_BYTES:]


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
    """Encode uint8 RGB frames (T, H, W, 3) on one thread: the same input gives the same bytes.

    The container follows the path's extension; the file appears under its name only when it is complete.
    codec: libx264 where this PyAV has it, else mpeg4. quality: x264's constant rate factor, 0 is the finest
    (mpeg4 takes a sixth of it for its quantiser). key_every: frames from key frame to key frame; b_frames:
    most of them in a row. rotation: degrees counterclockwise, for the display matrix. times: each frame's
    presentation time in units of 1 / fps, rising (default 0, 1, 2, ...).
    """
    target = Path(path)
    temporary = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    codec = codec or ("libx264" if "libx264" in av.codecs_available else "mpeg4")
    try:
        with av.open(f"file:{temporary}", "w", options={"fflags": "+bitexact"}) as container:
            stream = container.add_stream(codec, rate=fps, options=_encoder_options(codec, quality))
            _, stream.height, stream.width, _ = frames.shape
            # Half-resolution colour needs even sides.
            stream.pix_fmt = "yuv444p" if stream.width % 2 or stream.height % 2 else "yuv420p"
            stream.codec_context.thread_count = 1
            stream.codec_context.gop_size = key_every
            stream.codec_context.max_b_frames = b_frames
            stream.set_display_rotation(rotation)
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
        quantiser = str(max(1, quality // 6))
        return {"qmin": quantiser, "qmax": quantiser, "flags": "+bitexact"}
    options = {"crf": str(quality), "preset": "fast", "flags": "+bitexact"}
    if codec == "libx264":
        # Its macroblock tree reads memory that nobody wrote: the bytes then depend on what lay there.
        options["x264-params"] = "mbtree=0"
    return options
