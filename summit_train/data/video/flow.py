"""Optical flow: the motion of each pixel from one frame to the next, computed by OpenCV and coded in 8 bits.

A clip of flow is a clip of grey pictures x0, y0, x1, y1, ...: picture 2t is the horizontal and 2t + 1 the vertical
component of the flow from frame t to frame t + 1, so N frames have N - 1 fields and 2 (N - 1) pictures. The code is
that of dense_flow (Wang et al., "Temporal segment networks", section 3.2): v = round(255 (f + b) / (2 b)), clipped to
0 .. 255, with the bound b in pixels. Its inverse is (v - 128) 2 b / 255: zero stays zero, 256 - v is the negative of v.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from summit_train.core.errors import UserError

BOUND = 20.0
METHODS = ("tvl1", "dis")
PRESETS = ("ultrafast", "fast", "medium")
PRESET = "medium"
# OpenCV's DIS writes beyond its memory where the coarsest level of its pyramid is lower than a patch of 8 pixels.
MIN_SIDE = 32

# From two grey pictures uint8 (H, W) to the flow from the first to the second, float32 (H, W, 2): x, y in pixels.
Method = Callable[[NDArray[np.uint8], NDArray[np.uint8]], NDArray[np.float32]]


def encode(flow: NDArray[np.float32], bound: float = BOUND) -> NDArray[np.uint8]:
    """Return the code of flow in pixels, of any shape: zero is 128, -bound 0 and bound 255; what lies beyond is cut."""
    code: NDArray[np.float32] = np.rint(255 * (np.clip(flow, -bound, bound) + bound) / (2 * bound))
    return code.astype(np.uint8)


def flow_method(name: str, preset: str = PRESET) -> Method:
    """Return a method of METHODS; preset: of PRESETS, for 'dis'. All run on one thread and keep nothing between pairs.

    tvl1: Zach, Pock, Bischof, "A duality based approach for realtime TV-L1 optical flow", with OpenCV's defaults. dis:
    Kroeger et al., "Fast optical flow using dense inverse search". Raises UserError if OpenCV is not installed; the
    method raises UserError for pictures with a side below MIN_SIDE.
    """
    library = _opencv()
    # DIS cuts a picture into as many parts as there are threads, and its result depends on the parts.
    library.setNumThreads(1)
    if name == "dis":
        solver = library.DISOpticalFlow.create(PRESETS.index(preset))
    else:
        solver = library.optflow.createOptFlow_DualTVL1()

    def compute(before: NDArray[np.uint8], after: NDArray[np.uint8]) -> NDArray[np.float32]:
        height, width = before.shape
        if min(height, width) < MIN_SIDE:
            right = f"a side must have {MIN_SIDE}"
            raise UserError(f"a picture of {width} x {height} pixels is too small for flow: {right}")
        return np.asarray(solver.calc(before, after, None), np.float32)

    return compute


def grey(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the brightness (H, W) of an RGB picture (H, W, 3), by the weights of ITU-R BT.601."""
    library = _opencv()
    return np.asarray(library.cvtColor(picture, library.COLOR_RGB2GRAY), np.uint8)


def _opencv() -> Any:
    """Import OpenCV with its contributed modules. Raises UserError if they are not installed."""
    install = "pip install 'summit_train[flow]', that is opencv-contrib-python-headless"
    try:
        import cv2
    except ModuleNotFoundError as error:
        raise UserError(f"optical flow needs OpenCV (cv2), which is not installed: {install}") from error
    if not hasattr(cv2, "optflow"):
        raise UserError(f"the OpenCV that is installed has no TV-L1 (cv2.optflow): {install}")
    return cv2
