"""`summit-train cam RUN|CHECKPOINT VIDEO ... --out DIR`: where a trained network looks."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray

from summit_train.core.comm import World
from summit_train.core.device import choose_device
from summit_train.core.files import check_output, replacing, write_text
from summit_train.core.progress import followed
from summit_train.core.result import Result, TextTable, tell
from summit_train.core.session import check_single
from summit_train.core.text import counted, csv_text, share
from summit_train.data.batches.loader import BadClip
from summit_train.data.manifest.clip import Clip, clip_columns
from summit_train.inference.arguments import add_network, checked, open_named, report_bad
from summit_train.inference.cam.maps import Heatmap, Mapper, measure_threshold
from summit_train.inference.trained import Trained
from summit_train.inference.videos import list_videos
from summit_train.report.figures import drawable, house_style
from summit_train.spec.source import split_overrides

_COLUMNS = ("label", "class", "score", "logit", "mean", "peak_frame", "foreground", "threshold", "strip", "maps")
_MOST_BYTES = 180  # of a name; file systems take 255, and endings are added

_ACROSS = 8  # most pictures side by side, as in the paper
_OPACITY = 0.5  # of the heat at its highest value
_DPI = 100
# Pixels; a picture keeps its height within them.
_LEAST_HEIGHT = 128
_MOST_HEIGHT = 256
_LEAST_WIDTH = 480
_LETTERS_PER_INCH = 12
_MOST_LETTERS = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    threshold = checked(float, math.isfinite, "a finite number")
    add_network(parser, videos=True)
    add = parser.add_argument
    add("--out", metavar="DIR", type=Path, required=True, help="folder for the strips, maps and cam.csv")
    add("--class", dest="wanted", metavar="NAME|NUMBER", help="the class to map [of each video the predicted one]")
    measured = "of the foreground [measured: what keeps 20 %% of the pixels of the validation set]"
    add("--threshold", type=threshold, metavar="VALUE", help=measured)
    add("overrides", nargs="*", metavar="key=value", help="spec keys to override")


def run(args: argparse.Namespace) -> Result:
    """Map the videos. The status is 1 where one could not be read."""
    check_single("cam")
    words, overrides = split_overrides([*args.videos, *args.overrides])
    table = args.out / "cam.csv"
    check_output("--out", args.out, table, *words)
    trained = open_named(args, overrides)
    trained.check_labels("cam")
    listings = list_videos(words, trained, tell, use_labels=False)
    mapper = Mapper(trained, choose_device(World()), args.wanted)
    measured = measure_threshold(mapper) if args.threshold is None else {"threshold": args.threshold}

    clips = [(listing, listing.clip(number)) for listing in listings for number in range(len(listing))]
    names = output_names([clip.path for _, clip in clips])
    for (_, clip), name in zip(clips, names, strict=True):  # a picture may be a clip
        check_output("--out", args.out, args.out / f"{name}.png", clip.path)
    maps = chain.from_iterable(mapper.heatmaps(listing, "skip", mapper.label) for listing in listings)
    done = list[tuple[Clip, dict[str, Any]]]()
    bad = list[tuple[Clip, str]]()
    for (listing, clip), name, found in followed(zip(clips, names, maps, strict=True), len(clips), "videos"):
        if isinstance(found, BadClip):
            bad.append((clip, listing.reason(found)))
        else:
            done.append((clip, _write(clip, args.out / name, trained, found, measured["threshold"])))

    places = clip_columns([clip for clip, _ in done])
    rows = [_COLUMNS, *([row[name] for name in _COLUMNS] for _, row in done)]
    write_text(table, csv_text([*place, *row] for place, row in zip(places, rows, strict=True)))
    network = {"name": trained.spec.name, "network": trained.spec.model.title, "checkpoint": str(trained.path)}
    values = {
        "csv": str(table),
        "network": network | measured,
        "videos": [clip.values() | row for clip, row in done],
        "bad": [clip.values() | {"reason": reason} for clip, reason in bad],
    }
    report_bad(bad, len(clips), "--json names all")
    text: list[str | TextTable] = [*_strips(done), _seen(trained, measured), f"all of it: {table}"]
    return Result(text, values=values, status=int(bool(bad)))


def _write(clip: Clip, stem: Path, trained: Trained, found: Heatmap, threshold: float) -> dict[str, Any]:
    """Write a video's strip and its map; return its row."""
    strip, file = (stem.with_name(stem.name + ending) for ending in (".png", ".npz"))
    row = found.record(threshold)
    num_frames = len(found.frames)
    places = np.linspace(0, num_frames - 1, min(num_frames, _ACROSS)).round().astype(int).tolist()
    shown = replace(clip, path=str(PurePath(*PurePath(clip.path).parts[-2:])))
    name = found.name if trained.has_names else f"class {found.label}"
    title = f"{name}, score {found.score:.2f}, foreground {share(row['foreground'])}"
    lines = (f"{shown}, {trained.spec.model.title} ({trained.spec.name})", title)
    frames = found.frames[places].tolist()
    draw_strip(strip, lines, frames, found.pictures[places], found.pixels(places), threshold)
    facts = {name: row[name] for name in ("label", "class", "score", "logit", "threshold")}
    with replacing(file) as content:
        np.savez_compressed(content, map=found.map, frames=found.frames, slices=found.slices, path=found.path, **facts)
    return row | {"strip": str(strip), "maps": str(file)}


def output_names(paths: Sequence[str]) -> list[str]:
    """Return a name for each video's output files, without ending: its stem, numbered if another video has it."""
    names: dict[str, None] = {}
    for path in paths:
        stem = PurePath(path).stem.encode("utf-8", "surrogateescape")[:_MOST_BYTES].decode("utf-8", "ignore") or "video"
        name = stem
        number = 1
        while name in names:
            number += 1
            name = f"{stem}_{number}"
        names[name] = None
    return list(names)


def _strips(done: Sequence[tuple[Clip, dict[str, Any]]]) -> list[TextTable]:
    rows = [
        {
            "video": str(clip),
            "class": row["class"],
            "score": f"{row['score']:.2f}",
            "mean": f"{row['mean']:.3g}",
            "peak frame": str(row["peak_frame"]),
            "foreground": share(row["foreground"]),
            "strip": row["strip"],
        }
        for clip, row in done
    ]
    return [TextTable.of_records(rows)] if rows else []


def _seen(trained: Trained, measured: Mapping[str, Any]) -> str:
    """Describe the frames and pixels that the network sees, and the source of the threshold."""
    spec = trained.spec
    threshold = f"{measured['threshold']:.6g}"
    stride = f", every {spec.data.frame_stride}" if spec.data.sampling == "dense" else ""
    crop = "whole frame" if spec.evaluate.crops == "full" else "centre square"
    frames = f"{counted(spec.data.num_frames, 'frame')} ({spec.data.sampling}{stride})"
    pixels = f"the {crop} at {spec.evaluate.short_side}"
    text = f"{spec.model.title} ({spec.name}): sees {frames}, {pixels}; threshold {threshold}"
    if "kept" not in measured:
        return f"{text} as given"
    left_out = f" ({len(measured['bad_videos'])} bad ones left out)" if measured["bad_videos"] else ""
    videos = f"{measured['videos']:,} validation videos{left_out}"
    return f"{text} keeps {share(measured['kept'])} of the pixels of {videos}; --threshold {threshold} skips this pass"


def heated(pictures: NDArray[np.uint8], maps: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return RGB pictures (n, H, W, 3) under the heat of maps (n, H, W): none at the lowest value, full at the highest.

    The threshold changes nothing, so a map that stays below it shows where it is highest, too.
    """
    low = float(maps.min())
    high = float(maps.max())
    levels = (maps - low) / (high - low) if high > low else np.zeros_like(maps)
    cover = _OPACITY * levels[..., None]
    return np.asarray((1 - cover) * pictures + cover * 255 * colormaps["inferno"](levels)[..., :3]).astype(np.uint8)


def draw_strip(
    path: Path, titles: Sequence[str], frames: Sequence[int], pictures: NDArray[np.uint8], maps: NDArray[np.float32],
    threshold: float,
) -> None:  # fmt: skip
    """Write a PNG of pictures, uint8 RGB (n, H, W, 3), under the heat of their maps (n, H, W), at the threshold a line.

    Each title is cut to 120 characters and wrapped.
    """
    height = min(max(pictures.shape[1], _LEAST_HEIGHT), _MOST_HEIGHT) / _DPI
    width = height * pictures.shape[2] / pictures.shape[1]
    inches = max(_LEAST_WIDTH / _DPI, len(frames) * (width + 0.05))
    text = "\n".join(textwrap.fill(drawable(one, _MOST_LETTERS), int(_LETTERS_PER_INCH * inches)) for one in titles)
    shown = heated(pictures, maps)
    with house_style():
        size = (inches, height + 0.25 + 0.2 * (1 + text.count("\n")) + 0.1)
        layout = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0, hspace=0)
        figure = Figure(figsize=size, dpi=_DPI, layout=layout)
        figure.suptitle(text, fontsize=10, parse_math=False)
        all_axes = figure.subplots(1, len(frames), squeeze=False).ravel()
        for axes, frame, picture, pixels in zip(all_axes, frames, shown, maps, strict=True):
            axes.set_axis_off()
            axes.imshow(picture)
            if pixels.min() < threshold <= pixels.max():  # matplotlib warns of an empty contour
                axes.contour(pixels, [threshold], colors="white", linewidths=1)
            axes.set_title(f"frame {frame}", fontsize=8, pad=2)
        with replacing(path) as file:
            figure.savefig(file, format="png")
