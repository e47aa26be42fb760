"""Estimate how many training clips a core reads per second from a file's header; nothing is decoded."""

from __future__ import annotations

from summit_train.data.manifest.files import FileStore
from summit_train.data.packed.format import Packing
from summit_train.data.video.augment import scaled_size
from summit_train.data.video.decode import open_video
from summit_train.data.video.pictures import holds_pictures
from summit_train.data.video.source import LIMITS, Budget, DecodeError, Encoded
from summit_train.spec import DataSpec

# Milliseconds on a core of an AMD EPYC 9005. _DECODE_*: of a decoded frame, per megapixel and per kB; others count
# as H.264 (a third of its frames is skipped, as no other frame needs them). _CLIP: of a video; _LISTED: of each
# frame in its file. _RENDER: to scale and crop a frame, fixed and per megapixel. _JPEG: the rest of a picture's.
_DECODE_MPEG4, _DECODE_H264, _CLIP, _LISTED, _RENDER, _JPEG = (0.3, 0.016), (0.6, 0.06), 2.0, 0.003, (0.1, 0.6), 4.7
_PROBED_FRAMES = 5  # decoded to open a video
_PACKED_KB = 54  # of a megapixel of a packed video


def clips_per_second(store: object, data: DataSpec, clip: int) -> tuple[str, int, dict[str, float]] | None:
    """Return the size and codec of a clip's file, the short side to pack, and the speeds of files and packed kinds.

    None for all but videos with num_frames, and if the file cannot be read or its header does not list the frames.
    """
    if not isinstance(store, FileStore) or holds_pictures(path := store.path(clip)):
        return None
    try:
        with open_video(Encoded(path), Budget(path, LIMITS)) as (container, stream):
            codec, width, height = stream.codec_context.name, stream.width, stream.height
            keys, kilobytes = [entry.is_keyframe for entry in stream.index_entries], container.size / 1000
        if (in_file := store.manifest.num_frames(clip)) is None or len(keys) < in_file / 2:
            return None
        usual, frames = Packing("video"), len(store.manifest.span(clip).frames(path, in_file))
    except DecodeError:
        return None
    short_side = max(usual.short_side, data.short_side[0], data.crop)  # the least of scale jitter
    across, down = scaled_size(width, height, min(short_side, width, height))

    def speed(codec: str, megapixels: float, kilobytes: float, gop: float) -> float:
        by_pixel, by_byte = _DECODE_MPEG4 if codec == "mpeg4" else _DECODE_H264
        apart = data.frame_stride if data.sampling == "dense" else max(1.0, frames / data.num_frames)
        decoded = _PROBED_FRAMES + data.num_frames * min(apart, (gop + 1) / 2)
        if apart < gop:  # from the key frame before the first
            decoded += min(gop, max(0.0, frames - data.num_frames * apart)) / 2
        decoding = decoded * (by_pixel * megapixels + by_byte * kilobytes)
        rendering = data.num_frames * (_RENDER[0] + _RENDER[1] * megapixels)
        return 1000 / (_CLIP + _LISTED * frames + decoding + rendering)

    now = speed(codec, width * height / 1e6, kilobytes / in_file, in_file / max(1, sum(keys)))
    packed = across * down / 1e6
    video = speed("mpeg4", packed, _PACKED_KB * packed, usual.gop)
    jpeg = 1000 / data.num_frames / (_RENDER[0] + (_RENDER[1] + _JPEG) * packed)
    return f"{width}x{height} {codec}", short_side, {"files": now, "video": video, "jpeg": jpeg}
