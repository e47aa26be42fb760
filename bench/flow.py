"""How exact optical flow is, and how fast: TV-L1 and DIS against ground truth, before and after the 8-bit code.

    python bench/flow.py --data DIR [--bound 20] [--repeats 3] [--json]

DIR has middlebury/NAME/{frame10.png,frame11.png,flow10.flo} (Baker et al., "A database and evaluation methodology for
optical flow") and kitti/{frame1.png,frame2.png,flow_gt.png} (Geiger et al., "Are we ready for autonomous driving?").
The error is the mean distance in pixels between the computed and the true vector, over the pixels whose truth is known.
Speed is pairs of frames a second of CPU time on one core, the fastest of the repeats, without decoding and encoding.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from summit_train.core.result import TextTable
from summit_train.data.video.flow import BOUND, PRESETS, Method, decode, encode, flow_method

UNKNOWN = 1e9  # in a .flo file: larger values
USUAL_SIZE = (340, 256)  # of the frames that flow networks are trained on, width and height
QUALITY = 95
METHODS = {"tvl1": ("tvl1", PRESETS[0]), **{f"dis {preset}": ("dis", preset) for preset in PRESETS}}


@dataclass(frozen=True)
class Pair:
    """Two grey frames (H, W), the true flow (H, W, 2) in pixels, and where it is known, (H, W)."""

    name: str
    before: NDArray[np.uint8]
    after: NDArray[np.uint8]
    truth: NDArray[np.float32]
    known: NDArray[np.bool_]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of middlebury/ and kitti/")
    parser.add_argument("--bound", type=float, default=BOUND, help="of the code, pixels [%(default)g]")
    parser.add_argument("--repeats", type=int, default=3, help="of each timed pair [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    pairs = list(read_pairs(args.data))
    if not pairs:
        sys.exit(f"{args.data}: must have middlebury/NAME/flow10.flo or kitti/flow_gt.png")
    rows = [
        {"pair": pair.name, "method": label} | measure(flow_method(*method), pair, args.bound, args.repeats)
        for pair in pairs
        for label, method in METHODS.items()
    ]
    about = [describe(pair, args.bound) for pair in pairs]
    values = {"bound": args.bound, "quality": QUALITY, "opencv": cv2.__version__, "pairs": about, "rows": rows}
    print(json.dumps(values) if args.json else as_text(values))
    return 0


def read_pairs(folder: Path) -> Iterator[Pair]:
    """Yield the pairs of Middlebury and KITTI that are below a folder."""
    for path in sorted(folder.glob("middlebury/*/flow10.flo")):
        # "PIEH", width and height as int32, then x and y of each pixel as float32
        content = path.read_bytes()
        width, height = np.frombuffer(content, "<i4", 2, 4)
        truth = np.frombuffer(content, "<f4", 2 * width * height, 12).reshape(height, width, 2)
        before, after = (cv2.imread(str(path.parent / f"frame{n}.png"), cv2.IMREAD_GRAYSCALE) for n in (10, 11))
        yield Pair(path.parent.name, before, after, truth, (np.abs(truth) < UNKNOWN).all(-1))
    for path in sorted(folder.glob("kitti/flow_gt.png")):
        # 16 bits: R and G are 64 f + 32768, B whether it is known; OpenCV gives them as B, G, R.
        coded = cv2.imread(str(path), cv2.IMREAD_UNCHANGED).astype(np.float32)
        before, after = (cv2.imread(str(path.parent / f"frame{n}.png"), cv2.IMREAD_GRAYSCALE) for n in (1, 2))
        yield Pair("KITTI", before, after, (coded[..., :0:-1] - 32768) / 64, coded[..., 0] > 0)


def describe(pair: Pair, bound: float) -> dict[str, Any]:
    """Say how large a pair is, and its true motions."""
    truth = pair.truth[pair.known]
    height, width = pair.before.shape
    lengths, beyond = np.linalg.norm(truth, axis=-1), (np.abs(truth) > bound).any(-1)
    sizes = {"pair": pair.name, "width": width, "height": height, "known": float(pair.known.mean())}
    motions = {"mean_motion": float(lengths.mean()), "largest_motion": float(lengths.max())}
    return sizes | motions | {"beyond_bound": float(beyond.mean())}


def measure(method: Method, pair: Pair, bound: float, repeats: int) -> dict[str, Any]:
    """Return the errors and the speed of a method on a pair."""

    def error(flow: NDArray[np.float32]) -> float:
        return float(np.linalg.norm(flow - pair.truth, axis=-1)[pair.known].mean())

    flow, seconds = timed(method, pair.before, pair.after, repeats)
    code = encode(flow, bound)
    pictures = [io.BytesIO(), io.BytesIO()]  # as `data flow` compresses them
    for component, picture in enumerate(pictures):
        Image.fromarray(code[..., component]).save(picture, "JPEG", quality=QUALITY)
    stored = np.stack([np.asarray(Image.open(picture)) for picture in pictures], -1)
    small = [cv2.resize(picture, USUAL_SIZE, interpolation=cv2.INTER_AREA) for picture in (pair.before, pair.after)]
    _, small_seconds = timed(method, small[0], small[1], repeats)
    return {
        "error": error(flow),
        "error_coded": error(decode(code, bound)),
        "error_jpeg": error(decode(stored, bound)),
        "cut": float((np.abs(flow) > bound).any(-1).mean()),
        "jpeg_bytes": sum(len(picture.getvalue()) for picture in pictures) / 2,
        "pairs_per_second": 1 / seconds,
        "pairs_per_second_340x256": 1 / small_seconds,
    }


def timed(
    method: Method, before: NDArray[np.uint8], after: NDArray[np.uint8], repeats: int
) -> tuple[NDArray[np.float32], float]:
    """Return the flow, and the seconds of CPU time of the fastest of the calls."""
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        flow = method(before, after)
        seconds.append(time.process_time() - began)
    return flow, min(seconds)


def as_text(values: dict[str, Any]) -> str:
    truth = [
        {
            "pair": about["pair"],
            "size": f"{about['width']} x {about['height']}",
            "known": f"{about['known']:.1%}",
            "mean motion": f"{about['mean_motion']:.2f}",
            "largest": f"{about['largest_motion']:.1f}",
            f"beyond {values['bound']:g}": f"{about['beyond_bound']:.1%}",
        }
        for about in values["pairs"]
    ]
    columns = {
        "error": "error:.2f", "8 bits": "error_coded:.2f", "JPEG": "error_jpeg:.2f", "cut": "cut:.1%",
        "bytes": "jpeg_bytes:,.0f", "pairs/s": "pairs_per_second:,.1f", "at 340 x 256": "pairs_per_second_340x256:,.1f",
    }  # fmt: skip
    rows = [
        {"pair": row["pair"], "method": row["method"]} | {c: f"{{{form}}}".format(**row) for c, form in columns.items()}
        for row in values["rows"]
    ]
    return f"{TextTable.of_records(truth)}\n\n{TextTable.of_records(rows)}"


if __name__ == "__main__":
    sys.exit(main())
