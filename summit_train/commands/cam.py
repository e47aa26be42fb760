"""`summit-train cam RUN|CHECKPOINT VIDEO ... --out DIR`: where a trained network looks."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from summit_train.comm import World
from summit_train.commands.progress import followed
from summit_train.commands.ranks import this_launch
from summit_train.commands.start import choose_device
from summit_train.data.batches.loader import BadClip
from summit_train.errors import UserError
from summit_train.files import write_text
from summit_train.inference.cam import Heatmap, Mapper
from summit_train.inference.cam_files import csv_text, find_videos, output_names, save_maps, video_store
from summit_train.inference.threshold import Threshold, threshold_for
from summit_train.inference.trained import open_trained
from summit_train.report.cam import ACROSS, Row, draw_strip
from summit_train.text import share, text_table

_BESIDE_FILE = "cam_beside.json"


@dataclass(frozen=True)
class _Network:
    """A network with its threshold. record, file, was_saved: where it comes from; None where it was given."""

    mapper: Mapper
    threshold: float
    record: Threshold | None = None
    file: Path | None = None
    was_saved: bool = False

    @property
    def title(self) -> str:
        spec = self.mapper.trained.spec
        return f"{spec.model.title} ({spec.name})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("trained", metavar="RUN|CHECKPOINT", help="folder of a run (its newest checkpoint), or a file")
    parser.add_argument("videos", metavar="VIDEO", nargs="+", help="video files and folders of them")
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
    if this_launch().size > 1:
        raise UserError("cam is one process and shares no work among ranks; start it without mpirun, srun or jsrun")
    given = [text for text in args.videos if Path(text).exists() or not re.match(r"[a-z_.0-9]+=", text)]
    overrides = [*(text for text in args.videos if text not in given), *args.overrides]
    videos = find_videos(given)
    if not videos:
        raise UserError("there is no video among the arguments; give files, or folders of them")
    _check_folder(args.out)
    device = choose_device(World())
    runs = [args.trained] + [args.beside] * bool(args.beside)
    mappers = [Mapper(open_trained(path, overrides), device, args.wanted) for path in runs]
    if len(args.threshold) > len(mappers):
        raise UserError(f"--threshold stands there {len(args.threshold)} times, for {len(mappers)} networks")
    networks = [_with_threshold(mapper, number, args) for number, mapper in enumerate(mappers)]
    done, bad = _map_videos(networks, videos, args)
    table = args.out / "cam.csv"
    write_text(table, csv_text(done))
    result = {
        "csv": str(table),
        "networks": [_about(network) for network in networks],
        "videos": done,
        "bad": [{"path": one.path, "reason": one.reason} for one in bad],
    }
    print(json.dumps(result) if args.json else _text(result, networks))
    for one in bad:
        print(f"summit-train: {one.path}: {one.reason}", file=sys.stderr)
    return 1 if bad else 0


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


def _check_folder(out: Path) -> None:
    """Make the folder. Raises UserError where it cannot be written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written to: {error.strerror}; a folder is wanted") from error


def _with_threshold(mapper: Mapper, number: int, args: argparse.Namespace) -> _Network:
    if number < len(args.threshold):
        return _Network(mapper, args.threshold[number])
    beside = args.out / (_BESIDE_FILE if number else "cam.json")
    found = threshold_for(mapper, beside, followed)
    return _Network(mapper, found[0].threshold, *found)


def _map_videos(
    networks: Sequence[_Network], videos: Sequence[str], args: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[BadClip]]:
    """Write strip and maps of each video; return what the CSV has of them, and the bad ones."""
    done, bad = list[dict[str, Any]](), list[BadClip]()
    names = output_names(videos)
    streams = []
    for network in networks:
        store = video_store(videos, network.mapper.trained.spec.data.clip_seconds)
        streams.append(network.mapper.heatmaps(store, range(len(videos)), "skip", predicted=False))
    found = zip(names, zip(*streams, strict=True), strict=True)
    for name, heatmaps in followed(found, len(videos), "videos"):
        unread = [one for one in heatmaps if isinstance(one, BadClip)]
        bad += unread[:1]
        if not unread:
            done.append(_write(args.out / name, networks, heatmaps, args.frames))
    return done, bad


def _write(path: Path, networks: Sequence[_Network], heatmaps: Sequence[Heatmap], most: int | None) -> dict[str, Any]:
    """Write a video's strip and maps, whose names begin with `path`; return what the CSV has of it."""
    strip, maps = (path.with_name(path.name + ending) for ending in (".png", ".npz"))
    pairs = list(zip(networks, heatmaps, strict=True))
    shown = PurePath(*PurePath(heatmaps[0].path).parts[-2:])
    draw_strip(strip, str(shown), [_row(network, heatmap, most) for network, heatmap in pairs])
    save_maps(maps, *((heatmap, network.threshold) for network, heatmap in pairs))
    by_network = [{"network": network.title, **heatmap.record(network.threshold)} for network, heatmap in pairs]
    return {"path": heatmaps[0].path, "strip": str(strip), "maps": str(maps), "networks": by_network}


def _row(network: _Network, heatmap: Heatmap, most: int | None) -> Row:
    num_frames = len(heatmap.frames)
    places = np.linspace(0, num_frames - 1, min(num_frames, most or num_frames)).round().astype(int).tolist()
    share_above = share(heatmap.record(network.threshold)["foreground"])
    name = heatmap.name if network.mapper.trained.has_names else f"class {heatmap.label}"
    title = f"{name}, score {heatmap.score:.2f}, foreground {share_above}    {network.title}"
    foreground = heatmap.foreground(places, network.threshold)
    return Row(title, heatmap.frames[places].tolist(), heatmap.pictures[places], foreground)


def _about(network: _Network) -> dict[str, Any]:
    trained = network.mapper.trained
    about: dict[str, Any] = {"name": trained.spec.name, "network": trained.spec.model.title, "was_saved": False}
    about |= {"checkpoint": str(trained.path), "views": network.mapper.views(), "threshold": network.threshold}
    if network.record is not None:
        about |= {"file": str(network.file), "was_saved": network.was_saved, **asdict(network.record)}
    return about


def _text(result: dict[str, Any], networks: Sequence[_Network]) -> str:
    rows = [
        {
            "video": _printable(video["path"]),
            "network": row["network"] if len(networks) > 1 else "",
            "class": row["class"],
            "score": f"{row['score']:.2f}",
            "mean": f"{row['mean']:.3g}",
            "peak frame": str(row["peak_frame"]),
            "foreground": share(row["foreground"]),
            "strip": video["strip"],
        }
        for video in result["videos"]
        for row in video["networks"]
    ]
    table = [text_table(rows)] if rows else []
    return "\n".join([*table, *map(_threshold_text, networks), f"all of it: {result['csv']}"])


def _printable(path: str) -> str:
    """Return a path as a terminal takes it: bytes that are no UTF-8 are written out."""
    return path.encode("utf-8", "backslashreplace").decode()


def _threshold_text(network: _Network) -> str:
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
