r"""Measure decoders in turn on one core, in clips per second: this loader, torchcodec, decord, OpenCV and plain PyAV.

Each opens a video, takes 8 frames, 8 apart, from a random place, scales their short side to 256 and crops the centre
of 224 x 224 pixels, as uint8 RGB. Decoders that are not installed are left out. torchcodec needs FFmpeg's shared
libraries under their own names (libavcodec.so.62 and so on): links to those in av.libs of PyAV's wheel are enough.

    LD_LIBRARY_PATH=links:av.libs OMP_NUM_THREADS=1 taskset -c 0 python bench/decoders.py --repeats 9 VIDEO...
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import av
import numpy as np

from summit_train.bench.measure import in_turn, spread
from summit_train.core.machine import keep_freed_frames
from summit_train.core.result import TextTable
from summit_train.data.video.augment import View, scaled_size
from summit_train.data.video.clips import VideoClip
from summit_train.data.video.source import load_video
from summit_train.data.video.stream import probe

FRAMES, STRIDE, SHORT_SIDE, CROP = 8, 8, 256, 224
# A video: its path, the number of its frames, and its (width, height) at SHORT_SIDE.
Video = tuple[str, int, tuple[int, int]]
Read = Callable[[Video, Sequence[int]], Any]  # the wanted frames, (FRAMES, CROP, CROP, 3)


def cropped(pictures: Any) -> Any:
    top, left = ((side - CROP) // 2 for side in pictures.shape[1:3])
    return pictures[:, top : top + CROP, left : left + CROP]


def with_summit_train(video: Video, wanted: Sequence[int]) -> Any:
    path, num_frames, size = video
    view = View(*size, *((side - CROP) // 2 for side in size), CROP, CROP)
    clip = VideoClip(load_video(path, None), num_frames, is_checked=True)
    return clip.read(np.array([wanted]), [view])[0]


def with_pyav(video: Video, wanted: Sequence[int]) -> Any:
    path, _, size = video
    pictures, every = [], set(wanted)
    with av.open(path) as container:
        stream = container.streams.video[0]
        assert stream.average_rate is not None and stream.time_base is not None
        ticks = float(1 / stream.average_rate / stream.time_base)
        container.seek(int(wanted[0] * ticks), stream=stream)
        for frame in container.decode(stream):
            assert frame.pts is not None
            if round(frame.pts / ticks) in every:
                pictures.append(frame.reformat(*size, "rgb24", interpolation="BILINEAR").to_ndarray())
                if len(pictures) == len(wanted):
                    break
    return cropped(np.stack(pictures))


def with_opencv(video: Video, wanted: Sequence[int]) -> Any:
    import cv2

    path, _, size = video
    reader, pictures, every = cv2.VideoCapture(path, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1]), [], set(wanted)
    reader.set(cv2.CAP_PROP_POS_FRAMES, wanted[0])
    for number in range(wanted[0], wanted[-1] + 1):
        assert reader.grab()
        if number in every:
            pictures.append(cropped(cv2.resize(reader.retrieve()[1], size)[None])[0])
    return np.stack([cv2.cvtColor(picture, cv2.COLOR_BGR2RGB) for picture in pictures])


def with_decord(video: Video, wanted: Sequence[int]) -> Any:
    from decord import VideoReader

    path, _, (width, height) = video
    return cropped(VideoReader(path, width=width, height=height, num_threads=1).get_batch(wanted).asnumpy())


def with_torchcodec(video: Video, wanted: Sequence[int]) -> Any:
    from torchcodec.decoders import VideoDecoder
    from torchcodec.transforms import CenterCrop, Resize

    path, _, size = video
    how = [Resize(size[::-1]), CenterCrop([CROP, CROP])]
    decoder = VideoDecoder(path, dimension_order="NHWC", num_ffmpeg_threads=1, transforms=how)
    return decoder.get_frames_at(list(wanted)).data.numpy()


DECODERS: dict[str, tuple[str, Read]] = {
    "summit_train": ("av", with_summit_train),
    "torchcodec": ("torchcodec", with_torchcodec),
    "decord": ("decord", with_decord),
    "OpenCV": ("cv2", with_opencv),
    "PyAV": ("av", with_pyav),
}


def seconds(read: Read, videos: Sequence[Video], turn: Any) -> float:
    draw, began = random.Random(next(turn)), time.perf_counter()
    for video in videos:
        first = draw.randrange(video[1] - (FRAMES - 1) * STRIDE)
        assert read(video, range(first, first + FRAMES * STRIDE, STRIDE)).shape == (FRAMES, CROP, CROP, 3)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("videos", nargs="+", metavar="VIDEO")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="measurements, of a clip of each video [9]")
    args = parser.parse_args()
    keep_freed_frames()
    videos = list[Video]()
    for path in args.videos:
        info = probe(load_video(path, None))
        assert info.can_jump, path
        videos.append((path, info.num_frames, scaled_size(info.width, info.height, SHORT_SIDE)))
    used = {name: read for name, (module, read) in DECODERS.items() if find_spec(module)}
    turns = {name: partial(seconds, read, videos, iter(range(args.repeats + 1))) for name, read in used.items()}
    taken: dict[str, list[float]] = {name: [] for name in used}
    for name, one in in_turn(turns, args.repeats + 1):
        taken[name].append(one)
    rates = {name: spread([len(videos) / one for one in all_[1:]]) for name, all_ in taken.items()}  # one warms up
    rows, own = [("clips/s", "median", "least", "most", "/ summit_train")], rates["summit_train"]["median"]
    for name, rate in rates.items():
        each = (f"{rate[which]:.1f}" for which in ("median", "min", "max"))
        rows.append((name, *each, f"{rate['median'] / own:.2f}"))
    print(TextTable(rows))


if __name__ == "__main__":
    main()
