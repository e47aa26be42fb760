"""`summit-train cam RUN|CHECKPOINT VIDEO ... --out DIR`: where a trained network looks."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from summit_train.core.comm import World
from summit_train.core.errors import UserError
from summit_train.core.files import check_output, replacing, write_text
from summit_train.core.progress import followed
from summit_train.core.session import check_single
from summit_train.core.text import csv_text, share, text_table
from summit_train.data.batches.loader import BadClip
from summit_train.data.manifest.clip import Clip, clip_columns
from summit_train.inference.arguments import add_network, add_videos, checked, list_videos, open_named, tell_bad
from summit_train.inference.cam.figure import ACROSS, Row, draw_strip
from summit_train.inference.cam.maps import THRESHOLD_FILE, Heatmap, Mapper, threshold_for
from summit_train.inference.videos import Listing
from summit_train.training.start import choose_device, split_overrides

_COLUMNS = ("network", "label", "class", "score", "logit", "mean", "peak_frame", "foreground", "threshold")
_MOST_BYTES = 180  # of a name; file systems take 255, and endings are added


@dataclass(frozen=True)
class MapNetwork:
    """One of the networks, with its threshold. values: its part of the JSON."""

    mapper: Mapper
    threshold: float
    values: Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    frames = checked(
        lambda text: None if text == "all" else int(text), lambda n: n is None or n > 0, "1 or more, or all"
    )
    threshold = checked(float, math.isfinite, "a finite number")
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
        "--frames", type=frames, default=ACROSS, metavar="N|all", help="most frames in a strip [%(default)s]"
    )
    parser.add_argument(
        "--threshold", type=threshold, action="append", default=[], metavar="VALUE",
        help="of the foreground, once for each network [what keeps 20 %% of the pixels of the validation set]",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="spec keys to override, of both networks")


def run(args: argparse.Namespace) -> int:
    """Map the videos; return 1 where one could not be read."""
    check_single("cam")
    words, overrides = split_overrides([*args.videos, *args.overrides])
    table = args.out / "cam.csv"
    check_output("--out", args.out, table)
    paths = [args.run, args.beside] if args.beside else [args.run]
    if len(args.threshold) not in (0, len(paths)):
        raise UserError(f"--threshold must be given once for each network: {len(paths)}, got {len(args.threshold)}")
    trained = [open_named(path, overrides, args.classes) for path in paths]
    listings = list_videos(words, trained[0], use_labels=False)
    device = choose_device(World())
    mappers = [Mapper(one, device, args.wanted) for one in trained]
    networks = _with_thresholds(mappers, args.threshold, args.out)

    clips = [listing.clip(number) for listing in listings for number in listing.numbers]
    names = output_names([clip.path for clip in clips])
    done, bad = list[tuple[Clip, dict[str, Any]]](), list[tuple[Clip, str]]()
    maps = zip(clips, names, _map_videos(mappers, listings), strict=True)
    for clip, name, found in followed(maps, len(clips), "videos"):
        if isinstance(found, str):
            bad.append((clip, found))
        else:
            done.append((clip, _write(clip, args.out / name, networks, found, args.frames)))

    write_text(table, maps_csv(done))
    result = {
        "csv": str(table),
        "networks": [network.values for network in networks],
        "videos": [video for _, video in done],
        "bad": [clip.values() | {"reason": reason} for clip, reason in bad],
    }
    print(json.dumps(result) if args.json else _text(done, networks, table))
    tell_bad(bad, len(clips), "--json names all")
    return 1 if bad else 0


def _with_thresholds(mappers: Sequence[Mapper], given: Sequence[float], out: Path) -> list[MapNetwork]:
    networks = []
    for number, mapper in enumerate(mappers):
        trained = mapper.trained
        values: dict[str, Any] = {"name": trained.spec.name, "network": trained.spec.model.title, "was_saved": False}
        values |= {"checkpoint": str(trained.path), "views": mapper.views}
        if given:
            values |= {"threshold": given[number]}
        else:
            record, file, was_saved = threshold_for(mapper, out / ("cam_beside.json" if number else THRESHOLD_FILE))
            values |= {"file": str(file), "was_saved": was_saved, **record}
        networks.append(MapNetwork(mapper, values["threshold"], values))
    return networks


def _map_videos(mappers: Sequence[Mapper], listings: Sequence[Listing]) -> Iterator[tuple[Heatmap, ...] | str]:
    """Yield the maps of each video, one of each network; or why it cannot be read."""
    # Opened before the long work: a packed set that is damaged is refused here.
    stores = [[listing.store(mapper.trained.spec.data) for mapper in mappers] for listing in listings]
    for listing, its_stores in zip(listings, stores, strict=True):
        walks = [
            mapper.heatmaps(store, listing.numbers, "skip", mapper.label)
            for mapper, store in zip(mappers, its_stores, strict=True)
        ]
        for found in zip(*walks, strict=True):
            bad = [one for one in found if isinstance(one, BadClip)]
            yield listing.reason(bad[0]) if bad else tuple(one for one in found if isinstance(one, Heatmap))


def _write(
    clip: Clip, stem: Path, networks: Sequence[MapNetwork], maps: Sequence[Heatmap], most: int | None
) -> dict[str, Any]:
    """Write a video's strip, of at most `most` frames, and its maps; return its part of the JSON."""
    strip, file = (stem.with_name(stem.name + ending) for ending in (".png", ".npz"))
    rows, arrays, records = list[Row](), dict[str, Any](), list[dict[str, Any]]()
    for network, heatmap, prefix in zip(networks, maps, ("", "beside_"), strict=False):
        record = heatmap.record(network.threshold)
        records.append({"network": network.mapper.title, **record})
        arrays |= {prefix + name: value for name, value in heatmap.arrays(network.threshold).items()}
        num_frames = len(heatmap.frames)
        places = np.linspace(0, num_frames - 1, min(num_frames, most or num_frames)).round().astype(int).tolist()
        name = heatmap.name if network.mapper.trained.has_names else f"class {heatmap.label}"
        title = f"{name}, score {heatmap.score:.2f}, foreground {share(record['foreground'])}    {network.mapper.title}"
        foreground = heatmap.foreground(places, network.threshold)
        rows.append(Row(title, heatmap.frames[places].tolist(), heatmap.pictures[places], foreground))
    shown = replace(clip, path=str(PurePath(*PurePath(clip.path).parts[-2:])))
    draw_strip(strip, str(shown), rows)
    with replacing(file) as content:
        np.savez_compressed(content, **arrays)
    return clip.values() | {"strip": str(strip), "maps": str(file), "networks": records}


def output_names(paths: Sequence[str]) -> list[str]:
    """Return a name for each video's output files, without ending: its stem, numbered where another one has it."""
    names: dict[str, None] = {}
    for path in paths:
        stem = PurePath(path).stem.encode("utf-8", "surrogateescape")[:_MOST_BYTES].decode("utf-8", "ignore") or "video"
        name, number = stem, 1
        while name in names:
            number += 1
            name = f"{stem}_{number}"
        names[name] = None
    return list(names)


def maps_csv(videos: Sequence[tuple[Clip, Mapping[str, Any]]]) -> str:
    """Return the table of videos: a line for each video and network."""
    lines = [(clip, video, row) for clip, video in videos for row in video["networks"]]
    rows = [[*(row[name] for name in _COLUMNS), video["strip"], video["maps"]] for _, video, row in lines]
    places = clip_columns([clip for clip, _, _ in lines])
    return csv_text([*place, *row] for place, row in zip(places, [[*_COLUMNS, "strip", "maps"], *rows], strict=True))


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
    for network in networks:
        values, views = network.values, network.mapper.views
        stride = f", every {views['frame_stride']}" if views["frame_stride"] else ""
        seen = (
            f"{views['num_frames']} frames ({views['sampling']}{stride}), the {views['crop']} at {views['short_side']}"
        )
        text = f"{network.mapper.title}: sees {seen}; threshold {network.threshold:.6g}"
        if "kept" not in values:
            lines.append(f"{text}, as given")
            continue
        left_out = f" ({len(values['bad_videos'])} bad ones left out)" if values["bad_videos"] else ""
        kept = f"keeps {share(values['kept'])} of the pixels of {values['videos']:,} validation videos{left_out}"
        lines.append(f"{text} {kept}, {'from' if values['was_saved'] else 'saved in'} {values['file']}")
    return "\n".join([*lines, f"all of it: {table}"])
