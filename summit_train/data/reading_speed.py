"""Estimate how many training clips a core reads per second from a file's header; nothing is decoded."""

from __future__ import annotations

import os

from summit_train.data.manifest.files import FileStore
from summit_train.data.packed.format import Packing
from summit_train.data.video.augment import scaled_size
from summit_train.data.video.clips import holds_pictures
from summit_train.data.video.decode import open_video
from summit_train.data.video.source import LIMITS, Budget, Encoded
from summit_train.spec import DataSpec

# Milliseconds on a core of an AMD EPYC 9005. _DECODE_*: of a decoded frame, per megapixel and per kB; H.264 stands for
# all other codecs (a third of its frames is skipped, as no other frame needs them). _CLIP: of a clip; _LISTED: of each
# frame in its file. _RENDER: to scale and crop a frame, fixed and per megapixel.
_DECODE_MPEG4, _DECODE_H264, _CLIP, _LISTED, _RENDER = (0.3, 0.016), (0.6, 0.06), 2.0, 0.003, (0.1, 0.6)
_PROBED_FRAMES = 5  # decoded to open a video
_PACKED_KB = 54  # of a megapixel of a packed video


def clips_per_second(store: FileStore, data: DataSpec) -> tuple[str, float, float] | None:
    """Return the first file's size and codec, its clips per second, and those after `data pack --kind video`.

    None for pictures, or without num_frames. Raises DecodeError.
    """
    path, in_file = store.path(0), store.manifest.num_frames(0)
    if in_file is None or holds_pictures(path):
        return None
    with open_video(Encoded(path), Budget(path, LIMITS)) as (_, stream):
        codec, width, height = stream.codec_context.name, stream.width, stream.height
        keys = sum(entry.is_keyframe for entry in stream.index_entries)
    usual, frames = Packing("video"), len(store.manifest.span(0).frames(path, in_file))
    across, down = scaled_size(width, height, min(usual.short_side, width, height))

    def speed(codec: str, megapixels: float, kilobytes: float, gop: float) -> float:
        by_pixel, by_byte = _DECODE_MPEG4 if codec == "mpeg4" else _DECODE_H264
        apart = data.frame_stride if data.sampling == "dense" else max(1.0, frames / data.num_frames)
        decoded = _PROBED_FRAMES + data.num_frames * min(apart, (gop + 1) / 2)
        if apart < gop:  # from the key frame before the first
            decoded += min(gop, max(0.0, frames - data.num_frames * apart)) / 2
        decoding = decoded * (by_pixel * megapixels + by_byte * kilobytes)
        rendering = data.num_frames * (_RENDER[0] + _RENDER[1] * megapixels)
        return 1000 / (_CLIP + _LISTED * frames + decoding + rendering)

    now = speed(codec, width * height / 1e6, os.path.getsize(path) / in_file / 1000, in_file / max(1, keys))
    packed = across * down / 1e6
    return f"{width}x{height} {codec}", now, speed("mpeg4", packed, _PACKED_KB * packed, usual.gop)
