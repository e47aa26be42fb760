"""Decode the wanted frames of a video with PyAV: from the nearest key frames, or from the start.

A video is a file, or the bytes of one in memory. Frame i is the i-th decoded frame in presentation order, whatever the
file says of times or counts. Sizes are upright: the display matrix's rotation is applied. The sample aspect ratio is
not, as in decord and the TSM code: a picture keeps its stored pixels.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, cycle, dropwhile, islice, pairwise
from typing import Any, TypeAlias, cast

import av
import numpy as np
from av.bitstream import BitStreamFilterContext
from av.container import InputContainer
from av.packet import Packet as AnyPacket
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from summit_train.data.video.source import MAX_HELD_BYTES, Budget, DecodeError, Encoded, PacketIndex

Packet: TypeAlias = "AnyPacket[VideoStream]"
NumberedFrame: TypeAlias = tuple[int, VideoFrame]
# The packets to decode, and the numbers of the wanted frames among them by their times.
Jump = tuple[slice, dict[int | None, int]]
Fetch = Callable[[slice], Iterable[Packet]]  # the packets at these places in decoding order

# FFmpeg would also open playlists that name other files, text and images as videos.
_FORMATS = (
    "3gp,asf,av1,avi,dv,flv,gif,h264,hevc,ivf,m4v,matroska,mjpeg,mov,mp4,mpeg,mpegts,mpegvideo,mxf,nut,"
    "obu,ogg,rm,swf,webm,wtv"
)
_OPEN: dict[str, Any] = {"container_options": {"format_whitelist": _FORMATS, "protocol_whitelist": "file"}}
if int(av.__version__.partition(".")[0]) < 19:
    # Titles and authors may be in any encoding and are not needed. Later versions take them all.
    _OPEN["metadata_errors"] = "ignore"
# These decoders can skip frames that no other frame needs, without changing the others.
_SKIPPING_CODECS = frozenset({"h264", "hevc"})
# Others have packets without a frame: MPEG-4 those that say "as before", VP8 and VP9 hidden frames.
_FRAME_PER_PACKET = frozenset({"h264", "hevc", "libdav1d", "av1", "mjpeg"})
# A jump must save at least this many frames to be worth the decoder's flush.
_MIN_SAVED_FRAMES = 4
# ffmpeg prefers a default track to a larger one by up to this many pixels (fftools, map_auto_video).
_DEFAULT_TRACK_PIXELS = 5_000_000
_MAX_REORDERED = 16  # frames that a decoder of H.264 holds back for those that are shown before them
_OTHER_ORDER = "shows its frames in another order than that of their times"


@contextmanager
def open_video(
    video: Encoded, budget: Budget, pipe: Any = None, *, in_order: bool = True
) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a video for decoding, and close it; errors of FFmpeg within the block become DecodeErrors.

    pipe: an object with a `read` method, which is read in place of the file. The stream is that which ffmpeg takes, see
    main_track. It decodes on one thread: loaders run many processes. in_order: deliver all frames, in order. FFmpeg
    then decodes up to 20 frames of H.264 to open it; otherwise frames may be missing if the header lacks their order.
    """
    if pipe is None:
        video.check()
    with ffmpeg_errors(video.name), ExitStack() as stack:
        # An opened file: PyAV would take a name such as "a:b.mp4" for a protocol, and refuse one that is not UTF-8.
        if pipe is None:
            pipe = stack.enter_context(video.opened())
        try:
            unseen = {} if in_order else {"skip_frame": "all"}
            opened = av.open(pipe, options=codec_options(budget) | unseen, **_OPEN)
        except (av.InvalidDataError, av.ArgumentError) as error:
            reason = "is not a video in a supported format, or its header is damaged"
            raise DecodeError(video.name, reason) from error
        container = stack.enter_context(cast(InputContainer, opened))
        tracks = video_tracks(container)
        if not tracks:
            raise DecodeError(video.name, "has no video stream")
        stream = main_track(tracks)
        if stream.codec_context is None:
            raise DecodeError(video.name, "has a video codec without a decoder here")
        budget.size(stream.width, stream.height)
        stream.codec_context.thread_count = 1
        stream.codec_context.options = codec_options(budget)
        yield container, stream


def video_tracks(container: InputContainer) -> list[VideoStream]:
    """Return the video streams that are not cover pictures."""
    return [stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic]


def main_track(tracks: list[VideoStream]) -> VideoStream:
    """Return the track that ffmpeg takes: the largest, where a default one counts for more, of equal ones the first."""

    def score(track: VideoStream) -> int:
        is_default = bool(track.disposition & Disposition.default)
        # A track without a decoder has no size here.
        return getattr(track, "width", 0) * getattr(track, "height", 0) + _DEFAULT_TRACK_PIXELS * is_default

    return max(tracks, key=score)


@contextmanager
def ffmpeg_errors(name: str) -> Iterator[None]:
    """Turn the errors of FFmpeg in the block into DecodeErrors of this video."""
    try:
        yield
    except av.FFmpegError as error:
        raise DecodeError(name, f"cannot be decoded: {error.strerror}") from error
    except MemoryError as error:
        raise DecodeError(name, "needs more memory than a video may have") from error
    except OSError as error:
        raise DecodeError(name, error.strerror or str(error)) from error


def codec_options(budget: Budget) -> dict[str, str]:
    """Return options with which a decoder refuses too large a frame before it allocates it."""
    return {"max_pixels": str(budget.limits.pixels)}


def demuxed(
    container: InputContainer, stream: VideoStream, budget: Budget, max_bytes: float = math.inf
) -> Iterator[Packet]:
    """Yield the video packets, without the empty ones by which PyAV marks the end."""
    for number, packet in enumerate(container.demux(stream)):
        budget.check(number)
        max_bytes -= packet.size
        if max_bytes < 0:  # a header may name one place many times
            raise DecodeError(budget.name, "has packets that are too large to be held in memory")
        if packet.size:
            yield packet


def count_packets(video: Encoded, budget: Budget) -> tuple[int, bool]:
    """Return the number of frames that the packets promise, and whether each packet is sure to hold one.

    It is at least 1, as only decoding can tell that there are none. What comes before the first key frame is dropped.
    """
    with open_video(video, budget) as (container, stream):
        number = 0
        begins_at_key = False
        for place, packet in enumerate(demuxed(container, stream, budget)):
            begins_at_key |= place == 0 and packet.is_keyframe
            number += not packet.is_discard
        return max(1, number), begins_at_key and stream.codec_context.name in _FRAME_PER_PACKET


# The wanted frames.


def every_frame(video: Encoded, budget: Budget) -> Iterator[VideoFrame]:
    """Yield all frames. Raises DecodeError, also if there is none."""
    num_seen = 0
    with open_video(video, budget) as (container, stream):
        for packet in chain(demuxed(container, stream, budget), [None]):
            for frame in stream.decode(packet):
                num_seen += 1
                yield frame
    if not num_seen:
        raise DecodeError(video.name, "no frame can be decoded")


def check_whole(name: str, number: int, frame: VideoFrame) -> None:
    """Raise DecodeError if a part of a frame is missing or was guessed."""
    if frame.is_corrupt:
        raise DecodeError(name, f"frame {number} is damaged")


def wanted_frames(name: str, numbered: Iterable[NumberedFrame], wanted: Iterable[int]) -> Iterator[NumberedFrame]:
    """Yield the wanted ones of these frames, up to the last of them. Raises DecodeError if one is damaged."""
    left = set(wanted)
    for number, frame in numbered:
        if number in left:
            check_whole(name, number, frame)
            yield number, frame
            left.remove(number)
            if not left:
                return


def frames_by_jumps(
    video: Encoded,
    wanted: Sequence[int],
    num_frames: int,
    budget: Budget,
    *,
    is_checked: bool = False,
    seeks: bool = False,
) -> Iterator[NumberedFrame]:
    """Yield the wanted frames, decoded from the nearest key frames. Raises DecodeError where they might be wrong.

    is_checked: `num_frames` is from `data index`, which compared the packets' times with a full decode. Otherwise each
    packet must hold a frame, and only H.264 may reorder them, because its packets tell their order themselves.
    seeks: in a video with an index, jump to the packets; otherwise it is read up to them.
    """
    # A film is sought by its index: what FFmpeg read ahead in search of a picture would be lost.
    is_film = video.index is not None
    unsure = DecodeError(video.name, "does not tell which packets hold the wanted frames")
    with open_video(video, budget, in_order=is_film) as (container, stream):
        first_size, codec = (stream.width, stream.height), stream.codec_context
        # AVI stores no presentation times: with reordering FFmpeg's own guesses are wrong. Without a picture
        # H.264 does not tell of it.
        is_avi = container.format.name == "avi"
        unknown = not is_film and codec.name in _SKIPPING_CODECS
        if is_avi and (codec.has_b_frames or unknown):
            raise unsure
        fetch: Fetch
        if video.index is None:
            packets = list(demuxed(container, stream, budget, MAX_HELD_BYTES))
            index = index_of(map(packet_row, packets))
            fetch = packets.__getitem__
        else:
            index = video.index
            fetch = _Sought(container, stream, budget, video.index, seeks)
        jumps = plan_jumps(index, num_frames, wanted)
        # Without reordering, other times than those of decoding are wrong.
        if jumps is None or not (codec.has_b_frames or index.is_in_decoding_order):
            raise unsure
        # A remuxed AVI keeps the times of decoding, in whose order its frames are not shown.
        if not is_checked or (codec.has_b_frames and index.is_in_decoding_order):
            if codec.name == "h264":
                fetch = partial(_in_order, video, stream, index, fetch)
            elif codec.has_b_frames or codec.name not in _FRAME_PER_PACKET:
                raise unsure
        num_shown = 0
        for number, frame in wanted_frames(video.name, _jumped(video.name, stream, fetch, jumps), wanted):
            # A video that changes its size is scaled by its first frame, which a jump does not see.
            if not num_shown and (frame.width, frame.height) != first_size:
                raise unsure
            yield number, frame
            num_shown += 1
        if num_shown < len(wanted):
            raise unsure


class _Sought:
    """Finds packets of a file again, by the times and checksums of its index."""

    def __init__(
        self, container: InputContainer, stream: VideoStream, budget: Budget, index: PacketIndex, seeks: bool
    ) -> None:
        self._container = container
        self._stream = stream
        self._budget = budget
        self._index = index
        self._seeks = seeks
        self._packets = demuxed(container, stream, budget)
        self._next = 0

    def __call__(self, places: slice) -> Iterator[Packet]:
        """Yield the packets at these places. Raises DecodeError if they are not found."""
        if self._seeks and places.start != self._next:
            self._container.seek(int(self._index.starts[places.start]), stream=self._stream)
            self._packets = demuxed(self._container, self._stream, self._budget)
        checksums = self._index.checksums[places].tolist()
        packets = dropwhile(lambda packet: checksum(packet) != checksums[0], self._packets)
        for expected in checksums:
            packet = next(packets, None)
            if packet is None or checksum(packet) != expected:
                raise DecodeError(self._budget.name, "does not match its index")
            yield packet
        self._next = places.stop


def checksum(packet: Packet) -> int:
    """Return the CRC-32 of what a decoder gets."""
    return zlib.crc32(cast(Any, packet), zlib.crc32(f"{packet.pts} {packet.is_keyframe} {packet.is_discard}".encode()))


# Of a packet: when it is shown, when it is decoded, whether it is a key frame, and not to be shown; its checksum.
PacketRow = tuple[int | None, int | None, bool, bool, int]


def packet_row(packet: Packet, checksum: int = 0) -> PacketRow:
    decoded = packet.pts if packet.dts is None else packet.dts
    return packet.pts, decoded, packet.is_keyframe, packet.is_discard, checksum


def index_of(packets: Iterable[PacketRow]) -> PacketIndex:
    """Return the index of packets in decoding order."""
    rows = list(packets)
    places = [place for place, (*_, is_discarded, _) in enumerate(rows) if not is_discarded]
    shown = sorted((time, place) for place in places if (time := rows[place][0]) is not None)
    if len({time for time, _ in shown}) < len(places):
        shown = []  # a frame has no time, or another one's
    key_places = [place for _, place in shown if rows[place][2]]
    is_shown_first = bool(shown) and shown[0][1] == 0
    if not rows or not rows[0][2] or not (rows[0][3] or is_shown_first) or key_places != sorted(key_places):
        shown = []  # it begins at no key frame, or with frames of an earlier one; or its times go back
    times, ordered = np.array(shown, np.int64).reshape(-1, 2).T
    keys = [number for number, (_, place) in enumerate(shown) if rows[place][2]]
    starts, checksums = [row[1] or 0 for row in rows], [row[4] for row in rows]
    numbers = np.array(keys, np.int32)
    return PacketIndex(times, ordered.astype(np.int32), numbers, np.array(starts), np.array(checksums, np.uint32))


def plan_jumps(index: PacketIndex, num_frames: int, wanted: Iterable[int]) -> list[Jump] | None:
    """Return the jumps, rising; None if the packets are not as many as frames, or do not tell which frame is which.

    A frame is decoded from the last key frame at or before it, or from the wanted frame before it if a jump would save
    too little. The first jump may be to the file's start.
    """
    if not (len(index.times) == num_frames and len(index.keys)):
        return None
    groups = [(0, list[int]())]  # the first packet, and the wanted frames that are decoded from it
    for number in sorted(wanted):
        key = int(index.keys[max(0, np.searchsorted(index.keys, number, "right") - 1)])
        decoded = groups[-1][1][-1] if groups[-1][1] else -1
        if decoded + _MIN_SAVED_FRAMES < key <= number:
            groups.append((int(index.places[key]), []))
        groups[-1][1].append(number)
    jumps = list[Jump]()
    for start, numbers in groups:
        if numbers:
            # With B-frames a packet of an earlier frame can stand behind that of a later one.
            places = slice(start, int(index.places[numbers].max()) + 1)
            jumps.append((places, dict(zip(index.times[numbers].tolist(), numbers, strict=True))))
    return jumps


def _in_order(video: Encoded, stream: VideoStream, index: PacketIndex, fetch: Fetch, places: slice) -> list[Packet]:
    """Return the packets at these places. Raises DecodeError unless their times tell the order of their frames."""
    keys = index.places[index.keys].tolist()
    starts = [places.start, *(key for key in keys if places.start < key < places.stop)]
    # No packet behind the end has a frame that is shown before one of these.
    end = min([*(key for key in keys if key >= places.stop), places.stop + _MAX_REORDERED, len(index.starts)])
    packets = list(fetch(slice(places.start, end)))
    groups = [packets[start - places.start : stop - places.start] for start, stop in pairwise([*starts, end])]
    is_sure = all(_precede(index, start, start) for start in starts) and all(_agree(stream, group) for group in groups)
    if not is_sure and video.index is None:  # open groups of pictures tell their order only from the start on
        is_sure = _agree(stream, list(fetch(slice(0, end))))
    if not (is_sure and _precede(index, places.stop, end)):
        raise DecodeError(video.name, _OTHER_ORDER)
    return packets[: places.stop - places.start]


def _precede(index: PacketIndex, stop: int, start: int) -> bool:
    """True if all frames of packets before place `stop` are shown before those from place `start` on."""
    last = np.flatnonzero(index.places < stop).max(initial=-1)
    first = np.flatnonzero(index.places >= start).min(initial=len(index.places))
    return bool(last < first)


def _agree(stream: VideoStream, packets: Sequence[Packet]) -> bool:
    """True if the headers in these packets of H.264, from a key frame on, give the order of the times.

    Where the stream says that it reorders its frames, each must have its place.
    """
    if len(packets) == 1:
        return True
    ordered = list[int | None]()
    try:
        headers = BitStreamFilterContext("dts2pts", stream)
        # The last ones have a place only if others follow.
        for number, packet in enumerate(chain(packets, islice(cycle(packets), _MAX_REORDERED))):
            copy = AnyPacket(cast(Any, packet))  # the filter empties what it gets
            copy.dts = number
            ordered += [packet.pts for packet in headers.filter(copy)]
        ordered += [packet.pts for packet in headers.filter(None)]
    except av.FFmpegError:
        return False
    shown = list[tuple[int, int]]()
    for packet, place in zip(packets, ordered, strict=False):
        if packet.pts is not None and place is not None:
            shown.append((packet.pts, place))
    places = [place for _, place in sorted(shown)]
    is_complete = len(set(places)) == len(packets)
    return places == sorted(places) and (is_complete or not stream.codec_context.has_b_frames)


def _jumped(name: str, stream: VideoStream, fetch: Fetch, jumps: Iterable[Jump]) -> Iterator[tuple[int, VideoFrame]]:
    """Yield the wanted frames with their numbers, decoded from the nearest key frames.

    Raises DecodeError where the decoder contradicts the container: a jump does not lead to a key frame, or frames are
    not shown in the order of their times.
    """
    context = stream.codec_context
    if context.name == "mpeg4":
        # The first packet may name the encoder, whose rounding the decoder imitates.
        for header in fetch(slice(0, 1)):
            stream.decode(header)
        context.flush_buffers()
    packet: Packet | None
    for places, number_of in jumps:
        key_time: int | None = None  # of the packet that a jump leads to, until its frame is seen
        shown = -math.inf
        for place, packet in enumerate(chain(fetch(places), [None]), places.start):
            if place == places.start > 0 and packet is not None:
                key_time = packet.pts
            if packet is not None and context.name in _SKIPPING_CODECS:
                context.skip_frame = "DEFAULT" if packet.pts in number_of else "NONREF"
            for frame in stream.decode(packet):
                if frame.pts is not None and frame.pts < shown:
                    raise DecodeError(name, _OTHER_ORDER)
                shown = shown if frame.pts is None else frame.pts
                if frame.pts == key_time and frame.key_frame:
                    key_time = None
                # Frames that are not to be shown have no number.
                if (number := number_of.get(frame.pts)) is not None:
                    if key_time is not None:
                        raise DecodeError(name, "has packets that its container marks as key frames wrongly")
                    yield number, frame
        context.flush_buffers()
