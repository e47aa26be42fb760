"""Pictures as files: their decoding, and the folders that hold one for each frame of a video.

A folder holds one JPEG or PNG for each frame, numbered without a gap; or two for each field of optical flow, see
video.flow.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import struct
from itertools import chain
from typing import cast

import av
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from PIL import ExifTags, Image

from summit_train.data.video.decode import codec_options
from summit_train.data.video.render import upright_size
from summit_train.data.video.source import NO_HURRY, Budget, DecodeError, VideoInfo, file_errors, read_bytes

# By a picture's first bytes: its codec, and what is among its last bytes.
_PICTURES = {b"\xff\xd8": ("mjpeg", b"\xff\xd9"), b"\x89PNG": ("png", b"IEND")}
_SCAN = b"\xff\xda"  # begins the pixels of a JPEG
_TRAILING_BYTES = 256  # that some programs leave behind a picture's end
_NUMBERED = re.compile(r"(.*?)(\d+)\.(jpe?g|png)", re.IGNORECASE)
# The series of the x components of flow: flow_x_*.jpg, x_*.jpg, 000123-x_*.jpg.
_ACROSS = re.compile(r"(|.*[_-])([xX])([_-]?\*\..*)")


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
    decoders = {} if decoders is None else decoders
    head = content[: content.find(_SCAN)]
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
    """Tell a mirrored picture by its EXIF orientation, of which FFmpeg passes on only the angle."""
    try:
        return Image.open(io.BytesIO(content)).getexif().get(ExifTags.Base.Orientation) in (2, 4, 5, 7)
    except (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError):  # damaged: no orientation
        return False


# Folders of pictures.


def is_picture(name: str) -> bool:
    """Tell the frames in a folder of pictures by their names, such as 00001.jpg."""
    return _NUMBERED.fullmatch(name) is not None


def holds_pictures(path: str) -> bool:
    """Tell a folder of pictures, or a single picture, from a video."""
    return os.path.isdir(path) or is_picture(os.path.basename(path))


def picture_size(path: str) -> tuple[int, int]:
    """Return the width and height of an upright picture. Raises DecodeError."""
    _, frame = decode_picture(path, read_bytes(path), Budget(path, NO_HURRY))
    return upright_size(frame)


def list_pictures(folder: str, *, is_flow: bool = False) -> list[str]:
    """Return the paths of a folder's frames in order, or of its flow: x and y of the first field, of the second, ...

    Frames are one series, such as 00001.jpg or img_00001.jpg. Flow is two whose names differ in x and y alone:
    flow_x_00001.jpg and flow_y_00001.jpg, x_00001.jpg and y_00001.jpg, 000123-x_00001.jpg and 000123-y_00001.jpg.
    Other files are left out, and so is flow where there are frames. Raises DecodeError without such a series, for
    several (nothing tells which one is the clip), for a missing number, and for a number that only x or y has. A
    picture file, in place of a folder, is a video of one frame.
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
    """Tell a folder of optical flow, which has no frames, from one of frames. Raises DecodeError."""
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
    with file_errors(folder):
        matches = [match for name in os.listdir(folder) if (match := _NUMBERED.fullmatch(name))]
    series: dict[str, list[tuple[int, str]]] = {}
    for match in sorted(matches, key=lambda match: (match[1], match[3], int(match[2]), match[0])):
        series.setdefault(f"{match[1]}*.{match[3]}", []).append((int(match[2]), match[0]))
    pairs: list[tuple[str, ...]] = []
    for name in series:
        if across := _ACROSS.fullmatch(name):
            down = f"{across[1]}{'y' if across[2] == 'x' else 'Y'}{across[3]}"
            pairs += [(name, down)] if down in series else []
    return series, pairs


def probe_folder(folder: str) -> VideoInfo:
    """Decode every picture and return what the folder holds.

    Its SHA-256 is that of the pictures' SHA-256s, in their order. Of flow its fields count as frames. Raises
    DecodeError, also for pictures of several sizes.
    """
    paths, num_frames = list_clip(folder)
    budget = Budget(folder, NO_HURRY)
    digest = hashlib.sha256()
    first = ("", 0, 0)
    for path in paths:
        content = read_bytes(path)
        codec, frame = decode_picture(path, content, budget)
        kind = (codec, *upright_size(frame))
        first = first if any(first) else kind
        if kind != first:
            differs = "{} {} x {}, not {} {} x {}".format(*kind, *first)
            raise DecodeError(path, f"differs from the frames before it: {differs}")
        digest.update(hashlib.sha256(content).digest())
    codec, width, height = first
    return VideoInfo(num_frames, None, width, height, None, codec, digest.hexdigest())
