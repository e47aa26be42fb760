"""Clips a second of one core and one thread: raw H.264 by summit_train and by decord, and packed as JPEG.

    .venv/bin/pip install -c jobs/constraints.txt decord        (a bench-only extra: [bench] in setup.cfg)
    python bench/decode.py [--pairs N] [--clips FOLDER] [--json]

Videos of 340x256, 300 frames, 30 fps, x264's defaults with a key frame every 250 (its default) and every 12 frames, of
the content of the videos in --clips, else generated. A clip is 8 frames of a window of 64 from a random start, with the
training's scale (short side 256 to 320), crop (224) and mirroring. In each round each reader reads the same clips, one
reader after the other, every second round in the other order; ratios are taken within a round. decord scales on its
one thread and gives numpy arrays. Exit status 1 where the frames are not decord's, or a ratio misses its goal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import av
import decord
import numpy as np
from av.video.frame import VideoFrame
from numpy.typing import NDArray

from summit_train.bench.loader import sampled, subject_of
from summit_train.bench.measure import in_turn, pair_ratios, spread, spread_text
from summit_train.core import rng
from summit_train.core.memory import keep_freed_frames
from summit_train.core.text import table
from summit_train.data.batches.stores import Store
from summit_train.data.manifest import ManifestRow, read_manifest, write_manifest
from summit_train.data.motion import MotionSet
from summit_train.data.video import augment
from summit_train.data.video.clips import single
from summit_train.spec import DataSpec

Frames = NDArray[np.uint8]
Reader = Callable[[int, int], Frames]  # of a video's number and the draw
WIDTH, HEIGHT, NUM_FRAMES, FPS = 340, 256, 300, 30
GOPS = (250, 12)
DATA = DataSpec(train="clips.csv", val="clips.csv")  # the defaults are the clip that is described above
GOALS = {"raw / decord": 1.3, "packed jpeg / raw": 8.0}  # with distant key frames
# Mean absolute difference from decord in levels of 0 .. 255: two ways to scale and to make RGB.
TOLERANCE = {"raw": 2.5, "packed jpeg": 5.0}


def main() -> int:
    """Make the videos, pack them, read them in turn, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, metavar="N", help="rounds for each GOP (default 7)")
    parser.add_argument("--draws", type=int, default=2, metavar="N", help="clips of each video in a round (default 2)")
    parser.add_argument("--clips", type=Path, metavar="FOLDER", help="videos to take the content from")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    keep_freed_frames()  # as the loader's workers do
    paths = sorted(args.clips.iterdir()) if args.clips is not None else [None]
    contents = [content(path) for path in paths]
    with tempfile.TemporaryDirectory() as folder:
        results = [measured(Path(folder), contents, gop, args) for gop in GOPS]
    load = os.getloadavg()[0]
    if args.json:
        print(json.dumps({"load": load, "goals": GOALS, "gops": results}))
    else:
        print(f"load of the machine: {load:.1f}; {len(contents)} videos\n" + "\n".join(map(as_text, results)))
    return 0 if all(result["is_same"] and result["is_fast"] for result in results) else 1


def content(path: Path | None) -> list[VideoFrame]:
    """Return a video's frames at the benchmark's size, there and back until there are enough; None: generated."""
    if path is None:
        frames, _ = MotionSet(size=WIDTH, num_frames=NUM_FRAMES).video("train", 0)
        return [VideoFrame.from_ndarray(frame, "rgb24").reformat(WIDTH, HEIGHT, "yuv420p") for frame in frames]
    with av.open(str(path)) as container:
        found = [frame.reformat(WIDTH, HEIGHT, "yuv420p") for frame in container.decode(video=0)][:NUM_FRAMES]
    return list(itertools.islice(itertools.cycle(found + found[-2:0:-1]), NUM_FRAMES))


def encode(path: Path, frames: list[VideoFrame], gop: int) -> None:
    """Write an H.264 video with x264's defaults but for the distance of key frames."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.codec_context.gop_size = gop
        stream.codec_context.thread_count = 1
        for number, frame in enumerate(frames):
            frame.pts, frame.time_base, frame.pict_type = number, Fraction(1, FPS), 0
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def measured(folder: Path, contents: list[list[VideoFrame]], gop: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure rates and ratios for one distance of key frames."""
    home = folder / f"gop_{gop}"
    home.mkdir()
    paths = [home / f"{number}.mp4" for number in range(len(contents))]
    for path, frames in zip(paths, contents, strict=True):
        encode(path, frames, gop)
    write_manifest(home / "clips.csv", (ManifestRow(path.name, 0, NUM_FRAMES) for path in paths))
    raw = subject_of(DATA, read_manifest(home / "clips.csv"), 0)
    readers: dict[str, Reader] = {"decord": partial(by_decord, paths)}
    kept = (subject for subject in sampled(raw, len(paths), home) if subject.name in TOLERANCE)
    readers |= {subject.name: partial(by_store, subject.store) for subject in kept}
    same = compared(readers, paths)  # which also warms up
    seconds: dict[str, list[float]] = {name: [] for name in readers}

    def turn(name: str) -> float:
        began, first = time.perf_counter(), 1 + len(seconds[name]) * args.draws
        for draw, clip in itertools.product(range(first, first + args.draws), range(len(paths))):
            readers[name](clip, draw)
        return time.perf_counter() - began

    for name, taken in in_turn({name: partial(turn, name) for name in readers}, args.pairs):
        seconds[name].append(taken)
    pairs = {name: name.split(" / ") for name in (*GOALS, "packed jpeg / decord")}
    ratios = {name: spread(pair_ratios(seconds[b], seconds[a])) for name, (a, b) in pairs.items()}
    num_clips = len(paths) * args.draws
    return {
        "gop": gop,
        "clips_per_second": {name: spread([num_clips / one for one in found]) for name, found in seconds.items()},
        "ratios": ratios,
        "pairs": args.pairs,
        "clips": num_clips,
        "same": same,
        "is_same": same["nearest_is_the_frame"] and all(same[name] <= TOLERANCE[name] for name in TOLERANCE),
        "is_fast": gop != GOPS[0] or all(ratios[name]["median"] >= goal for name, goal in GOALS.items()),
    }


def by_store(store: Store, clip: int, draw: int) -> Frames:
    """Return a training clip from a store."""
    return store.read_views(clip, *single(partial(chosen, clip, draw), partial(view, clip, draw)))[0]


def chosen(clip: int, draw: int, num_frames: int) -> NDArray[np.int64]:
    """Return the frames of a training clip, as the loader draws them."""
    generator = rng.key(0, "sampling", draw, clip)
    return augment.train_frames(DATA.sampling, num_frames, DATA.num_frames, DATA.frame_stride, generator)


def view(clip: int, draw: int, width: int, height: int) -> augment.View:
    """Return the view of a training clip, as the loader draws it."""
    generator = rng.key(0, "augment", draw, clip)
    how = augment.Augmentation(DATA.augment, DATA.short_side, DATA.crop, DATA.flip)
    return augment.train_view(how, width, height, generator)


def by_decord(paths: Sequence[Path], clip: int, draw: int, shift: int = 0) -> Frames:
    """Return the same clip as decord gives it. shift: that many frames later."""
    cut = view(clip, draw, WIDTH, HEIGHT)
    reader = decord.VideoReader(str(paths[clip]), num_threads=1, width=cut.width, height=cut.height)
    numbers = np.clip(chosen(clip, draw, len(reader)) + shift, 0, len(reader) - 1)
    frames = reader.get_batch(numbers).asnumpy()[:, cut.y : cut.y + cut.crop_height, cut.x : cut.x + cut.crop_width]
    return np.ascontiguousarray(frames[:, :, ::-1] if cut.flip else frames)


def compared(readers: dict[str, Reader], paths: Sequence[Path]) -> dict[str, Any]:
    """Return mean absolute differences from decord's pixels, and whether its frames before and after differ more."""
    worst, nearest = dict.fromkeys(TOLERANCE, 0.0), True
    for clip in range(len(paths)):
        frames = {name: read(clip, 0) for name, read in readers.items()}
        for name in worst:
            worst[name] = max(worst[name], difference(frames[name], frames["decord"]))
        own = difference(frames["raw"], frames["decord"])
        nearest &= all(own < difference(frames["raw"], by_decord(paths, clip, 0, shift)) for shift in (-1, 1))
    return worst | {"nearest_is_the_frame": nearest}


def difference(one: Frames, other: Frames) -> float:
    """Return the mean absolute difference in levels."""
    return float(np.abs(one.astype(np.int16) - other).mean())


def as_text(result: dict[str, Any]) -> str:
    """Format the results for one distance of key frames."""
    same = result["same"]
    rows = [("", "clips/s, median (min .. max)")]
    rows += [(name, spread_text(values, ".1f")) for name, values in result["clips_per_second"].items()]
    rows += [(name, spread_text(values, ".2f")) for name, values in result["ratios"].items()]
    return (
        f"\nkey frame every {result['gop']} frames, {result['pairs']} rounds of {result['clips']} clips\n"
        f"{table(rows)}\n"
        f"  mean difference from decord's pixels in levels, worst video: raw {same['raw']:.2f}, "
        f"packed jpeg {same['packed jpeg']:.2f}\n"
        f"  decord's frames before and after are further off: {'yes' if same['nearest_is_the_frame'] else 'NO'}"
    )


if __name__ == "__main__":
    sys.exit(main())
