"""`summit-train export RUN|CHECKPOINT --out MODEL.onnx`: a network for other runtimes, checked before it is written."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from summit_train.core.errors import UserError
from summit_train.core.progress import followed
from summit_train.core.session import check_single
from summit_train.core.text import counted, table, with_unit
from summit_train.inference.arguments import add_network, open_named, tell_numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_network(parser)
    parser.add_argument("--out", required=True, type=Path, metavar="MODEL.onnx", help="MODEL.json is put beside it")
    parser.add_argument("--stream", action="store_true", help="the frame-by-frame form of a past-only TSM")
    parser.add_argument("--size", metavar="HxW|N", help="pixels of a picture [the square that eval scores]")
    parser.add_argument("--batch", default="1", metavar="N|any", help="clips or streams in a call; any: not fixed [1]")
    parser.add_argument("--precision", choices=("fp32", "fp16", "int8"), default="fp32", help="[fp32]")
    parser.add_argument("--video", metavar="FILE", help="the video to check on [the first of the validation set]")
    parser.add_argument("--videos", type=int, metavar="N", help="fp16, int8: measure the accuracy on N videos [all]")
    parser.add_argument("--json", action="store_true", help="print MODEL.json and nothing else")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. data.val=videos.csv")


def run(args: argparse.Namespace) -> int:
    """Export, check, write; print what the check found."""
    check_single("export")
    try:
        from summit_train.inference.export.export import Request, export
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("onnx", "onnxruntime", "onnxscript"):
            raise
        wanted = "pip install onnx onnxruntime onnxscript"
        raise UserError(f"export needs the package {error.name}, which is not installed: {wanted}") from error
    size, precision = _size(args.size), args.precision
    request = Request(args.out, args.stream, size, _batch(args.batch), precision, args.video, args.videos)
    trained = open_named(args.run, args.overrides, args.classes)
    tell_numbers(trained)
    description = export(trained, request, _tell, followed)
    print(json.dumps(description) if args.json else _summary(description, args.out))
    return 0


def _size(text: str | None) -> tuple[int, int] | None:
    found = re.fullmatch(r"(\d{1,5})(?:x(\d{1,5}))?", text) if text is not None else None
    if text is not None and found is None:
        raise UserError(f"--size {text}: HEIGHTxWIDTH or one number is wanted, in pixels, e.g. 256x320 or 224")
    return found and (int(found[1]), int(found[2] or found[1]))


def _batch(text: str) -> int | None:
    if text != "any" and not re.fullmatch(r"-?\d{1,9}", text):
        raise UserError(f"--batch must be a number of clips, or any, got {text}")
    return None if text == "any" else int(text)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _summary(description: dict[str, Any], out: Path) -> str:
    usage, speed = description["preprocessing"], description["speed"]
    rows = {
        "network": f"{description['network']}, {len(description['classes']):,} classes",
        "from": f"{description['checkpoint']}, step {description['step']:,}",
        "graph": _graph(description),
        "operators": ", ".join(f"{name} {number}" for name, number in description["operators"].items()),
        "opset": f"{description['versions']['opset']}, torch {description['versions']['torch']}",
        "pictures": f"{usage['crop'][0]} x {usage['crop'][1]}, shorter side {usage['short_side']}",
        **_checks(description["verification"]),
        **_conversion(description["conversion"], description["precision"]),
        "speed": f"{speed['frames_per_second']:,.1f} frames/s in onnxruntime on this machine, "
        f"{counted(speed['threads'], 'thread')} ({speed['ms_a_call']:.2f} ms a call)",
        "written": f"{out} ({with_unit(description['bytes'], 'B')}), {out.with_suffix('.json')}",
    }
    return table([[name, text] for name, text in rows.items()], indent="", left=2)


def _graph(description: dict[str, Any]) -> str:
    first, *caches = description["inputs"]
    shape = " x ".join(map(str, first["shape"]))
    text = f"{description['kind']}, {description['precision']}, {first['name']} {shape}"
    elements = sum(math.prod(length for length in cache["shape"] if isinstance(length, int)) for cache in caches)
    size = elements * (2 if description["precision"] == "fp16" else 4)
    return text + (f", {counted(len(caches), 'cache')} of {elements:,} elements, {size:,} bytes" if caches else "")


def _checks(checked: dict[str, Any]) -> dict[str, str]:
    rows = {"check": f"{_difference(checked['random'])}, random pixels"}
    video = checked["video"]
    rows[""] = f"{_difference(video)}, {video['path']}" if video else f"no video: {checked['note']}"
    return rows


def _difference(found: dict[str, Any]) -> str:
    return (
        f"{counted(found['clips'], 'clip')} of {counted(found['frames'], 'frame')}: logits up to "
        f"{found['largest_logit']:.3g} differ from the network's by up to {found['largest_difference']:.2g}"
    )


def _conversion(found: dict[str, Any] | None, precision: str) -> dict[str, str]:
    """Say what fewer digits cost."""
    if found is None:
        return {}
    largest = max(part["largest_difference"] for part in (found["random"], found["video"]) if part)
    rows = {precision: f"logits differ from fp32 by up to {largest:.2g}"}
    accuracy = found["accuracy"]
    if not accuracy or accuracy["top1"] is None:
        return {**rows, "accuracy": f"not measured: {found['note'] or 'no video can be read'}"}
    unread = f", {counted(accuracy['unreadable'], 'video')} could not be read" if accuracy["unreadable"] else ""
    rows["accuracy"] = (
        f"top-1 {accuracy['top1']:.2f} %, in fp32 {accuracy['top1_fp32']:.2f} %; the same class in "
        f"{accuracy['agreement']:.1f} % of {counted(accuracy['videos'], 'video')}{unread}"
    )
    return rows
