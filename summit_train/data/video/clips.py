"""Clips of a video file or of a folder of pictures: the chosen frames, in the chosen views.

Frame i is the i-th in presentation order, whatever a file says of times or counts. A folder holds one JPEG or PNG for
each frame, numbered without a gap; or two for each field of optical flow, see video.flow.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import struct
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple, cast

import av
import numpy as np
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from numpy.typing import NDArray
from PIL import ExifTags, Image

from summit_train.data.video.augment import View
from summit_train.data.video.decode import Playback, codec_options, count_packets, read_by_jumps, read_from_start
from summit_train.data.video.render import Frames as Frames
from summit_train.data.video.render import Renderer, turn_in
from summit_train.data.video.render import ViewsOf as ViewsOf
from summit_train.data.video.source import LIMITS, NO_HURRY, Budget, DecodeError, Encoded, Limits, VideoInfo, read_bytes
from summit_train.data.video.span import Choose as Choose

Fetch = Callable[[int], tuple[str, bytes]]

# By a picture's first bytes: its codec, and what is among its last bytes.
_PICTURES = {b"\xff\xd8": ("mjpeg", b"\xff\xd9"), b"\x89PNG": ("png", b"IEND")}
_SCAN = b"\xff\xda"  # begins the pixels of a JPEG
_TRAILING_BYTES = 256  # that some programs leave behind a picture's end
_NUMBERED = re.compile(r"(.*?)(\d+)\.(jpe?g|png)", re.IGNORECASE)
# The series of the x components of flow: flow_x_*.jpg, x_*.jpg, 000123-x_*.jpg.
_ACROSS = re.compile(r"(|.*[_-])([xX])([_-]?\*\..*)")


class Decoded(NamedTuple):
    """Clips, uint8 (K * C, T, height, width, channels), and what they were cut from and by.

    num_frames, size: the arguments of `choose` and `views_of`. frames: the numbers of the frames that are shown, int64
    (K, T), of the same count as `choose` has them. crops: the C views that `views_of` returned. Use these: drawn again
    for another number or size, keyed ones would differ.
    """

    views: Frames
    num_frames: int
    size: tuple[int, int]
    frames: NDArray[np.int64]
    crops: Sequence[View]


def read_views(
    video: Encoded,
    choose: Choose,
    views_of: ViewsOf,
    num_frames: int | None = None,
    limits: Limits = LIMITS,
    playback: Playback | None = None,
) -> Decoded:
    """Read K clips of T frames of a video in C views: uint8 RGB (K * C, T, height, width, 3), clip by clip.

    choose: from the number of frames to frame numbers int64 (K, T), in any order and with repeats. views_of: from the
    upright (width, height) in pixels to C views whose crops have one size. Both must be pure: they may be called again.
    num_frames: from the manifest; with it a video is decoded from the nearest key frames if that is certain to give
    the same frames. Without it the packets are counted and, where some can lack a frame, the frames. If the video holds
    another number of frames, `choose` is called again with the true one. A frame is decoded and scaled once. playback:
    of the earlier reads.
    Raises DecodeError if the video cannot be read, something that the wanted frames need is damaged, or it takes more
    than `limits`.
    """
    budget, playback, render = Budget(video.name, limits), playback or Playback(), Renderer(views_of)
    number, is_exact = num_frames or playback.num_frames, True
    if not number:
        number, is_exact = count_packets(video, budget)
    chosen, wanted = _chosen(choose, number)
    pictures = playback.read_on(video, wanted, render, budget) if playback.num_frames else {}
    if not pictures and num_frames:
        pictures = read_by_jumps(video, wanted, render, num_frames, budget)
    if not pictures:
        render = Renderer(views_of)
        pictures, num_seen = read_from_start(video, wanted, render, budget, to_end=not is_exact)
        if num_seen <= chosen.max() or (not is_exact and num_seen != number):
            number, render = num_seen, Renderer(views_of)
            chosen, wanted = _chosen(choose, number)
            pictures, _ = read_from_start(video, wanted, render, budget)
    playback.num_frames = number
    return Decoded(_clip_by_clip(chosen, pictures), number, render.size, chosen, render.views)


def read_picture_views(
    name: str, fetch: Fetch, choose: Choose, render: Renderer, num_frames: int, limits: Limits = LIMITS
) -> Decoded:
    """Read clips as `read_views` does, from frames that are stored as pictures of their own, in the renderer's views.

    name: of the whole, for messages. fetch: from a frame's number to its name for messages and the bytes of its JPEG or
    PNG picture; called once a frame. The first wanted frame's size counts for all. Raises DecodeError as `fetch` does,
    and for a bad picture.
    """
    chosen, wanted = _chosen(choose, num_frames)
    budget, decoders, pictures = Budget(name, limits), dict[bytes, VideoCodecContext](), dict[int, list[Frames]]()
    for number in sorted(wanted):
        _, frame = decode_picture(*fetch(number), budget, decoders)
        pictures[number] = render(frame)
    return Decoded(_clip_by_clip(chosen, pictures), num_frames, render.size, chosen, render.views)


def read_array_views(frames: Frames, choose: Choose, views_of: ViewsOf) -> Decoded:
    """Read clips as `read_views` does, from RGB frames in memory, uint8 (F, height, width, 3)."""
    (chosen, wanted), render = _chosen(choose, len(frames)), Renderer(views_of)
    pictures = dict[int, list[Frames]]()
    for number in wanted:
        pictures[number] = render(VideoFrame.from_ndarray(np.ascontiguousarray(frames[number]), "rgb24"))
    return Decoded(_clip_by_clip(chosen, pictures), len(frames), render.size, chosen, render.views)


def _chosen(choose: Choose, num_frames: int) -> tuple[NDArray[np.int64], frozenset[int]]:
    """Return the numbers of the chosen frames (K, T), and each of them once."""
    chosen = np.asarray(choose(num_frames))
    if not chosen.size or chosen.min() < 0 or chosen.max() >= num_frames:
        raise ValueError(f"the frames chosen of {num_frames} do not lie among them: {chosen.tolist()}")
    return chosen, frozenset(chosen.ravel().tolist())


def _clip_by_clip(chosen: NDArray[np.int64], pictures: dict[int, list[Frames]]) -> Frames:
    """Put the pictures of each view into the order of the chosen frames (K, T)."""
    clips = [[pictures[number] for number in row] for row in chosen.tolist()]
    return np.array([view for clip in clips for view in zip(*clip, strict=True)])


# Pictures.


def decode_picture(
    name: str, content: bytes, budget: Budget, decoders: dict[bytes, VideoCodecContext] | None = None
) -> tuple[str, VideoFrame]:
    """Return the codec and the frame of a JPEG or PNG picture. Raises DecodeError, also for one that is cut short.

    decoders: those of former pictures by what stands before the pixels; opening one takes a tenth of the decoding.
    """
    codec, end = next((kind for start, kind in _PICTURES.items() if content.startswith(start)), ("", b""))
    if not codec:
        raise DecodeError(name, "is not a JPEG or PNG picture" if content else "is empty")
    if end not in content[-_TRAILING_BYTES:]:
        raise DecodeError(name, "is cut short")
    budget.check()
    # A decoder keeps a JPEG's tables. Only those of equal ones may be used: another picture might lack its own.
    decoders, head = {} if decoders is None else decoders, content[: content.find(_SCAN)]
    decoder = decoders.get(head)
    if decoder is None:
        decoder = cast(VideoCodecContext, av.CodecContext.create(codec, "r"))
        # Else missing parts of a picture would be grey.
        decoder.options = {"err_detect": "explode", **codec_options(budget)}
        decoder.thread_count = 1
    try:
        frames = decoder.decode(Packet(content))
    except (av.FFmpegError, MemoryError) as error:
        raise DecodeError(name, f"cannot be decoded: {getattr(error, 'strerror', error)}") from error
    if len(frames) != 1:
        raise DecodeError(name, "is damaged: no picture can be decoded")
    budget.size(frames[0].width, frames[0].height)
    if head not in decoders and (codec == "mjpeg" or b"eXIf" in content) and _is_mirrored(content):
        raise DecodeError(name, "has a mirrored EXIF orientation; run mogrify -auto-orient on it")
    if codec == "mjpeg":  # a decoder of PNG pictures gives wrong pixels the second time
        decoders[head] = decoder
    return codec, frames[0]


def _is_mirrored(content: bytes) -> bool:
    """Return whether the EXIF orientation mirrors the picture, of which FFmpeg passes on an angle alone."""
    try:
        return Image.open(io.BytesIO(content)).getexif().get(ExifTags.Base.Orientation) in (2, 4, 5, 7)
    except (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError):  # damaged: no orientation
        return False


# Folders of pictures.


def is_picture(name: str) -> bool:
    """Return whether a file's name is that of a frame in a folder of pictures, such as 00001.jpg."""
    return _NUMBERED.fullmatch(name) is not None


def holds_pictures(path: str) -> bool:
    """Return whether a clip is a folder of pictures, or one picture."""
    return os.path.isdir(path) or is_picture(os.path.basename(path))


def picture_size(path: str) -> tuple[int, int]:
    """Return the width and height of an upright picture. Raises DecodeError."""
    _, frame = decode_picture(path, read_bytes(path), Budget(path, NO_HURRY))
    return turn_in(frame).size(frame.width, frame.height)


def list_pictures(folder: str, *, is_flow: bool = False) -> list[str]:
    """Return the paths of a folder's frames in order, or of its flow: x and y of the first field, of the second, ...

    Frames are one series, such as 00001.jpg or img_00001.jpg. Flow is two whose names differ in x and y alone:
    flow_x_00001.jpg and flow_y_00001.jpg, x_00001.jpg and y_00001.jpg, 000123-x_00001.jpg and 000123-y_00001.jpg.
    Other files are left out, and flow beside frames. Raises DecodeError without such a series, for several (nothing
    tells which one is the clip), for a missing number, and for a number that only x or y has. A picture file, in place
    of a folder, is a video of one frame.
    """
    if os.path.isfile(folder):
        return [folder]
    series, pairs = _series(folder)
    clips = pairs if is_flow else [(name,) for name in series if name not in chain.from_iterable(pairs)]
    if len(clips) != 1:
        what = "of flow such as flow_x_00001.jpg with flow_y_00001.jpg" if is_flow else "of frames such as 00001.jpg"
        raise DecodeError(folder, f"must hold one series {what}, got {', '.join(list(series)[:5]) or 'no picture'}")
    numbers = [{number for number, _ in series[name]} for name in clips[0]]
    if lone := numbers[0] ^ numbers[-1]:
        both = " and ".join(f"{len(series[name])} pictures {name}" for name in clips[0])
        raise DecodeError(folder, f"holds {both}: number {min(lone)} is only in one of them")
    for name in clips[0]:
        for expected, (number, file) in enumerate(series[name], start=min(numbers[0])):
            if number != expected:
                raise DecodeError(folder, f"the frame before {file} is missing, or there twice")
    ordered = [[os.path.join(folder, file) for _, file in series[name]] for name in clips[0]]
    return list(chain.from_iterable(zip(*ordered, strict=True)))


def holds_flow(folder: str) -> bool:
    """Return whether a folder's clip is optical flow: pictures of flow, and no frames. Raises DecodeError."""
    series, pairs = _series(folder)
    return bool(series) and set(series) == set(chain.from_iterable(pairs))


def list_clip(folder: str) -> tuple[list[str], int]:
    """Return the paths of a folder's pictures in order, and the number of its frames, or of fields if it is flow.

    Raises DecodeError as `list_pictures` does.
    """
    is_flow = os.path.isdir(folder) and holds_flow(folder)
    paths = list_pictures(folder, is_flow=is_flow)
    return paths, len(paths) // 2 if is_flow else len(paths)


def _series(folder: str) -> tuple[dict[str, list[tuple[int, str]]], list[tuple[str, ...]]]:
    """Return the numbers and names of a folder's pictures, in order, of each series, flow_x_*.jpg and so on.

    Return also the pairs of series that are the two components of flow, x first.
    """
    try:
        matches = [match for name in os.listdir(folder) if (match := _NUMBERED.fullmatch(name))]
    except OSError as error:
        raise DecodeError(folder, error.strerror or str(error)) from error
    series: dict[str, list[tuple[int, str]]] = {}
    for match in sorted(matches, key=lambda match: (match[1], match[3], int(match[2]), match[0])):
        series.setdefault(f"{match[1]}*.{match[3]}", []).append((int(match[2]), match[0]))
    pairs: list[tuple[str, ...]] = []
    for name in series:
        if across := _ACROSS.fullmatch(name):
            down = f"{across[1]}{'y' if across[2] == 'x' else 'Y'}{across[3]}"
            pairs += [(name, down)] if down in series else []
    return series, pairs


def read_folder_views(
    folder: str,
    choose: Choose,
    views_of: ViewsOf,
    num_frames: int | None,
    limits: Limits = LIMITS,
    *,
    is_flow: bool = False,
) -> Decoded:
    """Read clips of a folder as `read_views` does. Raises DecodeError, also for a wrong `num_frames`.

    is_flow: read its pictures of flow, uint8 grey (K * C, P, height, width, 1). `num_frames` and the argument of
    `choose` are then numbers of fields, and the result of `choose` numbers of pictures (K, P), in the order of
    `list_pictures`.
    """
    if is_flow and os.path.isfile(folder):
        raise DecodeError(folder, "is a video, and data.modality is flow: make its flow with `summit-train data flow`")
    paths = list_pictures(folder, is_flow=is_flow)
    each, what = (2, "fields of flow") if is_flow else (1, "pictures")
    if num_frames not in (None, len(paths) // each):
        raise DecodeError(folder, f"holds {len(paths) // each} {what}, but the manifest says {num_frames}")
    fetch = lambda number: (paths[number], read_bytes(paths[number]))  # noqa: E731
    render = Renderer(views_of, is_grey=is_flow)
    read = read_picture_views(folder, fetch, lambda pictures: choose(pictures // each), render, len(paths), limits)
    return read._replace(num_frames=len(paths) // each)


def probe_folder(folder: str) -> tuple[VideoInfo, str]:
    """Decode every picture; return what the folder holds and the SHA-256 of the pictures' SHA-256s, in their order.

    Of flow its fields count as frames. Raises DecodeError, also for pictures of several sizes.
    """
    paths, num_frames = list_clip(folder)
    budget, digest, first = Budget(folder, NO_HURRY), hashlib.sha256(), ("", 0, 0)
    for path in paths:
        content = read_bytes(path)
        codec, frame = decode_picture(path, content, budget)
        kind = (codec, *turn_in(frame).size(frame.width, frame.height))
        first = first if any(first) else kind
        if kind != first:
            differs = "{} {} x {}, not {} {} x {}".format(*kind, *first)
            raise DecodeError(path, f"differs from the frames before it: {differs}")
        digest.update(hashlib.sha256(content).digest())
    codec, width, height = first
    return VideoInfo(num_frames, None, width, height, None, codec), digest.hexdigest()
