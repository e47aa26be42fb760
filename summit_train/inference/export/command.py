"""`summit-train export RUN|CHECKPOINT --out MODEL.onnx`: a network for other runtimes, checked before it is written."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from summit_train.core.errors import UserError
from summit_train.core.result import Result, TextTable, tell
from summit_train.core.session import check_single
from summit_train.core.text import counted, with_unit
from summit_train.inference.arguments import add_network, checked, open_named

_SIDES = range(32, 4097)  # of a picture, in pixels
_COUNTS = range(1, 10**9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size = checked(
        lambda text: tuple(map(int, text.split("x"))) if "x" in text else (int(text), int(text)),
        lambda size: len(size) == 2 and all(side in _SIDES for side in size),
        f"HEIGHTxWIDTH or one number, {_SIDES[0]} to {_SIDES[-1]:,} pixels, e.g. 256x320 or 224",
    )
    any_or = checked(
        lambda text: None if text == "any" else int(text), lambda n: n is None or n in _COUNTS, "1 or more, or any"
    )
    add_network(parser)
    add = parser.add_argument
    add("--out", required=True, type=Path, metavar="MODEL.onnx", help="MODEL.json is written, too")
    add("--card", action="store_true", help=argparse.SUPPRESS)  # removed
    add("--stream", action="store_true", help="the frame-by-frame form of a past-only network")
    add("--size", type=size, metavar="HxW|N", help="pixels of a frame [the square that eval scores]")
    add("--batch", type=any_or, default=1, metavar="N|any", help="clips or streams in a call; any: not fixed [1]")
    add("overrides", nargs="*", metavar="key=value", help="e.g. data.val=videos.csv: checked on its first")


def run(args: argparse.Namespace) -> Result:
    check_single("export")
    if args.card:
        right = "publish the checkpoint, which every command takes, and the run's report.html"
        raise UserError(f"--card was removed: {right}")
    try:
        from summit_train.inference.export.export import Export
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("onnx", "onnxruntime", "onnxscript"):
            raise
        packages = "pip install onnx onnxruntime onnxscript"
        raise UserError(f"export needs the package {error.name}, which is not installed: {packages}") from error
    description = Export(open_named(args, args.overrides), args.out, args.stream, args.size, args.batch, tell).run()
    return Result([_summary(description, args.out)], values=description)


def _summary(description: dict[str, Any], out: Path) -> TextTable:
    usage = description["preprocessing"]
    first, *caches = description["inputs"]
    graph = f"{description['kind']}, {first['name']} {' x '.join(map(str, first['shape']))}"
    if caches:
        elements = sum(math.prod(length for length in cache["shape"] if length != "batch") for cache in caches)
        graph += f", {counted(len(caches), 'cache')} of {elements:,} elements, {4 * elements:,} bytes"
    checks = description["verification"]
    video = checks["video"]
    none = f"no video: {checks['note']}"
    rows = {
        "network": f"{description['network']}, {len(description['classes']):,} classes",
        "from": f"{description['checkpoint']}, step {description['step']:,}",
        "graph": graph,
        "operators": ", ".join(f"{name} {number}" for name, number in description["operators"].items()),
        "opset": f"{description['versions']['opset']}, torch {description['versions']['torch']}",
        "frames": f"{usage['crop'][0]} x {usage['crop'][1]}, shorter side {usage['short_side']}",
        "check": f"{_difference(checks['random'])}, random pixels",
        "": f"{_difference(video)}, {video['path']}" if video else none,
        "written": f"{out} ({with_unit(description['bytes'], 'B')}), {out.with_suffix('.json')}",
    }
    return TextTable(list(rows.items()), left=2)


def _difference(found: dict[str, Any]) -> str:
    clips = f"{counted(found['clips'], 'clip')} of {counted(found['frames'], 'frame')}"
    differ = f"differ from the network's by up to {found['largest_difference']:.2g}"
    return f"{clips}: logits up to {found['largest_logit']:.3g} {differ}"
