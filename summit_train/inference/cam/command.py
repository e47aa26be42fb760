"""`summit-train cam RUN|CHECKPOINT VIDEO ... --out DIR`: where a trained network looks."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from summit_train.core.comm import World
from summit_train.core.files import check_output, write_text
from summit_train.core.progress import followed
from summit_train.core.session import check_single
from summit_train.core.text import share, text_table
from summit_train.data.manifest.clip import Clip
from summit_train.inference.arguments import add_network, add_videos, list_videos, open_named, tell_bad, tell_numbers
from summit_train.inference.cam.activation import Heatmap, Mapper
from summit_train.inference.cam.figure import ACROSS, Row, draw_strip
from summit_train.inference.cam.videos import MapNetwork, MappedVideo, map_videos, maps_csv, with_thresholds
from summit_train.inference.videos import Listing
from summit_train.training.start import choose_device, tell_overrides

_TABLE = "cam.csv"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_network(parser)
    add_videos(parser)
    parser.add_argument(
        "--out", metavar="DIR", type=Path, required=True, help="folder for the strips, maps and cam.csv"
    )
    parser.add_argument(
        "--class", dest="wanted", metavar="NAME|NUMBER", help="the class to map [of each video the predicted one]"
    )
    parser.add_argument("--beside", metavar="RUN|CHECKPOINT", help="a second network, below the first in each strip")
    parser.add_argument(
        "--frames", type=_number_of_frames, default=ACROSS, metavar="N|all", help="most frames in a strip [%(default)s]"
    )
    parser.add_argument(
        "--threshold", type=finite_number, action="append", default=[], metavar="VALUE",
        help="of the foreground, once for each network [what keeps 20 %% of the pixels of the validation set]",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override, of both networks")


def run(args: argparse.Namespace) -> int:
    """Map the videos; return 1 where one could not be read."""
    check_single("cam")
    networks, listings = _prepared(args)
    done, bad = list[tuple[Clip, dict[str, Any]]](), list[tuple[Clip, str]]()
    num_videos = sum(len(listing.kept) for listing in listings)
    for found in followed(map_videos(networks, listings, args.out), num_videos, "videos"):
        if isinstance(found, MappedVideo):
            _draw(found, args.frames)
            done.append((found.clip, found.save()))
        else:
            bad.append(found)
    table = args.out / _TABLE
    write_text(table, maps_csv(done))
    result = {
        "csv": str(table),
        "networks": [network.values() for network in networks],
        "videos": [video for _, video in done],
        "bad": [clip.values() | {"reason": reason} for clip, reason in bad],
    }
    print(json.dumps(result) if args.json else _text(done, networks, table))
    tell_bad(bad, num_videos, "--json names all")
    return 1 if bad else 0


def _prepared(args: argparse.Namespace) -> tuple[list[MapNetwork], tuple[Listing, ...]]:
    """Check what can be checked before the work, and find the thresholds. Raises UserError."""
    words, overrides = tell_overrides([*args.videos, *args.overrides])
    check_output("--out", args.out, args.out / _TABLE)
    runs = [args.run] + [args.beside] * bool(args.beside)
    networks = [open_named(path, overrides, args.classes) for path in runs]
    listings = list_videos(words, networks[0], use_labels=False)
    device = choose_device(World())
    mappers = [Mapper(trained, device, args.wanted) for trained in networks]
    found = with_thresholds(mappers, args.threshold, args.out, followed)
    for trained in networks:
        tell_numbers(trained)
    return found, listings


def _number_of_frames(text: str) -> int | None:
    """Parse --frames; None means all."""
    if text != "all" and not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: a number of frames, 1 or more, or all is wanted")
    return None if text == "all" else int(text)


def finite_number(text: str) -> float:
    """Parse --threshold."""
    value = float(text)  # argparse reports the ValueError
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r}: a finite number is wanted")
    return value


def _draw(video: MappedVideo, most: int | None) -> None:
    """Write a video's strip, of at most so many frames; None: of all."""
    shown = replace(video.clip, path=str(PurePath(*PurePath(video.clip.path).parts[-2:])))
    draw_strip(video.strip, str(shown), [_row(network, heatmap, most) for network, heatmap in video.maps])


def _row(network: MapNetwork, heatmap: Heatmap, most: int | None) -> Row:
    num_frames = len(heatmap.frames)
    places = np.linspace(0, num_frames - 1, min(num_frames, most or num_frames)).round().astype(int).tolist()
    share_above = share(heatmap.record(network.threshold)["foreground"])
    name = heatmap.name if network.mapper.trained.has_names else f"class {heatmap.label}"
    title = f"{name}, score {heatmap.score:.2f}, foreground {share_above}    {network.title}"
    foreground = heatmap.foreground(places, network.threshold)
    return Row(title, heatmap.frames[places].tolist(), heatmap.pictures[places], foreground)


def _text(done: Sequence[tuple[Clip, dict[str, Any]]], networks: Sequence[MapNetwork], table: Path) -> str:
    rows = [
        {
            "video": str(clip),
            "network": row["network"] if len(networks) > 1 else "",
            "class": row["class"],
            "score": f"{row['score']:.2f}",
            "mean": f"{row['mean']:.3g}",
            "peak frame": str(row["peak_frame"]),
            "foreground": share(row["foreground"]),
            "strip": video["strip"],
        }
        for clip, video in done
        for row in video["networks"]
    ]
    lines = [text_table(rows)] if rows else []
    return "\n".join([*lines, *map(_threshold_text, networks), f"all of it: {table}"])


def _threshold_text(network: MapNetwork) -> str:
    views = network.mapper.views()
    stride = f", every {views['frame_stride']}" if views["frame_stride"] else ""
    seen = f"{views['num_frames']} frames ({views['sampling']}{stride}), the {views['crop']} at {views['short_side']}"
    said = f"{network.title}: sees {seen}; threshold {network.threshold:.6g}"
    if network.record is None:
        return f"{said}, as given"
    videos = f"{network.record.videos:,} validation videos"
    left_out = f" ({len(network.record.bad_videos)} bad ones left out)" if network.record.bad_videos else ""
    kept = f"keeps {share(network.record.kept)} of the pixels of {videos}{left_out}"
    return f"{said} {kept}, {'from' if network.was_saved else 'saved in'} {network.file}"
