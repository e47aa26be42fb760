"""Clips a second of one core: H.264 by decord, and by this package's loader, from the files and packed as JPEG.

    .venv/bin/pip install -c jobs/constraints.txt decord        (a bench-only extra: [bench] in setup.cfg)
    python bench/decode.py [--pairs N] [--clips FOLDER] [--json]

Videos of 340x256, 300 frames, 30 fps, x264's defaults with a key frame every 250 (its default) and every 12 frames, of
the content of the videos in --clips, else generated. A clip is 8 frames of a window of 64 from a random start, with the
training's scale (short side 256 to 320), crop (224) and mirroring. In each round decord reads some clips, then `bench
loader` measures ours; ratios are taken within a round. decord scales on its one thread and gives numpy arrays. Exit
status 1 where a ratio misses its goal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import decord
import numpy as np
from av.video.frame import VideoFrame

from summit_train.bench.measure import pair_ratios, spread, spread_text
from summit_train.core import rng
from summit_train.core.processes import answer
from summit_train.core.result import TextTable
from summit_train.data.motion import MotionSet
from summit_train.data.video import augment
from summit_train.spec import DataSpec

WIDTH, HEIGHT, NUM_FRAMES, FPS = 340, 256, 300, 30
GOPS = (250, 12)
DATA = DataSpec(train="clips.csv", val="clips.csv")  # the defaults are the clip that is described above
GOALS = {"raw / decord": 1.3, "packed jpeg / raw": 8.0}  # with distant key frames
SPEC = Path(__file__).resolve().parents[1] / "configs" / "kinetics" / "tsm_r50_8f.yaml"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, metavar="N", help="rounds for each GOP (default 7)")
    parser.add_argument("--draws", type=int, default=2, metavar="N", help="clips of each video in a round (default 2)")
    parser.add_argument("--clips", type=Path, metavar="FOLDER", help="videos to take the content from")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    contents = [content(path) for path in (sorted(args.clips.iterdir()) if args.clips is not None else [None])]
    with tempfile.TemporaryDirectory() as folder:
        results = [measured(Path(folder), contents, gop, args) for gop in GOPS]
    lines = [f"load: {os.getloadavg()[0]:.1f}"]
    for result in results:
        rows = [("", "clips/s, median (min .. max)")]
        rows += [(name, spread_text(values, ".1f")) for name, values in result["clips_per_second"].items()]
        rows += [(name, spread_text(values, ".2f")) for name, values in result["ratios"].items()]
        lines.append(f"\nkey frame every {result['gop']} frames\n{TextTable(rows, indent='  ')}")
    values = {"load": os.getloadavg()[0], "goals": GOALS, "gops": results}
    print(json.dumps(values) if args.json else "\n".join(lines))
    return int(any(results[0]["ratios"][name]["median"] < goal for name, goal in GOALS.items()))


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
    """Measure clips/s and ratios for one distance of key frames."""
    home = folder / f"gop_{gop}"
    home.mkdir()
    paths = [home / f"{number}.mp4" for number in range(len(contents))]
    for path, frames in zip(paths, contents, strict=True):
        encode(path, frames, gop)
    manifest = home / "clips.csv"
    manifest.write_text("path,label\n" + "".join(f"{path.name},0\n" for path in paths))
    num_clips = len(paths) * args.draws
    keys = [f"data.train={manifest}", f"data.val={manifest}", f"data.root={home}", "model.num_classes=2"]
    turns = ["--clips", str(num_clips), "--repeats", "1", "--workers", "1", "--json"]
    loader = [sys.executable, "-m", "summit_train", "bench", "loader", str(SPEC), *keys, *turns]
    by_decord(paths, 0)  # warms up
    rates: dict[str, list[float]] = {"decord": [], "raw": [], "packed jpeg": []}
    for turn in range(args.pairs):
        began = time.perf_counter()
        for draw in range(args.draws):
            by_decord(paths, turn * args.draws + draw)
        rates["decord"].append(num_clips / (time.perf_counter() - began))
        for kind in answer(loader, timeout=600)["kinds"]:
            if kind["kind"] in rates:
                rates[kind["kind"]].append(kind["clips_per_second_core"]["median"])
    pairs = {name: name.split(" / ") for name in (*GOALS, "packed jpeg / decord")}
    ratios = {name: spread(pair_ratios(rates[a], rates[b])) for name, (a, b) in pairs.items()}
    return {"gop": gop, "clips_per_second": {name: spread(found) for name, found in rates.items()}, "ratios": ratios}


def by_decord(paths: Sequence[Path], draw: int) -> None:
    """Read a clip of each video as the loader draws it."""
    for clip, path in enumerate(paths):
        cut = augment.train_view(DATA, WIDTH, HEIGHT, rng.key(0, "augment", draw, clip))
        reader = decord.VideoReader(str(path), num_threads=1, width=cut.width, height=cut.height)
        generator = rng.key(0, "sampling", draw, clip)
        numbers = augment.train_frames(DATA.sampling, len(reader), DATA.num_frames, DATA.frame_stride, generator)
        frames = reader.get_batch(numbers).asnumpy()[:, cut.y : cut.y + cut.crop_height, cut.x : cut.x + cut.crop_width]
        np.ascontiguousarray(frames[:, :, ::-1] if cut.flip else frames)


if __name__ == "__main__":
    sys.exit(main())
